//! Output that comes after the job's end, from processes that a worker has detached (`setsid`).
//!
//! A process of flow-launch for each stream that somebody still holds open reads on, so that nobody
//! gets a broken pipe. It writes to the stream's log file, and to the console if that is a terminal
//! or a file. A console that is a pipe gets nothing more: its reader waits for the end of the job
//! only.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write};
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
        let _ = io::stderr().write_all(&buffer[..count]);
        while queue.len() > 0 {
            let front = queue.front(READ);
            let written = front.len();
            let _ = io::stdout().write_all(front);
            queue.written(written);
        }
        let _ = io::stdout().flush();
        if count == 0 {
            return Ok(());
        }
    }
}
