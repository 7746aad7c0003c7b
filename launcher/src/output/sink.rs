//! The launcher's own standard output and standard error, written without ever blocking the event
//! loop.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::termios::{isatty, tcgetwinsize, Winsize};

use crate::output::lines::Queue;

/// Bytes that may wait to be written; with more, workers' pipes are not read, so that they are held
/// up in turn.
const FULL: usize = 1 << 20;

/// A pipe that is ready for writing takes this much without blocking (PIPE_BUF, pipe(7)).
const SAFE_WRITE: usize = 4096;

/// A write where blocking is impossible anyhow.
const LARGE_WRITE: usize = 1 << 16;

/// One output and what waits to be written to it.
pub struct Sink {
    pub queue: Queue,
    is_terminal: bool,
    /// None when nobody reads any more.
    fd: Option<OwnedFd>,
    write_limit: usize,
}

/// Standard output and standard error; a single sink if both are the same file, so that they do not
/// mix either.
pub struct Sinks {
    sinks: Vec<Sink>,
    /// Whether only errors are said.
    quiet: bool,
}

impl Sinks {
    pub fn standard(quiet: bool) -> io::Result<Sinks> {
        let (stdout, stderr) = (io::stdout(), io::stderr());
        let (out, err) = (rustix::fs::fstat(&stdout)?, rustix::fs::fstat(&stderr)?);
        let mut sinks = vec![Sink::new(stdout.as_fd(), FileType::from_raw_mode(out.st_mode))?];
        if (out.st_dev, out.st_ino) != (err.st_dev, err.st_ino) {
            sinks.push(Sink::new(stderr.as_fd(), FileType::from_raw_mode(err.st_mode))?);
        }
        Ok(Sinks { sinks, quiet })
    }

    /// That of stream 0 (standard output) or 1 (standard error).
    pub fn of(&self, which: usize) -> &Sink {
        &self.sinks[which.min(self.sinks.len() - 1)]
    }

    pub fn of_mut(&mut self, which: usize) -> &mut Sink {
        let last = self.sinks.len() - 1;
        &mut self.sinks[which.min(last)]
    }

    /// Writes what a sink takes. When nobody reads it any more: the streams that went there.
    pub fn write(&mut self, index: usize) -> &'static [usize] {
        const STREAMS: [&[usize]; 3] = [&[0], &[1], &[0, 1]];
        let sink = &mut self.sinks[index];
        if let Err(error) = sink.write() {
            let name = if index == 0 { "standard output" } else { "standard error" };
            self.say(&format!("cannot write to {name}: {error}"));
        }
        match self.sinks[index].is_closed() {
            true => STREAMS[if self.sinks.len() == 1 { 2 } else { index }],
            false => &[],
        }
    }

    /// What to wait for, with the sink's number.
    pub fn watch(&self) -> impl Iterator<Item = (usize, BorrowedFd<'_>)> {
        self.sinks
            .iter()
            .enumerate()
            .filter_map(|(index, sink)| Some((index, sink.wants_to_write()?)))
    }

    /// Somebody else has written to the terminal.
    pub fn redraw(&mut self) {
        self.sinks.iter_mut().for_each(|sink| sink.queue.redraw());
    }

    /// An error, to standard error.
    pub fn say(&mut self, message: &str) {
        self.of_mut(1).queue.say(message);
    }

    /// What is no error, which a quiet launcher keeps to itself.
    pub fn note(&mut self, message: &str) {
        if !self.quiet {
            self.say(message);
        }
    }
}

impl Sink {
    /// A pipe or terminal is opened once more, non-blocking: the flag on the given one would be
    /// shared with whoever else has it, such as the shell.
    fn new(fd: BorrowedFd<'_>, kind: FileType) -> io::Result<Sink> {
        let own = match kind {
            FileType::Fifo | FileType::CharacterDevice => {
                let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&fd));
                let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
                rustix::fs::open(path, flags, Mode::empty()).ok()
            }
            _ => None,
        };
        let is_terminal = isatty(fd);
        let can_erase = is_terminal && std::env::var_os("TERM").is_none_or(|name| name != "dumb");
        let queue = if can_erase { Queue::for_screen() } else { Queue::default() };
        let write_limit = if own.is_some() { LARGE_WRITE } else { SAFE_WRITE };
        let fd = own.map_or_else(|| fd.try_clone_to_owned(), Ok)?;
        Ok(Sink { queue, is_terminal, fd: Some(fd), write_limit })
    }

    /// The size of the terminal that it is, if it is one.
    pub fn window(&self) -> Option<Winsize> {
        tcgetwinsize(self.fd.as_ref().filter(|_| self.is_terminal)?).ok()
    }

    pub fn is_closed(&self) -> bool {
        self.fd.is_none()
    }

    pub fn is_full(&self) -> bool {
        self.queue.len() >= FULL
    }

    /// What to wait for before calling [`Sink::write`], if there is anything to write.
    pub fn wants_to_write(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().filter(|_| self.queue.len() > 0).map(AsFd::as_fd)
    }

    /// Writes some of the queue. An error closes the sink; one other than "nobody reads any more"
    /// is returned.
    fn write(&mut self) -> Result<(), Errno> {
        let columns = self.window().map(|size| size.ws_col);
        let Some(fd) = &self.fd else { return Ok(()) };
        self.queue.refresh(columns);
        match rustix::io::write(fd, self.queue.front(self.write_limit)) {
            Ok(count) => {
                self.queue.written(count);
                Ok(())
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(()),
            Err(error) => {
                self.fd = None;
                self.queue.clear();
                if error == Errno::PIPE {
                    Ok(())
                } else {
                    Err(error)
                }
            }
        }
    }
}
