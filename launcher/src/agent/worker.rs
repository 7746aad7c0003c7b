//! One worker of a worker group: its process, its output, its end.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use rustix::event::{poll, PollFd, PollFlags, Timespec};

use crate::agent::exit_status::ExitStatus;
use crate::agent::process::Process;
use crate::agent::reaper::Reaper;
use crate::output::log_files::LogFiles;
use crate::output::pty;
use crate::output::routing::StreamKind;
use crate::output::sink::{Sink, Sinks};
use crate::output::tee::{Partial, StreamTee};
use crate::plan::WorkerSpec;
use crate::report::error_file::ErrorFile;
use crate::report::failure::{Outcome, Stopped, Tail};

/// How much longer than after `QUIET` a prompt waits for the end of another stream's line.
const LINE_TIMEOUT: Duration = Duration::from_secs(1);

/// Index of a stream of a worker.
pub const STDERR: usize = StreamKind::Stderr as usize;

pub struct Worker {
    pub spec: WorkerSpec,
    pub process: Process,
    pub streams: [WorkerStream; 2],
    pub tail: Tail,
    pub error_file: Option<PathBuf>,
    /// The error it recorded there, if it was among the first to fail.
    pub error: Option<ErrorFile>,
    /// How it ended, once it has.
    pub end: Option<ExitStatus>,
    pub ended_at: Option<Timestamp>,
    pub stopped: Stopped,
    /// Done: it is reaped and its process group is gone, or it was given up.
    pub settled: bool,
}

/// Standard output or standard error of a worker.
pub struct WorkerStream {
    /// The pipe, or our side of a pseudoterminal. None once it has ended, or if the worker writes
    /// to a file itself.
    pub pipe: Option<OwnedFd>,
    pub is_pty: bool,
    pub tee: StreamTee,
    /// Once the worker has ended: the bytes still to be read. Processes that it left behind may
    /// hold the pipe open for ever.
    pub left: Option<u64>,
    /// When to show an incomplete line.
    pub due: Option<Instant>,
}

/// Where workers' output is shown and their input comes from.
pub struct Console<'a> {
    pub sinks: &'a Sinks,
    /// Somebody may answer a worker's prompt.
    pub has_input: bool,
}

/// Whether standard input is not `/dev/null`.
pub fn has_input() -> bool {
    let device = |fd: BorrowedFd| rustix::fs::fstat(fd).map(|stat| stat.st_rdev);
    let nothing = File::open("/dev/null").ok().and_then(|nothing| device(nothing.as_fd()).ok());
    device(io::stdin().as_fd()).ok() != nothing
}

impl WorkerStream {
    /// When an incomplete line is shown.
    pub fn show_at(&self, which: usize, sinks: &Sinks) -> Option<Instant> {
        let is_free = self.tee.may_show(&sinks.of(which).queue);
        self.due.map(|due| if is_free { due } else { due + LINE_TIMEOUT })
    }

    /// The console has no room for more output.
    pub fn must_wait(&self, which: usize, sinks: &Sinks) -> bool {
        self.tee.is_shown() && sinks.of(which).is_full()
    }
}

impl Worker {
    pub fn start(
        index: usize,
        spec: WorkerSpec,
        attempt: u32,
        log_files: &LogFiles,
        console: &Console,
        reaper: &mut Reaper,
    ) -> std::io::Result<Worker> {
        let local_rank = spec.local_rank;
        log_files.clear_error_file(attempt, local_rank)?;
        let mut tee = log_files.tees(attempt, index, spec.rank, local_rank)?;
        let (mut files, mut terminals) = ([None, None], [None, None]);
        for (which, tee) in tee.iter_mut().enumerate() {
            files[which] = tee.direct()?;
            if files[which].is_none() && spec.is_foreground {
                (terminals[which], files[which]) = terminal(tee, console.sinks.of(which)).unzip();
            }
            tee.partial = match &terminals[which] {
                Some(_) => Partial::AtOnce,
                None if spec.has_input && console.has_input => Partial::AfterQuiet,
                None => Partial::Never,
            };
        }
        let (process, pipes) = Process::start(&spec, files, reaper)?;
        let [stdout, stderr] = tee;
        let ([out, err], [out_terminal, err_terminal]) = (pipes, terminals);
        let stream = |pipe, terminal: Option<OwnedFd>, tee| {
            let is_pty = terminal.is_some();
            WorkerStream { pipe: terminal.or(pipe), is_pty, tee, left: None, due: None }
        };
        Ok(Worker {
            spec,
            process,
            streams: [stream(out, out_terminal, stdout), stream(err, err_terminal, stderr)],
            tail: Tail::default(),
            error_file: log_files.error_file(attempt, local_rank),
            error: None,
            end: None,
            ended_at: None,
            stopped: Stopped::No,
            settled: false,
        })
    }

    /// Reads its error file, and the end of its log if it wrote that itself.
    pub fn read_last_output(&mut self) {
        self.error = self.error_file.as_deref().and_then(ErrorFile::read);
        if let (None, Some(log)) = (&self.streams[STDERR].pipe, self.streams[STDERR].tee.file()) {
            self.tail = Tail::of_file(log);
        }
    }

    pub fn outcome(&self) -> Outcome<'_> {
        Outcome {
            rank: self.spec.rank,
            local_rank: self.spec.local_rank,
            pid: self.process.pid.as_raw_pid(),
            end: self.end,
            time: self
                .error
                .as_ref()
                .and_then(|error| Timestamp::try_from(error.time?).ok())
                .or(self.ended_at),
            stopped: self.stopped,
            tail: &self.tail,
            error: self.error.as_ref(),
            log: self.streams[STDERR].tee.file().map(|log| log.path.as_path()),
        }
    }
}

/// Both sides of a pseudoterminal, if the stream is shown on a terminal.
fn terminal(tee: &StreamTee, sink: &Sink) -> Option<(OwnedFd, File)> {
    let size = sink.window().filter(|_| tee.is_shown())?;
    let opened = pty::open(pty::beside(size, tee.prefix_width()));
    opened
        .inspect_err(|error| {
            log::warn!("no terminal for a worker: cannot open a pseudoterminal: {error}")
        })
        .ok()
}

/// There is something to read, or the end of it.
pub fn is_readable(fd: &OwnedFd) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&now)).is_ok_and(|count| count > 0)
}
