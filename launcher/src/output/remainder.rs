//! Output that comes after the job's end, from processes that a worker has detached (`setsid`).
//!
//! A process of flow-launch for each stream that somebody still holds open reads on, so that nobody
//! gets a broken pipe. It writes to the stream's log file, and to the console if that is a terminal
//! or a file. A console that is a pipe gets nothing more: its reader waits for the end of the job
//! only.
//!
//! Nobody ends this process: it ends when nobody holds the stream any more, even if the console is
//! stuck. What a full disk takes is said in the log file, once there is space, or on the console.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode, Stdio};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, fstat};
use rustix::io::Errno;
use rustix::process::setsid;

use crate::output::lines::{Assembler, Segment, Source};
use crate::output::queue::OutputQueue;
use crate::output::sink::non_blocking;

/// First argument of a flow-launch process that reads on. The second is the prefix of each line.
pub const HIDDEN_FLAG: &str = "--read-on";

/// Bytes read at once.
const READ: usize = 1 << 16;

/// A stream that somebody still holds open at the end of the job.
pub struct Remainder {
    /// The number of our own output that shows it, and the prefix; None if it is not shown.
    pub console: Option<(usize, String)>,
    pub log: Option<File>,
    pub pipe: OwnedFd,
}

impl Remainder {
    /// Starts a process that reads the rest, if there may be one.
    pub fn read_on(self) -> io::Result<()> {
        if is_over(&self.pipe) {
            return Ok(());
        }
        let (which, prefix) = self.console.unzip();
        let console = match which {
            Some(0) => stdio(io::stdout().as_fd())?,
            Some(_) => stdio(io::stderr().as_fd())?,
            None => Stdio::null(),
        };
        let mut command = Command::new("/proc/self/exe");
        command.arg0("flow-launch").arg(HIDDEN_FLAG).arg(prefix.unwrap_or_default());
        command.stdin(self.pipe).stdout(console);
        command.stderr(self.log.map_or_else(Stdio::null, Stdio::from));
        command.spawn().map(drop)
    }
}

/// Nobody holds the other side open, and nothing is left to read.
fn is_over(pipe: &OwnedFd) -> bool {
    let mut polled = [PollFd::new(pipe, PollFlags::IN)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut polled, Some(&now)).is_ok() && polled[0].revents() == PollFlags::HUP
}

/// Copies one of our own outputs for another process, or nothing in place of a pipe.
fn stdio(fd: BorrowedFd<'_>) -> io::Result<Stdio> {
    match FileType::from_raw_mode(fstat(fd)?.st_mode) {
        FileType::Fifo | FileType::Socket => Ok(Stdio::null()),
        _ => Ok(fd.try_clone_to_owned()?.into()),
    }
}

/// Runs the process that reads on: from standard input, to the console at standard output and the
/// log file at standard error.
pub fn main(mut arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let prefix = arguments.next().unwrap_or_default().into_vec();
    // It is not in the foreground of the terminal any more, and must not be stopped with who is.
    let _ = setsid();
    match copy(&prefix) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE, // there is nobody left to tell
    }
}

fn copy(prefix: &[u8]) -> io::Result<()> {
    let stdout = io::stdout();
    let console = match non_blocking(stdout.as_fd())? {
        Some(console) => console,
        None => stdout.as_fd().try_clone_to_owned()?,
    };
    let mut log = Log { file: File::from(io::stderr().as_fd().try_clone_to_owned()?), lack: None };
    let source = Source { id: 0, prefix, is_live: false };
    let mut assembler = Assembler::new();
    let mut queue = OutputQueue::default();
    let mut buffer = vec![0; READ];
    // Our side of a pseudoterminal is non-blocking.
    rustix::io::ioctl_fionbio(io::stdin(), false)?;
    loop {
        let count = match rustix::io::read(io::stdin(), &mut buffer) {
            Ok(count) => count,
            Err(Errno::INTR) => continue,
            // The end of a pseudoterminal.
            Err(Errno::IO) => 0,
            Err(error) => return Err(error.into()),
        };
        let mut put = |segment: Segment| queue.put(&source, segment.rest());
        if count == 0 {
            assembler.finish(&mut put);
        } else {
            assembler.feed(&buffer[..count], &mut put);
        }
        // An output that fails is no reason to break the other one, or the pipe.
        log.append(&buffer[..count]);
        if count == 0
            && let Some(lack) = &log.lack
        {
            let path = std::fs::read_link("/proc/self/fd/2")?;
            queue.say(&format!("{} lacks the last {}", path.display(), lack.words()));
        }
        while queue.len() > 0 {
            let front = queue.front(READ);
            let written = front.len();
            show(&console, front);
            queue.written(written);
        }
        if count == 0 {
            return Ok(());
        }
    }
}

/// Writes to the console, unless that takes nothing and nobody holds the stream any more.
fn show(console: &OwnedFd, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        match rustix::io::write(console, bytes) {
            Ok(count) => bytes = &bytes[count..],
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                let stdin = io::stdin();
                let mut polled =
                    [PollFd::new(console, PollFlags::OUT), PollFd::new(&stdin, PollFlags::empty())];
                let _ = poll(&mut polled, None);
                if polled[0].revents().is_empty() && polled[1].revents() == PollFlags::HUP {
                    return;
                }
            }
            Err(_) => return,
        }
    }
}

/// The log file, which says what is missing in it.
struct Log<W> {
    file: W,
    lack: Option<Lack>,
}

/// What could not be written to the log file.
struct Lack {
    bytes: usize,
    cause: io::Error,
}

impl Lack {
    fn words(&self) -> String {
        format!("{} bytes of output: {}", self.bytes, self.cause)
    }
}

impl<W: Write> Log<W> {
    /// Appends. If bytes are missing before these, a line says so first; while it cannot be written,
    /// these are missing as well.
    fn append(&mut self, mut bytes: &[u8]) {
        if let Some(lack) = &mut self.lack {
            let line = format!("\nflow-launch: here are missing {}\n", lack.words());
            if self.file.write_all(line.as_bytes()).is_err() {
                lack.bytes += bytes.len();
                return;
            }
            self.lack = None;
        }
        while !bytes.is_empty() {
            match self.file.write(bytes) {
                Ok(count) => bytes = &bytes[count..],
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(cause) => {
                    self.lack = Some(Lack { bytes: bytes.len(), cause });
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A disk with space for so many bytes.
    struct Disk {
        free: usize,
        written: Vec<u8>,
    }

    impl Write for Disk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            if self.free == 0 {
                return Err(ErrorKind::StorageFull.into());
            }
            let count = bytes.len().min(self.free);
            self.free -= count;
            self.written.extend(&bytes[..count]);
            Ok(count)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_log_says_what_a_full_disk_has_taken() {
        let mut log = Log { file: Disk { free: 4, written: Vec::new() }, lack: None };
        log.append(b"one\ntwo\n");
        log.append(b"three\n");
        assert_eq!(log.lack.as_ref().map(|lack| lack.bytes), Some(10));
        log.file.free = 1000;
        log.append(b"four\n");
        let line = "flow-launch: here are missing 10 bytes of output: no storage space";
        let text = format!("one\n\n{line}\nfour\n");
        assert_eq!(String::from_utf8(log.file.written).unwrap(), text);
        assert!(log.lack.is_none());
    }
}
