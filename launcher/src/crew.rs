//! The workers of this node in one round: their processes, their output, their ends.

use std::os::fd::OwnedFd;

use anyhow::Context;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::process::{getrlimit, setrlimit, Resource, Rlimit, Signal};

use crate::guard::Guard;
use crate::output::{Assembler, StreamId};
use crate::plan::WorkerSpec;
use crate::policy::{Action, Cause, Policy};
use crate::report::{Outcome, Stopped, Tail};
use crate::sink::Sinks;
use crate::worker::{End, Process};

/// Bytes read from a worker at once.
const READ: usize = 1 << 16;

/// Index of a stream of a worker.
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

/// What `poll` has found ready of a crew.
pub enum Ready {
    End(usize),
    Output(usize, usize),
}

/// See the head of this file. Dropping it leaves its processes to the guard.
pub struct Crew {
    pub round: u32,
    pub policy: Policy,
    workers: Vec<Worker>,
    buffer: Vec<u8>,
}

impl Crew {
    /// Starts all workers. On an error those already started are killed when the guard is dropped.
    pub fn start(
        round: u32,
        specs: Vec<WorkerSpec>,
        policy: Policy,
        prefix: bool,
        guard: &mut Guard,
    ) -> anyhow::Result<Crew> {
        allow_descriptors(OWN_DESCRIPTORS + WORKER_DESCRIPTORS * specs.len() as u64);
        let mut workers = Vec::with_capacity(specs.len());
        for spec in specs {
            let rank = spec.rank;
            let (process, pipes) = Process::start(&spec, guard).map_err(|error| {
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
        Ok(Crew { round, policy, workers, buffer: vec![0; READ] })
    }

    /// Every worker has gone.
    pub fn is_settled(&self) -> bool {
        self.workers.iter().all(|worker| worker.settled)
    }

    /// Every worker has gone, and all they wrote was read.
    pub fn is_over(&self) -> bool {
        self.is_settled() && self.workers.iter().all(|worker| worker.streams.iter().all(|s| s.pipe.is_none()))
    }

    /// What to wait for. A stream whose sink is full is left alone.
    pub fn watch<'a>(&'a self, sinks: &Sinks) -> Vec<(Ready, PollFd<'a>)> {
        let mut watched = Vec::new();
        for (index, worker) in self.workers.iter().enumerate() {
            if worker.end.is_none() && !worker.settled {
                watched.push((Ready::End(index), PollFd::new(&worker.process, PollFlags::IN)));
            }
            for (which, stream) in worker.streams.iter().enumerate() {
                if let Some(pipe) = stream.pipe.as_ref().filter(|_| !sinks.of(which).is_full()) {
                    watched.push((Ready::Output(index, which), PollFd::new(pipe, PollFlags::IN)));
                }
            }
        }
        watched
    }

    /// Records how a worker ended; its rank.
    pub fn note_end(&mut self, index: usize) -> anyhow::Result<Option<(u32, End)>> {
        let worker = &mut self.workers[index];
        let rank = worker.spec.rank;
        worker.end = worker.process.end().with_context(|| format!("cannot learn how rank {rank} ended"))?;
        Ok(worker.end.map(|end| (rank, end)))
    }

    /// Does what the policy has decided.
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
    pub fn settle(&mut self, sinks: &mut Sinks, guard: &mut Guard) {
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
            guard.unregister(worker.process.pid);
            worker.process.reap();
            worker.settled = true;
            for which in 0..worker.streams.len() {
                let stream = &mut self.workers[index].streams[which];
                stream.left = stream.pipe.as_ref().map(|pipe| rustix::io::ioctl_fionread(pipe).unwrap_or(0));
                if stream.left == Some(0) {
                    self.close(index, which, sinks);
                }
            }
        }
    }

    /// Passes on what a worker has written.
    pub fn read(&mut self, index: usize, which: usize, sinks: &mut Sinks) {
        let worker = &mut self.workers[index];
        let stream = &mut worker.streams[which];
        let (Some(pipe), false) = (&stream.pipe, sinks.of(which).is_full()) else { return };
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
        let queue = &mut sinks.of_mut(which).queue;
        let id = stream_id(index, which);
        stream.assembler.feed(bytes, |previous, segment| queue.put(id, &worker.prefix, previous, segment));
        if let Some(left) = &mut stream.left {
            *left -= count as u64;
        }
        if count == 0 || stream.left == Some(0) {
            self.close(index, which, sinks);
        }
    }

    /// Ends a stream of a worker; an unfinished last line is passed on.
    fn close(&mut self, index: usize, which: usize, sinks: &mut Sinks) {
        let worker = &mut self.workers[index];
        let stream = &mut worker.streams[which];
        stream.pipe = None;
        let queue = &mut sinks.of_mut(which).queue;
        let id = stream_id(index, which);
        stream.assembler.finish(|previous, segment| queue.put(id, &worker.prefix, previous, segment));
    }

    /// Nobody reads this output any more: the workers must feel it as they would alone.
    pub fn hang_up(&mut self, which: usize) {
        self.workers.iter_mut().for_each(|worker| worker.streams[which].pipe = None);
    }

    /// What became of the workers, in rank order.
    pub fn outcomes(&self) -> Vec<Outcome<'_>> {
        self.workers.iter().map(Worker::outcome).collect()
    }

    /// The worker (by index) that failed first, and how.
    pub fn first_failure(&self) -> Option<(usize, End)> {
        match self.policy.cause()? {
            Cause::Failure(first) => Some((first, self.workers[first].end.unwrap_or(End::Exit(1)))),
            Cause::Signal(_) | Cause::Order => None,
        }
    }

    /// `flow-launch yes | head -1` is as quiet as `yes | head -1`.
    pub fn ended_for_want_of_readers(&self, sinks: &Sinks) -> bool {
        let broken_pipe = End::Signal(Signal::PIPE.as_raw());
        sinks.of(0).is_closed() && self.first_failure().is_some_and(|(_, end)| end == broken_pipe)
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
