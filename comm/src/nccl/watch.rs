//! The watchdog: a thread that looks after what has been enqueued, as nobody else waits for it.
//!
//! NCCL's operations run on the device, where a peer that never comes would hold everything up for ever. The thread
//! looks whether the oldest operation is over, whether NCCL reports an error, whether the peers live, and at the clock.
//! The first failure is told to all ranks of the machine, and the communicator is aborted, so that the device, and whoever
//! waits for it, is free again.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use flow_kernels::cuda::Event;

use super::communicator::{Communicator, Failure};
use crate::error::{Error, Result};
use crate::shm::engine::Engine;
use crate::shm::operation::Operation;
use crate::shm::world::FIRST_WARNING;
use crate::store::Store;

/// Between two looks at operations under way.
const LOOK: Duration = Duration::from_millis(50);
/// How often a rank tells the others, through the store, how far it is.
const PUBLISH: Duration = Duration::from_secs(1);
/// How much longer than a peer's clean end its last operation may take here.
const AFTERGLOW: Duration = Duration::from_secs(5);
/// How long the program has to take notice of a failure before the process is ended: it may hang in a call to the
/// device that not even the abort sets free.
const NOTICE: Duration = Duration::from_secs(30);

/// An operation as messages name it.
#[derive(Clone, Copy)]
pub struct Issued {
    pub operation: Operation,
    pub bytes: usize,
}

impl fmt::Display for Issued {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {} bytes, over NCCL", self.operation, self.bytes)
    }
}

struct Pending {
    issued: Issued,
    begun: Instant,
    /// None as long as NCCL has not enqueued it: its first operations block the host until all ranks are there.
    done: Option<Arc<Event>>,
}

#[derive(Default)]
struct State {
    pending: VecDeque<Pending>,
    /// The last operation that was begun.
    last: Option<Issued>,
    failure: Option<Error>,
    /// The program has got the failure as an error.
    told: bool,
    stopped: bool,
    warned: bool,
}

struct Shared {
    engine: Arc<Engine>,
    communicator: Arc<Communicator>,
    /// Beginning of the keys under which the ranks tell how far they are.
    prefix: String,
    state: Mutex<State>,
    change: Condvar,
}

pub struct Watch {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    pub fn start(engine: Arc<Engine>, communicator: Arc<Communicator>, prefix: String) -> std::io::Result<Self> {
        let shared = Shared { engine, communicator, prefix, state: Mutex::default(), change: Condvar::new() };
        let shared = Arc::new(shared);
        let watched = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("flow-nccl".into()).spawn(move || watched.run())?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// The failure, if there was one, as the error of an operation that begins now.
    pub fn check(&self, operation: &dyn fmt::Display) -> Result<()> {
        let mut state = self.shared.state();
        if let Some(failure) = &state.failure {
            let (rank, cause, first) = (self.shared.engine.world.rank, failure.clone(), !state.told);
            state.told = true;
            let poisoned = || Error::Poisoned { rank, operation: operation.to_string(), cause: cause.to_string() };
            return Err(if first { cause.clone() } else { poisoned() });
        }
        drop(state);
        self.shared.engine.check_failure(operation, false).inspect_err(|error| {
            self.fail(error.clone());
        })
    }

    /// An operation begins.
    pub fn begin(&self, issued: Issued) {
        let mut state = self.shared.state();
        state.pending.push_back(Pending { issued, begun: Instant::now(), done: None });
        state.last = Some(issued);
        if state.pending.len() == 1 {
            self.shared.change.notify_all();
        }
    }

    /// The operation that began last has been enqueued, and is over when `done` is.
    pub fn enqueued(&self, done: Arc<Event>) {
        if let Some(pending) = self.shared.state().pending.back_mut() {
            pending.done = Some(done);
        }
    }

    /// Fails the group, unless it has failed before. Returns the first failure.
    pub fn fail(&self, error: Error) -> Error {
        let error = self.shared.fail(error);
        self.shared.state().told = true;
        error
    }

