//! The watchdog: a thread that looks after what has been enqueued, as nobody else waits for it.
//!
//! NCCL's operations run on the device, where a peer that never comes would hold everything up for
//! ever. The thread looks whether the oldest operation is over, whether NCCL reports an error,
//! whether the peers live, and at the clock. The first failure is told to all ranks of the machine,
//! and the communicator is aborted, so that the device, and whoever waits for it, is free again.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
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
use crate::waits::LongWait;

/// Between two looks at operations under way.
const LOOK: Duration = Duration::from_millis(50);
/// How often a rank tells the others, through the store, how far it is.
const PUBLISH: Duration = Duration::from_secs(1);
/// How much longer than a peer's clean end its last operation may take here.
const AFTERGLOW: Duration = Duration::from_secs(5);
/// How long the program has to take notice of a failure, and an abort to set the device free,
/// before the process is ended: it may hang in a call to the device that not even the abort ends.
const NOTICE: Duration = Duration::from_secs(30);
/// How long the watchdog itself may be silent, in such a call.
const SILENCE: Duration = Duration::from_secs(60);
/// How long dropping a group waits for its watchdog.
const FAREWELL: Duration = Duration::from_secs(10);

/// The program has got the failure of some group as an error.
static TOLD: AtomicBool = AtomicBool::new(false);

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
    /// None as long as NCCL has not enqueued it: its first operations block the host until all
    /// ranks are there.
    done: Option<Arc<Event>>,
}

struct State {
    pending: VecDeque<Pending>,
    /// The last operation that was begun.
    last: Option<Issued>,
    /// The first failure, and when it was found.
    failure: Option<(Error, Instant)>,
    /// The program has got it as an error.
    told: bool,
    /// The communicator has been aborted.
    freed: bool,
    /// When the watchdog last came by.
    beat: Instant,
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
    threads: Vec<JoinHandle<()>>,
}

impl Watch {
    pub fn start(
        engine: Arc<Engine>,
        communicator: Arc<Communicator>,
        prefix: String,
    ) -> std::io::Result<Self> {
        let state = State {
            pending: VecDeque::new(),
            last: None,
            failure: None,
            told: false,
            freed: false,
            beat: Instant::now(),
            stopped: false,
            warned: false,
        };
        let shared = Shared {
            engine,
            communicator,
            prefix,
            state: Mutex::new(state),
            change: Condvar::new(),
        };
        let shared = Arc::new(shared);
        let [watched, guarded] = [Arc::clone(&shared), Arc::clone(&shared)];
        let mut watch = Self { shared, threads: Vec::new() };
        let start = |name: &str| std::thread::Builder::new().name(name.into());
        watch.threads.push(start("flow-nccl").spawn(move || watched.run())?);
        watch.threads.push(start("flow-nccl-guard").spawn(move || guarded.guard())?);
        Ok(watch)
    }

    /// The failure, if there was one, as the error of an operation that begins now.
    pub fn check(&self, operation: &dyn fmt::Display) -> Result<()> {
        let mut state = self.shared.state();
        let failure = state.failure.as_ref().map(|(error, _)| error.clone());
        if let Some(cause) = failure {
            TOLD.store(true, Ordering::SeqCst);
            self.shared.change.notify_all();
            if !std::mem::replace(&mut state.told, true) {
                return Err(cause);
            }
            let rank = self.shared.engine.world.rank;
            return Err(Error::Poisoned {
                rank,
                operation: operation.to_string(),
                cause: cause.to_string(),
            });
        }
        drop(state);
        self.shared.engine.check_failure(operation, false).map_err(|error| self.fail(error))
    }

