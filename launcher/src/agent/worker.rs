//! One worker of a worker group: its process, its output, its end.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::agent::exit_status::ExitStatus;
use crate::agent::flight::FlightFile;
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

/// The time after `QUIET` that a prompt also waits for the end of another stream's line.
const LINE_TIMEOUT: Duration = Duration::from_secs(1);

/// Index of a stream of a worker.
pub const STDERR: usize = StreamKind::Stderr as usize;

/// A worker: its process, its streams and its end.
pub struct Worker {
    pub spec: WorkerSpec,
    pub process: Process,
    pub started: Instant,
    pub flight: Option<FlightFile>,
    /// Standard output and standard error.
    pub streams: Vec<WorkerStream>,
    pub tail: Tail,
    pub error_file: Option<PathBuf>,
    /// The error it recorded there, if it was among the first to fail.
    pub error: Option<ErrorFile>,
    /// The worker's end, once it has ended.
    pub end: Option<ExitStatus>,
    pub ended_at: Option<Timestamp>,
    pub stopped: Stopped,
    /// Another worker has its place now.
    pub is_replaced: bool,
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
    /// Once the worker has ended: the bytes still to be read of what it wrote. Processes that it
    /// left behind may hold the pipe open for ever.
    pub left: Option<u64>,
    /// The time at which to show an incomplete line.
    pub due: Option<Instant>,
}

/// The places to which workers' output goes and from which their input comes.
pub struct Console<'a> {
    pub sinks: &'a Sinks,
    pub logs: &'a LogFiles,
    /// Somebody may answer a worker's prompt.
    pub has_input: bool,
}

/// Whether standard input is not `/dev/null`.
pub fn has_input() -> bool {
    let input = rustix::fs::fstat(io::stdin()).map(|stat| stat.st_rdev);
    let nothing = rustix::fs::stat("/dev/null").map(|stat| stat.st_rdev);
    input.ok() != nothing.ok()
}

impl WorkerStream {
    /// Returns when an incomplete line is shown.
    pub fn show_at(&self, which: usize, sinks: &Sinks) -> Option<Instant> {
        let is_free = self.tee.may_show(&sinks.of(which).queue);
        self.due.map(|due| if is_free { due } else { due + LINE_TIMEOUT })
    }

    /// Returns how many bytes are to be read now; None without a pipe.
    pub fn unread(&self) -> Option<u64> {
        let pipe = self.pipe.as_ref()?;
        if !self.is_pty {
            return Some(rustix::io::ioctl_fionread(pipe).unwrap_or(0));
        }
        // A pseudoterminal does not say how much it holds.
        Some(if is_readable(pipe) { pty::HOLDS } else { 0 })
    }

    /// Whether all that the worker itself wrote was read.
    pub fn is_read(&self) -> bool {
        self.pipe.is_none() || self.left == Some(0)
    }

    /// Whether the console has no room for more output.
    pub fn must_wait(&self, which: usize, sinks: &Sinks) -> bool {
        self.tee.is_shown() && sinks.of(which).is_full()
    }
}

impl Worker {
    /// Starts the worker `index` of its group. `attempt` is the number of restarts so far.
    pub fn start(
        index: usize,
        mut spec: WorkerSpec,
        attempt: u32,
        console: &Console,
        reaper: &mut Reaper,
    ) -> std::io::Result<Worker> {
        let local_rank = spec.local_rank;
        console.logs.clear_error_file(attempt, local_rank)?;
        let mut tees = console.logs.tees(attempt, index, spec.rank, local_rank)?;
        let mut files = [None, None];
        let mut terminals = [None, None];
        for (which, tee) in tees.iter_mut().enumerate() {
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
        let flight = FlightFile::new();
        spec.environment.push(FlightFile::variable(flight.as_ref()));
        let (process, pipes) = Process::start(&spec, files, reaper)?;
        let mut streams = Vec::with_capacity(tees.len());
        for ((tee, pipe), terminal) in tees.into_iter().zip(pipes).zip(terminals) {
            let is_pty = terminal.is_some();
            let pipe = terminal.or(pipe);
            streams.push(WorkerStream { pipe, is_pty, tee, left: None, due: None });
        }
        Ok(Worker {
            spec,
            process,
            started: Instant::now(),
            flight,
            streams,
            tail: Tail::default(),
            error_file: console.logs.error_file(attempt, local_rank),
            error: None,
            end: None,
            ended_at: None,
            stopped: Stopped::No,
            is_replaced: false,
            settled: false,
        })
    }

    /// Reads its error file, and the end of its log if it wrote that itself.
    pub fn read_last_output(&mut self) {
        self.error = self.error_file.as_deref().and_then(ErrorFile::read);
        let stderr = &self.streams[STDERR];
        if let Some(log) = stderr.tee.file().filter(|_| stderr.pipe.is_none()) {
            self.tail = Tail::of_file(log);
        }
    }

    /// Returns the worker's part in a report.
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

/// Opens both sides of a pseudoterminal, if the stream is shown on a terminal.
fn terminal(tee: &StreamTee, sink: &Sink) -> Option<(OwnedFd, File)> {
    let size = sink.window().filter(|_| tee.is_shown())?;
    let opened = pty::open(pty::beside(size, tee.prefix_width()));
    opened
        .inspect_err(|error| {
            log::warn!("no terminal for a worker: cannot open a pseudoterminal: {error}")
        })
        .ok()
}

/// Whether there is something to read, or the end of it.
pub fn is_readable(fd: &OwnedFd) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&now)).is_ok_and(|count| count > 0)
}
