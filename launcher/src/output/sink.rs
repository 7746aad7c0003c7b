//! The launcher's own standard output and standard error, written without ever blocking the event
//! loop.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, Mode, OFlags, fstat};
use rustix::io::Errno;
use rustix::termios::{Winsize, isatty, tcgetwinsize};

use crate::output::queue::OutputQueue;

/// Bytes that may wait to be written. Beyond this, workers' pipes are not read, and the workers
/// block.
const MAX_QUEUED_BYTES: usize = 1 << 20;

/// A pipe that is ready for writing takes this much without blocking (PIPE_BUF, pipe(7)).
const SAFE_WRITE: usize = 4096;

/// Bytes written at once to a descriptor that cannot block.
const LARGE_WRITE: usize = 1 << 16;

/// One output and its queue.
pub struct Sink {
    pub queue: OutputQueue,
    is_terminal: bool,
    /// None once the reader has gone.
    fd: Option<OwnedFd>,
    write_limit: usize,
}

/// Standard output and standard error; a single sink if both are the same file, so that their lines
/// do not mix.
pub struct Sinks {
    sinks: Vec<Sink>,
    /// Print errors only.
    quiet: bool,
}

impl Sinks {
    /// Makes sinks of flow-launch's standard output and standard error. There is one if both are
    /// the same file.
    pub fn standard(quiet: bool) -> io::Result<Sinks> {
        let stdout = io::stdout();
        let stderr = io::stderr();
        let out = fstat(&stdout)?;
        let err = fstat(&stderr)?;
        let mut sinks = vec![Sink::new(stdout.as_fd())?];
        if (out.st_dev, out.st_ino) != (err.st_dev, err.st_ino) {
            sinks.push(Sink::new(stderr.as_fd())?);
        }
        Ok(Sinks { sinks, quiet })
    }

    /// Returns the sink of stream 0 (standard output) or 1 (standard error).
    pub fn of(&self, which: usize) -> &Sink {
        &self.sinks[which.min(self.sinks.len() - 1)]
    }

    /// Returns the sink of a stream, to write to it.
    pub fn of_mut(&mut self, which: usize) -> &mut Sink {
        let last = self.sinks.len() - 1;
        &mut self.sinks[which.min(last)]
    }

    /// Writes as much as a sink takes. If its reader has gone: returns the streams that went there.
    pub fn write(&mut self, index: usize) -> &'static [usize] {
        let sink = &mut self.sinks[index];
        if let Err(error) = sink.write() {
            let name = if index == 0 { "standard output" } else { "standard error" };
            self.say(&format!("cannot write to {name}: {error}"));
        }
        if !self.sinks[index].is_closed() {
            return &[];
        }
        if self.sinks.len() == 1 {
            return &[0, 1];
        }
        if index == 0 { &[0] } else { &[1] }
    }

    /// Returns the descriptors to wait for, with their sinks' numbers.
    pub fn watch(&self) -> impl Iterator<Item = (usize, BorrowedFd<'_>)> {
        self.sinks
            .iter()
            .enumerate()
            .filter_map(|(index, sink)| Some((index, sink.wants_to_write()?)))
    }

    /// Notes that another program has written to the terminal.
    pub fn redraw(&mut self) {
        self.sinks.iter_mut().for_each(|sink| sink.queue.redraw());
    }

    /// Erases the lines at the foot of the terminal.
    pub fn erase_footer(&mut self) {
        self.of_mut(1).queue.erase_footer();
    }

    /// Returns the sink of the terminal with the lines.
    pub fn of_footer(&self) -> usize {
        self.sinks.len() - 1
    }

    /// Whether something waits for that terminal, which would take it at once.
    pub fn can_write_footer(&self) -> bool {
        let Some(fd) = self.of(1).wants_to_write() else { return false };
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::OUT)], Some(&now))
            .is_ok_and(|count| count > 0)
    }

    /// Prints an error to standard error.
    pub fn say(&mut self, message: &str) {
        self.of_mut(1).queue.say(message);
    }

    /// Prints a notice to standard error, unless `--quiet` is given.
    pub fn note(&mut self, message: &str) {
        if !self.quiet {
            self.say(message);
        }
    }
}

/// Opens a pipe or terminal a second time, non-blocking. Setting the flag on the given descriptor
/// would affect every process that shares it, such as the shell. None for anything else.
pub fn non_blocking(fd: BorrowedFd<'_>) -> io::Result<Option<OwnedFd>> {
    Ok(match FileType::from_raw_mode(fstat(fd)?.st_mode) {
        FileType::Fifo | FileType::CharacterDevice => {
            let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&fd));
            let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
            rustix::fs::open(path, flags, Mode::empty()).ok()
        }
        _ => None,
    })
}

impl Sink {
    fn new(fd: BorrowedFd<'_>) -> io::Result<Sink> {
        let own = non_blocking(fd)?;
        let is_terminal = isatty(fd);
        let can_erase = is_terminal && std::env::var_os("TERM").is_none_or(|name| name != "dumb");
        let queue = if can_erase { OutputQueue::for_screen() } else { OutputQueue::default() };
        let write_limit = if own.is_some() { LARGE_WRITE } else { SAFE_WRITE };
        let fd = own.map_or_else(|| fd.try_clone_to_owned(), Ok)?;
        Ok(Sink { queue, is_terminal, fd: Some(fd), write_limit })
    }

    /// Returns the size of the terminal, if the sink is one.
    pub fn terminal_size(&self) -> Option<Winsize> {
        tcgetwinsize(self.fd.as_ref().filter(|_| self.is_terminal)?).ok()
    }

    /// Returns the part of the terminal where output appears, if the sink is one.
    pub fn window(&self) -> Option<Winsize> {
        let size = self.terminal_size()?;
        let footer = self.queue.footer_height() as u16;
        Some(Winsize { ws_row: size.ws_row.saturating_sub(footer), ..size })
    }

    /// Whether its reader has gone.
    pub fn is_closed(&self) -> bool {
        self.fd.is_none()
    }

    /// Whether it has no room for more output for now.
    pub fn is_full(&self) -> bool {
        self.queue.len() >= MAX_QUEUED_BYTES
    }

    /// Returns the descriptor to wait for before calling [`Sink::write`], if anything is queued.
    pub fn wants_to_write(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().filter(|_| self.queue.len() > 0).map(AsFd::as_fd)
    }

    /// Writes some of the queue. An error closes the sink; it is returned unless it only says that
    /// the reader has gone.
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
                if error == Errno::PIPE { Ok(()) } else { Err(error) }
            }
        }
    }
}
