//! The event loop: one thread waits in `poll` for signals, ends of workers and output, and never blocks elsewhere.

use std::io::IsTerminal;
use std::os::fd::OwnedFd;
use std::time::Instant;

use anyhow::Context;
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::process::{getrlimit, setrlimit, Resource, Rlimit, Signal};

use crate::guard::Guard;
use crate::job::Job;
use crate::output::{Assembler, StreamId};
use crate::plan::WorkerSpec;
use crate::policy::{Action, Cause, Policy};
use crate::rendezvous::Rendezvous;
use crate::report::{self, Outcome, Stopped, Tail};
use crate::signals::Signals;
use crate::sink::{self, Sink};
use crate::worker::{End, Process};

/// Bytes read from a worker at once.
const READ: usize = 1 << 16;

/// Index of a stream of a worker, and of the sink it goes to where there are two.
const STDERR: usize = 1;

/// Descriptors the launcher needs beside those of its workers, with room to spare.
const OWN_DESCRIPTORS: u64 = 64;

/// Descriptors per worker: its pidfd, its two pipes and a connection to the store.
const WORKER_DESCRIPTORS: u64 = 4;

/// What to do where the system has no room for more.
const LIMITS: &str = "; start fewer workers, or raise the limits on open files and processes (ulimit -n, ulimit -u)";

struct Worker {
    spec: WorkerSpec,
    process: Process,
    /// What goes before each of its lines.
    prefix: Vec<u8>,
    streams: [Stream; 2],
    tail: Tail,
    /// How it ended, once it has.
    end: Option<End>,
    stopped: Stopped,
    /// Nothing more is to be done: it is reaped and its group is gone, or it was given up.
    settled: bool,
}

/// Standard output or standard error of a worker.
struct Stream {
    pipe: Option<OwnedFd>,
    assembler: Assembler,
    /// Bytes still to be read, when the worker has ended: processes it left behind may hold the pipe open for ever.
    left: Option<u64>,
}

/// What `poll` has found ready.
enum Ready {
    Signals,
    Sink(usize),
    End(usize),
    Output(usize, usize),
}

/// A running job.
pub struct Supervisor {
    workers: Vec<Worker>,
    sinks: Vec<Sink>,
    policy: Policy,
    signals: Signals,
    rendezvous: Rendezvous,
    buffer: Vec<u8>,
    // Last, so that it is dropped last.
    guard: Guard,
}

impl Supervisor {
    /// Starts all workers. On an error those already started are killed.
    pub fn start(
        job: &Job,
        specs: Vec<WorkerSpec>,
        signals: Signals,
        mut guard: Guard,
        rendezvous: Rendezvous,
        note: Option<String>,
    ) -> anyhow::Result<Supervisor> {
        allow_descriptors(OWN_DESCRIPTORS + WORKER_DESCRIPTORS * specs.len() as u64);
        let mut sinks = sink::standard().context("cannot open standard output and standard error")?;
        if let Some((note, sink)) = note.zip(sinks.last_mut()) {
            sink.queue.say(&note);
        }
        let prefix = job.output.prefix || std::io::stdout().is_terminal();
        let mut workers = Vec::with_capacity(specs.len());
        for spec in specs {
            let rank = spec.rank;
            let (process, pipes) = Process::start(&spec, &mut guard).map_err(|error| {
                let errno = Errno::from_io_error(&error);
                let limited = matches!(errno, Some(Errno::MFILE | Errno::NFILE | Errno::AGAIN | Errno::NOMEM));
                let advice = if limited { LIMITS } else { "" };
                anyhow::anyhow!("cannot start rank {rank}: {error}{advice}")
            })?;
            log::debug!("rank {rank} is process {}", process.pid);
            let streams = pipes.map(|pipe| Stream { pipe: Some(pipe), assembler: Assembler::new(), left: None });
            workers.push(Worker {
                prefix: if prefix { format!("[rank {rank}] ").into_bytes() } else { Vec::new() },
                spec,
                process,
                streams,
                tail: Tail::default(),
                end: None,
                stopped: Stopped::No,
                settled: false,
            });
        }
        let policy = Policy::new(job.grace);
        Ok(Supervisor { workers, sinks, policy, signals, rendezvous, buffer: vec![0; READ], guard })
    }