    /// Waits until all that was begun is over, or has failed.
    pub fn drain(&self) {
        let state = self.shared.state();
        let busy = |state: &mut State| !state.pending.is_empty() && state.failure.is_none();
        drop(self.shared.change.wait_while(state, busy).unwrap_or_else(PoisonError::into_inner));
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.shared.state().stopped = true;
        self.shared.change.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let (mut published, mut last_publish) = (None, Instant::now());
        loop {
            let mut state = self.state();
            retire(&mut state);
            if state.pending.is_empty() {
                self.change.notify_all();
            }
            if state.stopped || state.failure.is_some() {
                break;
            }
            let last = state.last.map(|issued| issued.operation.sequence);
            let news = last != published;
            if news && last_publish.elapsed() >= PUBLISH.min(self.engine.timeout() / 4) {
                let text = state.last.map(|issued| issued.to_string()).unwrap_or_default();
                drop(state);
                self.publish(last, &text);
                (published, last_publish) = (last, Instant::now());
                continue;
            }
            if !state.pending.is_empty() {
                let begun = state.pending.front().map(|p| (p.issued, p.begun, state.warned));
                drop(state);
                if let Some(error) = begun.and_then(|(issued, begun, warned)| self.look(&issued, begun, warned)) {
                    self.fail(error);
                    break;
                }
                std::thread::sleep(LOOK);
            } else if news {
                drop(self.change.wait_timeout(state, LOOK).unwrap_or_else(PoisonError::into_inner));
            } else {
                drop(self.change.wait(state).unwrap_or_else(PoisonError::into_inner));
            }
        }
        let state = self.state();
        if state.failure.is_none() {
            let last = state.last;
            drop(state);
            // For those who would else miss this rank, which is about to leave.
            if let Some(last) = last.filter(|last| Some(last.operation.sequence) != published) {
                self.publish(Some(last.operation.sequence), &last.to_string());
            }
            return;
        }
        let ignorant = |state: &mut State| !state.told && !state.stopped;
        let waited = self.change.wait_timeout_while(state, NOTICE, ignorant);
        let (state, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        if let (true, Some(failure)) = (waited.timed_out(), &state.failure) {
            // The only way out that is left: the program is stuck, and nobody would learn why.
            eprintln!("{failure}; the program has not noticed for {NOTICE:?}, so its process ends here");
            std::process::abort();
        }
    }

    /// What is wrong with the oldest operation, if anything is.
    fn look(&self, issued: &Issued, begun: Instant, warned: bool) -> Option<Error> {
        let (engine, rank) = (&self.engine, self.engine.world.rank);
        if let Err(error) = engine.check_failure(issued, true) {
            return Some(error);
        }
        if let Err(Failure::Nccl(error)) = self.communicator.check() {
            return Some(Error::System { rank, operation: issued.to_string(), reason: error.to_string() });
        }
        let age = begun.elapsed();
        // A peer may have gone once it had done its part, even a little before this rank has seen that.
        let gone = engine.gone().into_iter();
        if let Some(peer) = gone.filter(|&peer| age > AFTERGLOW || !self.has_begun(peer, issued)).min() {
            return Some(engine.lose(peer, issued));
        }
        let timeout = engine.timeout();
        if age >= timeout {
            return Some(self.timed_out(issued, timeout));
        }
        if age >= FIRST_WARNING && !warned {
            self.state().warned = true;
            log::warn!("rank {rank}: {issued} has waited {} s for {}", age.as_secs(), self.missing(issued));
        }
        None
    }

    fn fail(&self, error: Error) -> Error {
        let mut state = self.state();
        if let Some(first) = &state.failure {
            return first.clone();
        }
        state.failure = Some(error.clone());
        state.pending.clear();
        drop(state);
        log::error!("{error}");
        if self.engine.check_failure(&"NCCL", false).is_ok() {
            self.engine.fail(error.clone());
        }
        self.communicator.abort();
        self.change.notify_all();
        error
    }

    fn timed_out(&self, issued: &Issued, timeout: Duration) -> Error {
        let rank = self.engine.world.rank;
        let others = (0..self.engine.size()).filter(|&r| r != self.engine.rank);
        let differs = |r: usize| {
            let (sequence, text) = self.progress(r)?;
            (sequence == issued.operation.sequence && text != issued.to_string()).then_some((r, text))
        };
        if let Some((other, theirs)) = others.filter_map(differs).next() {
            let other = self.engine.ranks[other];
            return Error::Mismatch {
                rank,
                detail: format!("rank {rank} called {issued}, rank {other} called {theirs}"),
            };
        }
        Error::Timeout { rank, operation: issued.to_string(), timeout, missing: self.missing(issued) }
    }

    /// The ranks that have not begun the operation, as far as the store knows.
    fn missing(&self, issued: &Issued) -> String {
        let late = (0..self.engine.size()).filter(|&r| r != self.engine.rank && !self.has_begun(r, issued));
        let describe = |r: usize| {
            let at =
                self.progress(r).map_or("which has begun nothing".into(), |(_, text)| format!("which is at {text}"));
            format!("{}, {at}", self.engine.world.describe(self.engine.ranks[r]))
        };
        let late: Vec<String> = late.map(describe).collect();
        match late.is_empty() {
            true => "the device or the network: all ranks have begun it".into(),
            false => late.join("; "),
        }
    }

    fn has_begun(&self, rank: usize, issued: &Issued) -> bool {
        self.progress(rank).is_some_and(|(sequence, _)| sequence >= issued.operation.sequence)
    }

    fn store(&self) -> Option<&Store> {
        self.engine.world.store()
    }

    fn publish(&self, sequence: Option<u64>, text: &str) {
        let (Some(store), Some(sequence)) = (self.store(), sequence) else { return };
        let key = format!("{}at/{}", self.prefix, self.engine.rank);
        if let Err(error) = store.set(&key, format!("{sequence} {text}").as_bytes()) {
            log::debug!("rank {}: {error}", self.engine.world.rank);
        }
    }

    /// The last operation that a rank has told of.
    fn progress(&self, rank: usize) -> Option<(u64, String)> {
        let text = self.store()?.try_get(&format!("{}at/{rank}", self.prefix)).ok()??;
        let text = String::from_utf8(text).ok()?;
        let (sequence, operation) = text.split_once(' ')?;
        Some((sequence.parse().ok()?, operation.to_owned()))
    }
}

/// Forgets what is over. An event that cannot be asked counts as not over: the clock decides then.
fn retire(state: &mut State) {
    while let Some(pending) = state.pending.front() {
        match pending.done.as_ref().map(|done| done.is_done()) {
            Some(Ok(true)) => {
                state.pending.pop_front();
                state.warned = false;
            }
            _ => break,
        }
    }
}
