//! The watchdog: a thread that watches the operations that have been enqueued, as no other thread
//! waits for them.
//!
//! NCCL's operations run on the device. A peer that never calls the operation would block the
//! device for ever. The thread checks whether the oldest operation is over, whether NCCL reports an
//! error, whether the peers live, and whether the timeout has passed. The first failure poisons the
//! group on all ranks. The communicator is then aborted, which frees the device and the threads
//! that wait for it.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use flow_kernels::cuda::Event;

use super::communicator::{Communicator, CommunicatorError};
use super::device_clock::DeviceClock;
use super::error::EnqueueError;
use super::peer_progress::PeerProgress;
use super::progress::EnqueuedOp;
use crate::error::{Error, Result};
use crate::failure::Failure;
use crate::kind::Kind;
use crate::stall::Stall;
use crate::trace;
use crate::world::FIRST_WARNING;

/// The interval at which the oldest operation is checked.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// The interval at which a rank publishes its last operation in the store, for the other ranks.
const PUBLISH_INTERVAL: Duration = Duration::from_secs(1);
/// Grace for an operation to complete here after a peer that took part in it has exited cleanly.
const PEER_EXIT_GRACE: Duration = Duration::from_secs(5);
/// The time in which this rank learns which peer NCCL has lost.
const PEER_LOSS_GRACE: Duration = Duration::from_secs(5);
/// The time after a failure in which the program may observe it, and the abort free the device.
/// Then the process is terminated: it may hang in a driver call that not even an abort ends.
const ABORT_GRACE: Duration = Duration::from_secs(30);
/// The time that the watchdog itself may be blocked in a driver call.
const DRIVER_STALL_LIMIT: Duration = Duration::from_secs(60);
/// The time that dropping a group waits for its watchdog's threads.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// A call has returned the failure of some group to the program.
static ERROR_OBSERVED: AtomicBool = AtomicBool::new(false);

struct WatchedOp {
    operation: EnqueuedOp,
    begun: Instant,
    /// None until NCCL has enqueued it: the first operations of a communicator block the host until
    /// all ranks are connected.
    done: Option<Arc<Event>>,
    /// The event of its beginning on the device, if that is to be known.
    started: Option<Arc<Event>>,
}

impl WatchedOp {
    /// Returns when it began and ended on the device, in ticks.
    fn times(&self, clock: &DeviceClock) -> Option<(u64, u64)> {
        let started = clock.ticks(self.started.as_ref()?)?;
        Some((started, clock.ticks(self.done.as_ref()?)?))
    }
}

struct WatchState {
    pending: VecDeque<WatchedOp>,
    /// The last operation that was begun.
    last: Option<EnqueuedOp>,
    /// The first failure, and when it was found.
    failure: Option<(Error, Instant)>,
    /// A call of this group has returned it to the program.
    observed: bool,
    /// The communicator has been aborted.
    aborted: bool,
    /// The time at which the watchdog's thread last ran.
    heartbeat: Instant,
    stopped: bool,
    warned: bool,
}

struct Shared {
    failure: Arc<Failure>,
    communicator: Arc<Communicator>,
    progress: PeerProgress,
    state: Mutex<WatchState>,
    change: Condvar,
}

/// Watches what a group has enqueued, on threads of its own.
pub struct Watchdog {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Watchdog {
    /// Starts the threads.
    pub fn start(
        failure: Arc<Failure>,
        communicator: Arc<Communicator>,
        prefix: String,
    ) -> std::io::Result<Self> {
        let state = WatchState {
            pending: VecDeque::new(),
            last: None,
            failure: None,
            observed: false,
            aborted: false,
            heartbeat: Instant::now(),
            stopped: false,
            warned: false,
        };
        let shared = Shared {
            progress: PeerProgress::new(&failure.core, prefix),
            failure,
            communicator,
            state: Mutex::new(state),
            change: Condvar::new(),
        };
        let shared = Arc::new(shared);
        let watched = Arc::clone(&shared);
        let guarded = Arc::clone(&shared);
        let mut watch = Self { shared, threads: Vec::new() };
        let thread = std::thread::Builder::new().name("flow-nccl".into());
        watch.threads.push(thread.spawn(move || watched.run())?);
        let thread = std::thread::Builder::new().name("flow-nccl-guard".into());
        watch.threads.push(thread.spawn(move || guarded.terminate_if_stuck())?);
        Ok(watch)
    }