    /// Sees the job to its end; returns the exit code that tells of it.
    pub fn run(mut self) -> anyhow::Result<u8> {
        while !(self.is_settled() && self.workers.iter().all(|worker| worker.streams.iter().all(|s| s.pipe.is_none())))
        {
            if !self.turn()? && self.must_leave() {
                break;
            }
        }
        let code = self.conclude();
        if code == 0 {
            self.guard.dismiss();
        }
        while self.sinks.iter().any(|sink| sink.wants_to_write().is_some()) {
            if !self.turn()? && self.must_leave() {
                break;
            }
        }
        Ok(code)
    }

    /// Every worker has gone.
    fn is_settled(&self) -> bool {
        self.workers.iter().all(|worker| worker.settled)
    }

    /// There is nothing to wait for but a reader of our output, and the launcher was told to end: no longer wait.
    fn must_leave(&self) -> bool {
        self.policy.must_leave() && self.is_settled()
    }

    /// Waits for something to happen and deals with it; false if nothing did.
    fn turn(&mut self) -> anyhow::Result<bool> {
        let ready = self.wait().context("cannot wait for workers")?;
        let is_idle = ready.is_empty();
        let mut ended = Vec::new();
        for event in ready {
            match event {
                Ready::Signals => {
                    while let Some(signal) = self.signals.next() {
                        log::debug!("received signal {signal}");
                        let action = self.policy.signalled(signal, Instant::now());
                        self.act(action);
                    }
                }
                Ready::Sink(sink) => self.write(sink),
                Ready::Output(worker, which) => self.read(worker, which),
                Ready::End(worker) => ended.extend(self.note_end(worker)?.map(|end| (worker, end))),
            }
        }
        let action = self.policy.ended(&ended, Instant::now());
        self.act(action);
        let action = self.policy.elapsed(Instant::now());
        self.act(action);
        self.settle();
        Ok(!is_idle)
    }

