//! The workers of this node in one round: their processes, their output, their ends.

use std::time::{Duration, Instant, SystemTime};

use anyhow::Context;
use jiff::Timestamp;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::process::{Pid, Signal};

use crate::agent::exit_status::ExitStatus;
use crate::agent::reaper::Reaper;
use crate::agent::stop_policy::{Action, Cause, Ended, StopPolicy};
use crate::agent::worker::{Console, STDERR, Worker, WorkerStream, is_readable};
use crate::control::protocol::{Failure, KeptWorker, KeptWorkers, WorkerEnd};
use crate::control::status::WorkerStatus;
use crate::output::log_file::Filter;
use crate::output::pty;
use crate::output::remainder::Remainder;
use crate::output::sink::Sinks;
use crate::plan::WorkerSpec;
use crate::report::error_file::ErrorFile;
use crate::report::failure::{self, Outcome, Stopped};

/// Bytes read from a worker at once.
const READ: usize = 1 << 16;

/// A worker that may have asked something must be silent for this long before its prompt is shown.
const QUIET: Duration = Duration::from_millis(100);

/// The remedy if a limit of the system is reached.
const LIMITS: &str = "; start fewer workers, or raise the limits on open files and processes (ulimit -n, ulimit -u); \
     `flow-launch doctor` says more";

/// A descriptor of a worker group that `poll` has found ready.
pub enum WorkerReady {
    End(usize),
    Output(usize, usize),
}

/// The workers of this node in one round. Dropping it leaves its processes to the reaper.
pub struct WorkerGroup {
    pub round: u32,
    pub policy: StopPolicy,
    /// Why not all workers were started.
    pub shortfall: Option<String>,
    /// Workers that have failed, of which the coordinator has yet to say what follows.
    undecided: Vec<Ended>,
    workers: Vec<Worker>,
    /// The files for filtered lines, by stream.
    filters: [Option<Filter>; 2],
    buffer: Vec<u8>,
    /// The reaper was asked to kill the processes that stopped workers left behind.
    has_asked_to_kill_stragglers: bool,
}

impl WorkerGroup {
    /// Starts all workers. If only some could be started, `shortfall` says why: stop them.
    pub fn start(
        round: u32,
        attempt: u32,
        specs: Vec<WorkerSpec>,
        policy: StopPolicy,
        console: &Console,
        reaper: &mut Reaper,
    ) -> anyhow::Result<WorkerGroup> {
        let filters =
            console.logs.filters(attempt).context("cannot open the files for filtered lines")?;
        let mut group = WorkerGroup {
            round,
            policy,
            shortfall: None,
            undecided: Vec::new(),
            workers: Vec::with_capacity(specs.len()),
            filters,
            buffer: vec![0; READ],
            has_asked_to_kill_stragglers: false,
        };
        reaper.begin(round);
        for (index, spec) in specs.into_iter().enumerate() {
            let rank = spec.rank;
            match Worker::start(index, spec, attempt, console, reaper) {
                Ok(worker) => {
                    log::debug!("rank {rank} is process {}", worker.process.pid);
                    group.workers.push(worker);
                }
                Err(error) => {
                    group.shortfall = Some(cannot_start(rank, &error));
                    break;
                }
            }
        }
        Ok(group)
    }

    /// Starts a worker in place of the one with this index, which is settled; `attempt` is the number
    /// of starts before. Returns when the failed one has done first steps. The error says why none can
    /// be started; the failed one then stays.
    pub fn replace(
        &mut self,
        index: usize,
        spec: WorkerSpec,
        attempt: u32,
        console: &Console,
        reaper: &mut Reaper,
    ) -> Result<Vec<Instant>, String> {
        let rank = spec.rank;
        // Its output has files, and an order, of its own.
        let number = self.workers.len();
        let worker = Worker::start(number, spec, attempt, console, reaper)
            .map_err(|error| cannot_start(rank, &error))?;
        log::debug!("rank {rank} is process {} now", worker.process.pid);
        let mut failed = std::mem::replace(&mut self.workers[index], worker);
        failed.is_replaced = true;
        let resumed = failed.resumed(Instant::now());
        failed.flight = None;
        self.workers.push(failed);
        Ok(resumed)
    }