    /// An operation begins.
    pub fn begin(&self, issued: Issued) {
        let mut state = self.shared.state();
        state.pending.push_back(Pending { issued, begun: Instant::now(), done: None });
        state.last = Some(issued);
        if state.pending.len() == 1 {
            state.beat = Instant::now();
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
        TOLD.store(true, Ordering::SeqCst);
        self.shared.change.notify_all();
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
        let begin = Instant::now();
        while !self.threads.iter().all(JoinHandle::is_finished) && begin.elapsed() < FAREWELL {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let (mut published, mut last_publish, mut gone_since) = (None, Instant::now(), None);
        // The oldest operation's, if flow-launch wants to know.
        let mut long: Option<LongWait> = None;
        loop {
            let mut state = self.state();
            state.beat = Instant::now();
            if state.stopped || state.failure.is_some() {
                break;
            }
            let last = state.last;
            let news = last.map(|issued| issued.operation.sequence) != published;
            let due = last_publish.elapsed() >= PUBLISH.min(self.engine.timeout() / 4);
            let oldest = state
                .pending
                .front()
                .map(|pending| (pending.issued, pending.begun, pending.done.clone()));
            let Some((issued, begun, done)) = oldest else {
                self.change.notify_all();
                long = None;
                if news && !due {
                    drop(
                        self.change
                            .wait_timeout(state, LOOK)
                            .unwrap_or_else(PoisonError::into_inner),
                    );
                } else if news {
                    drop(state);
                    (published, last_publish) = (self.publish(last), Instant::now());
                } else {
                    drop(self.change.wait(state).unwrap_or_else(PoisonError::into_inner));
                }
                continue;
            };
            drop(state);
            // Unlocked, as calls to the device may take long.
            let error = match is_over(done.as_deref()) {
                Ok(true) => {
                    self.retire(&issued);
                    long = None;
                    continue;
                }
                Ok(false) => self.look(&issued, begun, done.as_deref(), &mut gone_since),
                Err(reason) => Some(self.system(&issued, reason)),
            };
            if let Some(error) = error {
                self.fail(error);
                break;
            }
            if news && due {
                (published, last_publish) = (self.publish(last), Instant::now());
            }
            if long.is_none() {
                long = self.engine.world.long_wait();
            }
            if let Some(long) = &mut long {
                long.look(begun.elapsed(), &issued, || {
                    self.late(&issued).map(|r| self.engine.ranks[r]).collect()
                });
            }
            std::thread::sleep(LOOK);
        }
        let last = self.state().last;
        if last.map(|issued| issued.operation.sequence) != published {
            // For those who would else miss this rank, which is about to leave.
            self.publish(last);
        }
    }

    /// Ends the process when nothing else is left: the program is stuck, or the watchdog is, and
    /// nobody would learn why. Calls neither the device nor NCCL nor the store, any of which may
    /// hang.
    fn guard(&self) {
        let mut state = self.state();
        loop {
            let done = TOLD.load(Ordering::SeqCst) && state.freed;
            let until = match &state.failure {
                Some((_, found)) if !done => Some(*found + NOTICE),
                None if !state.pending.is_empty() => Some(state.beat + SILENCE),
                _ => None,
            };
            if state.stopped && (state.failure.is_none() || state.freed)
                || state.failure.is_some() && done
            {
                return;
            }
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            match (left, &state.failure) {
                (Some(Duration::ZERO), Some((failure, _))) => {
                    eprintln!("{failure}; the program has not noticed for {NOTICE:?}, so its process ends here");
                    std::process::abort();
                }
                (Some(Duration::ZERO), None) => {
                    let rank = self.engine.world.rank;
                    let issued = state
                        .pending
                        .front()
                        .map(|pending| pending.issued.to_string())
                        .unwrap_or_default();
                    eprintln!(
                        "rank {rank}: {issued}: no answer from the driver for {SILENCE:?}, so the process ends here"
                    );
                    std::process::abort();
                }
                _ => {
                    let wait = left.unwrap_or(SILENCE);
                    state = self
                        .change
                        .wait_timeout(state, wait)
                        .unwrap_or_else(PoisonError::into_inner)
                        .0;
                }
            }
        }
    }

    fn retire(&self, issued: &Issued) {
        let mut state = self.state();
        let sequence = |pending: &Pending| pending.issued.operation.sequence;
        if state.pending.front().is_some_and(|oldest| sequence(oldest) == issued.operation.sequence)
        {
            state.pending.pop_front();
            state.warned = false;
        }
    }

    /// What is wrong with the oldest operation, if anything is. Takes note of when peers were first
    /// seen to be gone.
    fn look(
        &self,
        issued: &Issued,
        begun: Instant,
        done: Option<&Event>,
        gone_since: &mut Option<Instant>,
    ) -> Option<Error> {
        let (engine, rank) = (&self.engine, self.engine.world.rank);
        if let Err(error) = engine.check_failure(issued, true) {
            return Some(error);
        }
        if let Err(Failure::Nccl(error)) = self.communicator.check() {
            return Some(self.system(issued, error.to_string()));
        }
        // A peer may have gone once it had done its part, even a little before this rank has seen
        // that.
        let gone = engine.gone();
        if !gone.is_empty() && is_over(done) == Ok(false) {
            let late = gone_since.get_or_insert_with(Instant::now).elapsed() > AFTERGLOW;
            if let Some(peer) = gone.into_iter().find(|&peer| late || !self.has_begun(peer, issued))
            {
                return Some(engine.lose(peer, issued));
            }
        }
        let (age, timeout) = (begun.elapsed(), engine.timeout());
        if age >= timeout {
            return Some(self.timed_out(issued, timeout));
        }
        if age >= FIRST_WARNING && !std::mem::replace(&mut self.state().warned, true) {
            log::warn!(
                "rank {rank}: {issued} has waited {} s for {}",
                age.as_secs(),
                self.missing(issued)
            );
        }
        None
    }

    fn system(&self, issued: &Issued, reason: String) -> Error {
        Error::System { rank: self.engine.world.rank, operation: issued.to_string(), reason }
    }

    fn fail(&self, error: Error) -> Error {
        let mut state = self.state();
        if let Some((first, _)) = &state.failure {
            return first.clone();
        }
        state.failure = Some((error.clone(), Instant::now()));
        state.pending.clear();
        drop(state);
        self.change.notify_all();
        log::error!("{error}");
        if self.engine.check_failure(&"NCCL", false).is_ok() {
            self.engine.fail(error.clone());
        }
        let freed = self.communicator.abort();
        self.state().freed = freed;
        self.change.notify_all();
        error
    }

    fn timed_out(&self, issued: &Issued, timeout: Duration) -> Error {
        let rank = self.engine.world.rank;
        let others = (0..self.engine.size()).filter(|&r| r != self.engine.rank);
        let differs = |r: usize| {
            let (sequence, text) = self.progress(r)?;
            (sequence == issued.operation.sequence && text != issued.to_string())
                .then_some((r, text))
        };
        if let Some((other, theirs)) = others.filter_map(differs).next() {
            let other = self.engine.ranks[other];
            return Error::Mismatch {
                rank,
                detail: format!("rank {rank} called {issued}, rank {other} called {theirs}"),
            };
        }
        Error::Timeout {
            rank,
            operation: issued.to_string(),
            timeout,
            missing: self.missing(issued),
        }
    }

    /// The ranks that have not begun the operation, as far as the store knows.
    fn late<'a>(&'a self, issued: &'a Issued) -> impl Iterator<Item = usize> + 'a {
        (0..self.engine.size()).filter(|&r| r != self.engine.rank && !self.has_begun(r, issued))
    }

    /// As [`Shared::late`], in words.
    fn missing(&self, issued: &Issued) -> String {
        let describe = |r: usize| {
            let at = self.progress(r).map_or("which has begun nothing".into(), |(_, text)| {
                format!("which is at {text}")
            });
            format!("{}, {at}", self.engine.world.describe(self.engine.ranks[r]))
        };
        let late: Vec<String> = self.late(issued).map(describe).collect();
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

    /// Tells the others how far this rank is. Returns the number that they know now.
    fn publish(&self, last: Option<Issued>) -> Option<u64> {
        let (store, last) = (self.store()?, last?);
        let (key, sequence) =
            (format!("{}at/{}", self.prefix, self.engine.rank), last.operation.sequence);
        if let Err(error) = store.set(&key, format!("{sequence} {last}").as_bytes()) {
            log::debug!("rank {}: {error}", self.engine.world.rank);
        }
        Some(sequence)
    }

    /// The last operation that a rank has told of.
    fn progress(&self, rank: usize) -> Option<(u64, String)> {
        let text = self.store()?.try_get(&format!("{}at/{rank}", self.prefix)).ok()??;
        let text = String::from_utf8(text).ok()?;
        let (sequence, operation) = text.split_once(' ')?;
        Some((sequence.parse().ok()?, operation.to_owned()))
    }
}

/// Whether an operation is over; its error if the device has failed.
fn is_over(done: Option<&Event>) -> std::result::Result<bool, String> {
    done.map_or(Ok(false), |done| done.is_done().map_err(|error| error.to_string()))
}