    /// Returns the failure, if there was one, as the error of an operation that begins now.
    pub fn check(&self, operation: &dyn fmt::Display) -> Result<()> {
        let mut state = self.shared.state();
        let failure = state.failure.as_ref().map(|(error, _)| error.clone());
        if let Some(cause) = failure {
            ERROR_OBSERVED.store(true, Ordering::SeqCst);
            self.shared.change.notify_all();
            if !std::mem::replace(&mut state.observed, true) {
                return Err(cause);
            }
            let rank = self.shared.failure.core.world.rank;
            return Err(Error::Poisoned {
                rank,
                operation: operation.to_string(),
                cause: cause.to_string(),
                is_mismatch: cause.is_mismatch(),
            });
        }
        drop(state);
        self.shared.failure.check_failure(operation, false).map_err(|error| self.fail(error))
    }

    /// Notes that an operation begins.
    pub fn begin(&self, operation: EnqueuedOp) {
        let mut state = self.shared.state();
        state.last = Some(operation.clone());
        state.pending.push_back(WatchedOp {
            operation,
            begun: Instant::now(),
            done: None,
            started: None,
        });
        if state.pending.len() == 1 {
            state.heartbeat = Instant::now();
            self.shared.change.notify_all();
        }
    }

    /// Notes that the operation that began last has been enqueued. It is over when `done` is.
    pub fn enqueued(&self, started: Option<Arc<Event>>, done: Arc<Event>) {
        if let Some(pending) = self.shared.state().pending.back_mut() {
            pending.started = started;
            pending.done = Some(done);
        }
    }

    /// Fails the group, unless it has failed before. Returns the first failure.
    pub fn fail(&self, error: Error) -> Error {
        let error = self.shared.fail(error);
        self.shared.state().observed = true;
        ERROR_OBSERVED.store(true, Ordering::SeqCst);
        self.shared.change.notify_all();
        error
    }

    /// Fails the group, as an operation could not be enqueued. Returns the first failure.
    pub fn refused(&self, operation: &EnqueuedOp, error: EnqueueError) -> Error {
        self.fail(self.shared.explained(operation, error))
    }