    /// Leaves it to the coordinator what follows the failure of a worker.
    pub fn await_verdict(&mut self, ended: Ended) {
        self.undecided.push(ended);
    }

    /// Returns the worker with this rank that the coordinator has decided about.
    pub fn take_undecided(&mut self, rank: u32) -> Option<Ended> {
        let mut undecided = self.undecided.iter();
        let position = undecided.position(|(index, ..)| self.workers[*index].spec.rank == rank)?;
        Some(self.undecided.remove(position))
    }

    /// Returns the workers as another leader is told of them.
    pub fn kept(&self, is_finished: bool, host: &str) -> KeptWorkers {
        let mut workers = Vec::new();
        for (index, worker) in self.workers.iter().enumerate() {
            if worker.is_replaced {
                continue;
            }
            let is_undecided = self.undecided.iter().any(|(undecided, ..)| *undecided == index);
            let end = match worker.end {
                None => None,
                Some(end) if !end.is_failure() => Some(WorkerEnd::Succeeded),
                Some(end) if is_undecided => {
                    let summary = failure::summary(&worker.outcome(), host);
                    Some(WorkerEnd::Failed(Failure { summary, end }))
                }
                Some(end) => Some(WorkerEnd::Lost(end)),
            };
            let WorkerSpec { rank, replacement, .. } = worker.spec;
            workers.push(KeptWorker { rank, replacement, end });
        }
        workers.sort_by_key(|worker| worker.rank);
        KeptWorkers { round: self.round, workers, is_finished }
    }

    /// Kills the worker with this rank, if as many had the rank before it.
    pub fn kill(&self, rank: u32, replacement: u32) {
        for worker in self.current().filter(|worker| worker.end.is_none()) {
            if (worker.spec.rank, worker.spec.replacement) == (rank, replacement) {
                worker.process.kill();
            }
        }
    }

    /// Returns how many workers had this one's place before it.
    pub fn replacement(&self, index: usize) -> u32 {
        self.workers[index].spec.replacement
    }

    /// Returns the workers that were not replaced.
    fn current(&self) -> impl Iterator<Item = &Worker> {
        self.workers.iter().filter(|worker| !worker.is_replaced)
    }

    /// Whether every worker has ended and is reaped.
    pub fn is_settled(&self) -> bool {
        self.workers.iter().all(|worker| worker.settled)
    }

    /// Whether every worker has ended for good, all that they wrote was read, and, if workers were
    /// stopped, no process of theirs is left.
    pub fn is_over(&self, reaper: &Reaper) -> bool {
        if self.ended_well() && !self.undecided.is_empty() {
            return false;
        }
        let mut streams = self.workers.iter().flat_map(|worker| &worker.streams);
        let is_read = streams.all(WorkerStream::is_read);
        // A launcher that must end does not wait: the reaper then kills stragglers anyway.
        let is_clean = self.ended_well()
            || self.policy.must_leave()
            || self.has_asked_to_kill_stragglers && !reaper.is_killing_stragglers();
        self.is_settled() && is_read && is_clean
    }

    /// Nothing has stopped the workers: once they have ended, they have succeeded.
    pub fn ended_well(&self) -> bool {
        self.policy.cause().is_none()
    }

    /// Returns what the workers do, in rank order.
    pub fn status(&self) -> Vec<WorkerStatus> {
        self.current().map(Worker::status).collect()
    }

    /// Returns when workers that were not replaced have done a first step: after their start, and after
    /// each change of the job's ranks.
    pub fn resumed(&self, now: Instant) -> Vec<Instant> {
        self.current().flat_map(|worker| worker.resumed(now)).collect()
    }