    fn wait(&self) -> Result<Vec<Ready>, Errno> {
        let mut events = vec![Ready::Signals];
        let mut fds = vec![PollFd::new(&self.signals, PollFlags::IN)];
        for (index, sink) in self.sinks.iter().enumerate() {
            if let Some(fd) = sink.wants_to_write() {
                events.push(Ready::Sink(index));
                fds.push(PollFd::from_borrowed_fd(fd, PollFlags::OUT));
            }
        }
        for (index, worker) in self.workers.iter().enumerate() {
            if worker.end.is_none() && !worker.settled {
                events.push(Ready::End(index));
                fds.push(PollFd::new(&worker.process, PollFlags::IN));
            }
            for (which, stream) in worker.streams.iter().enumerate() {
                if let Some(pipe) = stream.pipe.as_ref().filter(|_| !self.sinks[self.sink_of(which)].is_full()) {
                    events.push(Ready::Output(index, which));
                    fds.push(PollFd::new(pipe, PollFlags::IN));
                }
            }
        }
        let deadline = if self.must_leave() { Some(Instant::now()) } else { self.policy.deadline() };
        let timeout = deadline.map(|deadline| {
            let left = deadline.saturating_duration_since(Instant::now());
            Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() }
        });
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
        let is_ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        Ok(events.into_iter().zip(is_ready).filter_map(|(event, ready)| ready.then_some(event)).collect())
    }

    /// Records how a worker ended and tells the others, before any of them is stopped for it.
    fn note_end(&mut self, index: usize) -> anyhow::Result<Option<End>> {
        let worker = &mut self.workers[index];
        worker.end =
            worker.process.end().with_context(|| format!("cannot learn how rank {} ended", worker.spec.rank))?;
        if let Some(end) = worker.end {
            log::debug!("rank {} ended: {end}", worker.spec.rank);
            self.rendezvous.ended(worker.spec.rank, end);
        }
        Ok(worker.end)
    }

    fn act(&mut self, action: Action) {
        for worker in self.workers.iter_mut().filter(|worker| !worker.settled) {
            let stopped = match action {
                Action::Nothing => return,
                Action::Send(signal) => {
                    worker.process.signal(signal);
                    Stopped::Asked
                }
                Action::Kill => {
                    worker.process.kill();
                    Stopped::Killed
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

    /// Finishes with workers that have ended. Processes that a stopped one leaves in its group get what is left of the
    /// grace period (a script's child may be writing its checkpoint), taken to be over when its output is closed.
    fn settle(&mut self) {
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
            self.guard.unregister(worker.process.pid);
            worker.process.reap();
            worker.settled = true;
            for which in 0..worker.streams.len() {
                let stream = &mut self.workers[index].streams[which];
                stream.left = stream.pipe.as_ref().map(|pipe| rustix::io::ioctl_fionread(pipe).unwrap_or(0));
                if stream.left == Some(0) {
                    self.close(index, which);
                }
            }
        }
    }

    /// Passes on what a worker has written.
    fn read(&mut self, index: usize, which: usize) {
        let sink = self.sink_of(which);
        let worker = &mut self.workers[index];
        let stream = &mut worker.streams[which];
        let (Some(pipe), false) = (&stream.pipe, self.sinks[sink].is_full()) else { return };
        let limit = stream.left.map_or(READ, |left| READ.min(left as usize));
        let count = match rustix::io::read(pipe, &mut self.buffer[..limit]) {
            Ok(count) => count,
            Err(Errno::INTR) => return,
            Err(error) => {
                log::warn!("cannot read the output of rank {}: {error}", worker.spec.rank);
                0
            }
        };
        let bytes = &self.buffer[..count];
        if which == STDERR {
            worker.tail.push(bytes);
        }
        let queue = &mut self.sinks[sink].queue;
        let id = stream_id(index, which);
        stream.assembler.feed(bytes, |previous, segment| queue.put(id, &worker.prefix, previous, segment));
        if let Some(left) = &mut stream.left {
            *left -= count as u64;
        }
        if count == 0 || stream.left == Some(0) {
            self.close(index, which);
        }
    }

    /// Ends a stream of a worker; an unfinished last line is passed on.
    fn close(&mut self, index: usize, which: usize) {
        let sink = self.sink_of(which);
        let worker = &mut self.workers[index];
        let stream = &mut worker.streams[which];
        stream.pipe = None;
        let queue = &mut self.sinks[sink].queue;
        let id = stream_id(index, which);
        stream.assembler.finish(|previous, segment| queue.put(id, &worker.prefix, previous, segment));
    }

    /// Writes to one of our own outputs. When nobody reads it any more, the workers must feel it as they would alone.
    fn write(&mut self, sink: usize) {
        if let Err(error) = self.sinks[sink].write() {
            let name = if sink == STDERR { "standard error" } else { "standard output" };
            self.say(&format!("cannot write to {name}: {error}"));
        }
        if self.sinks[sink].is_closed() {
            let gone: Vec<usize> = (0..2).filter(|which| self.sink_of(*which) == sink).collect();
            for worker in &mut self.workers {
                gone.iter().for_each(|which| worker.streams[*which].pipe = None);
            }
        }
    }

    /// The exit code of the job; what there is to say about it is queued.
    fn conclude(&mut self) -> u8 {
        let outcomes: Vec<_> = self.workers.iter().map(Worker::outcome).collect();
        let (code, message) = match self.policy.cause() {
            None => (0, None),
            Some(Cause::Signal(signal)) => (End::Signal(signal).code(), report::unwilling(&outcomes, signal)),
            Some(Cause::Failure(first)) => {
                let end = outcomes[first].end.unwrap_or(End::Exit(1));
                // `flow-launch yes | head -1` is as quiet as `yes | head -1`.
                let is_quiet = self.sinks[0].is_closed() && end == End::Signal(Signal::PIPE.as_raw());
                let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
                (end.code(), (!is_quiet).then(|| report::failure(&outcomes, first, &host)))
            }
        };
        if let Some(message) = message {
            self.say(&message);
        }
        code
    }

    fn say(&mut self, message: &str) {
        if let Some(sink) = self.sinks.last_mut() {
            sink.queue.say(message);
        }
    }

    fn sink_of(&self, which: usize) -> usize {
        which.min(self.sinks.len() - 1)
    }
}

impl Worker {
    fn outcome(&self) -> Outcome<'_> {
        Outcome {
            rank: self.spec.rank,
            local_rank: self.spec.local_rank,
            pid: self.process.pid.as_raw_pid(),
            end: self.end,
            stopped: self.stopped,
            tail: &self.tail,
        }
    }
}

fn stream_id(worker: usize, which: usize) -> StreamId {
    2 * worker + which
}

/// Raises the soft limit on open files as far as needed and allowed.
fn allow_descriptors(needed: u64) {
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_some_and(|current| current < needed) {
        let current = limit.maximum.map_or(needed, |maximum| maximum.min(needed));
        if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: Some(current), maximum: limit.maximum }) {
            log::warn!("cannot raise the limit on open files to {current}: {error}");
        }
    }
}