    /// Waits until all operations that began are over, or the group has failed.
    pub fn drain(&self) {
        let state = self.shared.state();
        let over = self
            .shared
            .change
            .wait_while(state, |state| !state.pending.is_empty() && state.failure.is_none());
        drop(over.unwrap_or_else(PoisonError::into_inner));
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.shared.state().stopped = true;
        self.shared.change.notify_all();
        let begin = Instant::now();
        while !self.threads.iter().all(JoinHandle::is_finished) && begin.elapsed() < STOP_TIMEOUT {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, WatchState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut published = None;
        let mut last_publish = Instant::now();
        let mut gone_since = None;
        // Of the oldest operation, if flow-launch asks for reports.
        let mut long: Option<Stall> = None;
        let device = &self.communicator.device;
        let mut clock = trace::is_on().then(|| DeviceClock::new(device).ok()).flatten();
        loop {
            let mut state = self.state();
            state.heartbeat = Instant::now();
            if state.stopped || state.failure.is_some() {
                break;
            }
            let last = state.last.clone();
            let news = last.as_ref().map(|operation| operation.number) != published;
            let due =
                last_publish.elapsed() >= PUBLISH_INTERVAL.min(self.failure.core.timeout() / 4);
            let oldest = state
                .pending
                .front()
                .map(|pending| (pending.operation.clone(), pending.begun, pending.done.clone()));
            let Some((operation, begun, done)) = oldest else {
                self.change.notify_all();
                long = None;
                if clock.as_mut().is_some_and(|clock| clock.renew_if_old().is_err()) {
                    clock = None;
                }
                if news && !due {
                    drop(
                        self.change
                            .wait_timeout(state, POLL_INTERVAL)
                            .unwrap_or_else(PoisonError::into_inner),
                    );
                } else if news {
                    drop(state);
                    published = self.progress.publish(last);
                    last_publish = Instant::now();
                } else {
                    drop(self.change.wait(state).unwrap_or_else(PoisonError::into_inner));
                }
                continue;
            };
            drop(state);
            // Unlocked, as calls to the driver may block.
            let error = match is_over(done.as_deref()) {
                Ok(true) => {
                    self.pop_completed(&operation, clock.as_ref());
                    long = None;
                    continue;
                }
                Ok(false) => self.diagnose(&operation, begun, done.as_deref(), &mut gone_since),
                Err(reason) => Some(self.system(&operation, reason)),
            };
            if let Some(error) = error {
                self.fail(error);
                break;
            }
            if news && due {
                published = self.progress.publish(last);
                last_publish = Instant::now();
            }
            if long.is_none() {
                long = self.failure.core.world.long_wait();
            }
            if let Some(long) = &mut long {
                let core = &self.failure.core;
                long.check(begun.elapsed(), &operation, || {
                    let late = self.progress.late(&operation);
                    late.map(|member| core.world.seats[core.ranks[member]].number).collect()
                });
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        let last = self.state().last.clone();
        if last.as_ref().map(|operation| operation.number) != published {
            // This rank is about to leave: peers that still wait read its last operation.
            self.progress.publish(last);
        }
    }

    /// Terminates the process when the program, or the watchdog, is stuck: nobody would learn why
    /// otherwise. Calls neither the driver nor NCCL nor the store, as any of them may hang.
    fn terminate_if_stuck(&self) {
        let mut state = self.state();
        loop {
            let done = ERROR_OBSERVED.load(Ordering::SeqCst) && state.aborted;
            let until = match &state.failure {
                Some((_, found)) if !done => Some(*found + ABORT_GRACE),
                None if !state.pending.is_empty() => Some(state.heartbeat + DRIVER_STALL_LIMIT),
                _ => None,
            };
            if state.stopped && (state.failure.is_none() || state.aborted)
                || state.failure.is_some() && done
            {
                return;
            }
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            match (left, &state.failure) {
                (Some(Duration::ZERO), Some((failure, _))) => {
                    eprintln!(
                        "{failure}; the program has not noticed for {ABORT_GRACE:?}, so its process ends here"
                    );
                    std::process::abort();
                }
                (Some(Duration::ZERO), None) => {
                    let rank = self.failure.core.world.rank;
                    let operation = state
                        .pending
                        .front()
                        .map(|pending| pending.operation.to_string())
                        .unwrap_or_default();
                    eprintln!(
                        "rank {rank}: {operation}: no answer from the driver for {DRIVER_STALL_LIMIT:?}, so the process ends here"
                    );
                    std::process::abort();
                }
                _ => {
                    let wait = left.unwrap_or(DRIVER_STALL_LIMIT);
                    state = self
                        .change
                        .wait_timeout(state, wait)
                        .unwrap_or_else(PoisonError::into_inner)
                        .0;
                }
            }
        }
    }

    fn pop_completed(&self, operation: &EnqueuedOp, clock: Option<&DeviceClock>) {
        let mut state = self.state();
        match state.pending.front() {
            Some(oldest) if oldest.operation.number == operation.number => {}
            _ => return,
        }
        let Some(completed) = state.pending.pop_front() else { return };
        state.warned = false;
        drop(state);
        let recorder = &self.failure.core.recorder;
        match clock.and_then(|clock| completed.times(clock)) {
            Some((started, done)) => recorder.finish_at(operation.record, started, done),
            None => recorder.finish(operation.record),
        }
    }

    /// Returns what is wrong with the oldest operation, if anything is. `gone_since` is set when a
    /// peer is first found to be gone.
    fn diagnose(
        &self,
        operation: &EnqueuedOp,
        begun: Instant,
        done: Option<&Event>,
        gone_since: &mut Option<Instant>,
    ) -> Option<Error> {
        let failure = &self.failure;
        let rank = failure.core.world.rank;
        if let Err(error) = failure.check_failure(operation, true) {
            return Some(error);
        }
        if let Err(error @ CommunicatorError::Nccl(_)) = self.communicator.check() {
            return Some(self.explained(operation, error.into()));
        }
        // A peer may exit when its part of the operation is over, a little before the operation is
        // over here.
        let mut gone = failure.departed_peers();
        gone.retain(|&peer| operation.may_need(peer));
        if !gone.is_empty() && is_over(done) == Ok(false) {
            let late = gone_since.get_or_insert_with(Instant::now).elapsed() > PEER_EXIT_GRACE;
            // Nobody knows which ranks have begun their part of a batch.
            let is_batch = operation.op.descriptor.kind == Kind::BatchSendRecv;
            for peer in gone {
                if late || !is_batch && !self.progress.has_begun(peer, operation) {
                    return Some(failure.fail_peer_lost(peer, operation));
                }
            }
        }
        let age = begun.elapsed();
        let timeout = failure.core.timeout();
        if age >= timeout {
            return Some(self.timed_out(operation, timeout));
        }
        if age >= FIRST_WARNING && !std::mem::replace(&mut self.state().warned, true) {
            log::warn!(
                "rank {rank}: {operation} has waited {} s for {}",
                age.as_secs(),
                self.progress.missing(operation)
            );
        }
        None
    }

    /// Returns the error of an operation. NCCL may know that a peer is lost a little before this
    /// rank learns which, or why.
    fn explained(&self, operation: &EnqueuedOp, error: EnqueueError) -> Error {
        let failure = &self.failure;
        let grace = PEER_LOSS_GRACE.min(failure.core.timeout() / 4);
        let begin = Instant::now();
        while error.lost_a_peer && begin.elapsed() < grace {
            if let Err(error) = failure.check_failure(operation, true) {
                return error;
            }
            // One that has left may have done its part.
            let mut gone = failure.departed_peers();
            gone.retain(|&peer| operation.may_need(peer));
            if let Some(&peer) = gone
                .iter()
                .find(|&&peer| !failure.has_left(peer) || !self.progress.has_begun(peer, operation))
            {
                return failure.fail_peer_lost(peer, operation);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        self.system(operation, error.reason)
    }

    fn system(&self, operation: &EnqueuedOp, reason: String) -> Error {
        Error::System {
            rank: self.failure.core.world.rank,
            operation: operation.to_string(),
            reason,
        }
    }

    fn fail(&self, error: Error) -> Error {
        let mut state = self.state();
        if let Some((first, _)) = &state.failure {
            return first.clone();
        }
        state.failure = Some((error.clone(), Instant::now()));
        let pending = std::mem::take(&mut state.pending);
        drop(state);
        self.change.notify_all();
        log::error!("{error}");
        if self.failure.check_failure(&"NCCL", false).is_ok() {
            self.failure.fail(error.clone());
        }
        let aborted = self.communicator.abort();
        self.state().aborted = aborted;
        self.change.notify_all();
        // Last: it may write a large file.
        self.failure.core.recorder.fail(pending.iter().map(|op| op.operation.record));
        error
    }

    fn timed_out(&self, operation: &EnqueuedOp, timeout: Duration) -> Error {
        let rank = self.failure.core.world.rank;
        if let Some((other, theirs)) = self.progress.find_other_operation(operation) {
            let detail = format!("rank {rank} called {operation}, rank {other} called {theirs}");
            return Error::Mismatch { rank, detail };
        }
        Error::Timeout {
            rank,
            operation: operation.to_string(),
            timeout,
            missing: format!(
                "{} (rank {rank} is {})",
                self.progress.missing(operation),
                self.failure.core.recorder.summary()
            ),
        }
    }
}

/// Whether an operation is over; its error if the device has failed.
fn is_over(done: Option<&Event>) -> std::result::Result<bool, String> {
    done.map_or(Ok(false), |done| done.is_done().map_err(|error| error.to_string()))
}