    /// Returns the ranks of all workers.
    pub fn ranks(&self) -> impl Iterator<Item = u32> + '_ {
        self.current().map(|worker| worker.spec.rank)
    }

    /// Returns the workers' processes, with their ranks.
    pub fn pids(&self) -> Vec<(Pid, u32)> {
        let present = self.workers.iter().filter(|worker| !worker.settled);
        present.map(|worker| (worker.process.pid, worker.spec.rank)).collect()
    }

    /// Returns the descriptors to wait for. A stream whose sink is full is left out.
    pub fn watch<'a>(&'a self, sinks: &Sinks) -> Vec<(WorkerReady, PollFd<'a>)> {
        let mut watched = Vec::new();
        for (index, worker) in self.workers.iter().enumerate() {
            let pidfd = worker.process.pidfd().filter(|_| worker.end.is_none() && !worker.settled);
            if let Some(pidfd) = pidfd {
                watched.push((
                    WorkerReady::End(index),
                    PollFd::from_borrowed_fd(pidfd, PollFlags::IN),
                ));
            }
            for (which, stream) in worker.streams.iter().enumerate() {
                if let Some(pipe) = stream.pipe.as_ref().filter(|_| !stream.must_wait(which, sinks))
                {
                    watched.push((
                        WorkerReady::Output(index, which),
                        PollFd::new(pipe, PollFlags::IN),
                    ));
                }
            }
        }
        watched
    }

    /// Returns when to call [`WorkerGroup::elapsed`]; the policy has a deadline of its own.
    pub fn deadline(&self, sinks: &Sinks) -> Option<Instant> {
        let streams = self.workers.iter().flat_map(|worker| worker.streams.iter().enumerate());
        streams.filter_map(|(which, stream)| stream.show_at(which, sinks)).min()
    }

    /// Shows prompts that are due.
    pub fn elapsed(&mut self, now: Instant, sinks: &mut Sinks) {
        for (which, stream) in
            self.workers.iter_mut().flat_map(|worker| worker.streams.iter_mut().enumerate())
        {
            if stream.show_at(which, sinks).is_some_and(|time| time <= now) {
                let queue = &mut sinks.of_mut(which).queue;
                if !stream.tee.may_show(queue) {
                    queue.interrupt();
                }
                stream.tee.show_partial(queue);
                stream.due = None;
            }
        }
    }

    /// Passes the terminal's new size on to workers that have a pseudoterminal.
    pub fn resize(&mut self, sinks: &Sinks) {
        for worker in self.workers.iter().filter(|worker| !worker.settled) {
            let resized = worker.streams.iter().enumerate().filter(|(which, stream)| {
                let ours = stream.pipe.as_ref().filter(|_| stream.is_pty);
                let size = sinks
                    .of(*which)
                    .window()
                    .map(|size| pty::beside(size, stream.tee.prefix_width()));
                ours.zip(size).is_some_and(|(ours, size)| pty::resize(ours, size))
            });
            if resized.count() > 0 {
                worker.process.signal(Signal::WINCH.as_raw());
            }
        }
    }

    /// Suspends all workers until [`WorkerGroup::resume`].
    pub fn pause(&self) {
        self.signal(Signal::STOP);
    }

    /// Lets paused workers go on.
    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        let workers = self.workers.iter().filter(|worker| !worker.settled);
        workers.for_each(|worker| worker.process.signal(signal.as_raw()));
    }

    /// Records how a worker ended; returns its rank.
    pub fn note_end(&mut self, index: usize) -> anyhow::Result<Option<(u32, ExitStatus)>> {
        let worker = &mut self.workers[index];
        let rank = worker.spec.rank;
        worker.ended_at = Some(Timestamp::now());
        worker.end =
            worker.process.end().with_context(|| format!("cannot learn how rank {rank} ended"))?;
        if worker.end.is_some_and(ExitStatus::is_failure) && self.policy.cause().is_none() {
            worker.read_last_output();
        }
        Ok(worker.end.map(|end| (rank, end)))
    }

    /// Returns when a failed worker recorded its error, if it did.
    pub fn error_time(&self, index: usize) -> Option<SystemTime> {
        self.workers[index].error.as_ref()?.time
    }

    /// Whether a worker has failed, and another that has recorded an error is still running.
    pub fn is_ending(&self) -> bool {
        let mut ends = self.current().filter_map(|worker| worker.end);
        let mut running = self.current().filter(|worker| worker.end.is_none());
        ends.any(ExitStatus::is_failure)
            && running
                .any(|worker| worker.error_file.as_deref().and_then(ErrorFile::read).is_some())
    }

    /// Carries out a decision of the policy.
    pub fn act(&mut self, action: Action) {
        for worker in self.workers.iter_mut().filter(|worker| !worker.settled) {
            let stopped = match action {
                Action::Nothing => return,
                Action::Send(signal) => {
                    worker.process.signal(signal);
                    Stopped::Asked
                }
                Action::Kill => {
                    worker.process.kill();
                    if self.policy.has_expired() { Stopped::Overdue } else { Stopped::Killed }
                }
                Action::Abandon => {
                    worker.settled = true;
                    worker.streams.iter_mut().for_each(|stream| stream.pipe = None);
                    Stopped::Killed
                }
            };
            if worker.end.is_none() {
                worker.stopped = stopped;
            }
        }
    }

    /// Reaps workers that have ended and kills the rest of their process groups. The children of a
    /// stopped worker (one may be writing a checkpoint) get the rest of the grace period, until
    /// they close its output. Processes that have left the group are killed by the reaper once all
    /// workers are gone.
    pub fn settle(&mut self, sinks: &mut Sinks, reaper: &mut Reaper) {
        let in_grace = self.policy.in_grace();
        for index in 0..self.workers.len() {
            let worker = &mut self.workers[index];
            if worker.end.is_none() || worker.settled {
                continue;
            }
            let is_open = worker.streams.iter().any(|stream| stream.pipe.is_some());
            if in_grace && worker.stopped == Stopped::Asked && is_open {
                continue;
            }
            worker.process.kill();
            reaper.unregister(worker.process.pid);
            worker.process.reap();
            worker.settled = true;
            for which in 0..worker.streams.len() {
                let stream = &mut self.workers[index].streams[which];
                stream.left = stream.unread();
                if stream.left == Some(0) {
                    self.end_output(index, which, sinks);
                }
            }
        }
        if self.is_settled() && !self.ended_well() && !self.has_asked_to_kill_stragglers {
            reaper.kill_stragglers();
            self.has_asked_to_kill_stragglers = true;
        }
    }

    /// Passes on output of a worker.
    pub fn read(&mut self, index: usize, which: usize, sinks: &mut Sinks) {
        let worker = &mut self.workers[index];
        let other = worker.streams[1 - which].tee.id;
        let stream = &mut worker.streams[which];
        let (Some(pipe), false) = (&stream.pipe, stream.must_wait(which, sinks)) else { return };
        let left = stream.left.filter(|left| *left > 0);
        let limit = left.map_or(READ, |left| READ.min(left as usize));
        let count = match rustix::io::read(pipe, &mut self.buffer[..limit]) {
            Ok(count) => count,
            Err(Errno::INTR | Errno::AGAIN) => return,
            // The worker's side is closed.
            Err(Errno::IO) if stream.is_pty => 0,
            Err(error) => {
                log::warn!("cannot read the output of rank {}: {error}", worker.spec.rank);
                0
            }
        };
        let bytes = &self.buffer[..count];
        if which == STDERR {
            worker.tail.push(bytes);
        }
        if bytes.contains(&b'\n') {
            sinks.of_mut(1 - which).queue.leave(other);
        }
        let queue = &mut sinks.of_mut(which).queue;
        if let Err(error) = stream.tee.put(bytes, queue, self.filters[which].as_mut()) {
            sinks.say(&error);
        }
        stream.due = stream.tee.is_due().then(|| Instant::now() + QUIET);
        if let Some(left) = left {
            let is_empty = stream.is_pty && !is_readable(pipe);
            stream.left = Some(if is_empty { 0 } else { left - count as u64 });
        }
        let is_worker_read = left.is_some() && stream.left == Some(0);
        if count == 0 {
            stream.pipe = None;
        }
        if count == 0 || is_worker_read {
            self.end_output(index, which, sinks);
        }
    }

    /// Ends a stream to which a worker writes no more: passes on an incomplete last line.
    fn end_output(&mut self, index: usize, which: usize, sinks: &mut Sinks) {
        let stream = &mut self.workers[index].streams[which];
        stream.due = None;
        let queue = &mut sinks.of_mut(which).queue;
        if let Err(error) = stream.tee.finish(queue, self.filters[which].as_mut()) {
            sinks.say(&error);
        }
    }

    /// Takes the streams that processes which the workers have detached may still write to.
    pub fn take_remainders(&mut self) -> Vec<Remainder> {
        let streams = self.workers.iter_mut().flat_map(|worker| worker.streams.iter_mut());
        let open = streams.enumerate().filter_map(|(number, stream)| {
            let pipe = stream.pipe.take()?;
            let (prefix, log) = stream.tee.take_rest();
            // Each worker has two streams.
            Some(Remainder { console: prefix.map(|prefix| (number % 2, prefix)), log, pipe })
        });
        open.collect()
    }

    /// Stops reading workers' output.
    pub fn hang_up(&mut self) {
        self.workers
            .iter_mut()
            .flat_map(|worker| &mut worker.streams)
            .for_each(|stream| stream.pipe = None);
    }

    /// Notes that the reader of this output has gone: closes the streams that go nowhere else, so
    /// that their workers get SIGPIPE.
    pub fn leave_console(&mut self, which: usize) {
        for stream in self.workers.iter_mut().map(|worker| &mut worker.streams[which]) {
            if !stream.tee.leave_console() {
                stream.pipe = None;
            }
        }
    }

    /// Returns how the workers ended, in rank order.
    pub fn outcomes(&self) -> Vec<Outcome<'_>> {
        self.current().map(Worker::outcome).collect()
    }

    /// Returns how a worker ended, if it has.
    pub fn outcome(&self, index: usize) -> Outcome<'_> {
        self.workers[index].outcome()
    }

    /// Returns the worker (by index) that failed first, and how.
    pub fn first_failure(&self) -> Option<(usize, ExitStatus)> {
        match self.policy.cause()? {
            Cause::Failure(first) => {
                Some((first, self.workers[first].end.unwrap_or(ExitStatus::Exit(1))))
            }
            Cause::Signal(_) | Cause::Coordinator => None,
        }
    }

    /// Returns the error that the first failed worker recorded.
    pub fn first_error(&self) -> Option<(&ErrorFile, ExitStatus)> {
        let (first, end) = self.first_failure()?;
        Some((self.workers[first].error.as_ref()?, end))
    }

    /// Whether the first failure is SIGPIPE because our reader has gone: `flow-launch yes | head
    /// -1` is as quiet as `yes | head -1`.
    pub fn ended_by_closed_output(&self, sinks: &Sinks) -> bool {
        let broken_pipe = ExitStatus::Signal(Signal::PIPE.as_raw());
        sinks.of(0).is_closed() && self.first_failure().is_some_and(|(_, end)| end == broken_pipe)
    }
}

/// Says that a worker cannot be started.
fn cannot_start(rank: u32, error: &std::io::Error) -> String {
    let errno = Errno::from_io_error(error);
    let limited = matches!(errno, Some(Errno::MFILE | Errno::NFILE | Errno::AGAIN | Errno::NOMEM));
    let advice = if limited { LIMITS } else { "" };
    format!("cannot start rank {rank}: {error}{advice}")
}
