//! A process group's collectives on GPUs.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use flow_kernels::cuda::{Device, Event, Stream};
use flow_store::fork::ForkSafe;

use super::bootstrap::{JOINING, init_communicator, join_check, not_joined};
use super::communicator::{Communicator, CommunicatorError};
use super::error::{EnqueueError, system_error};
use super::memory::FlatMemory;
use super::progress::{CudaOp, EnqueuedOp};
use super::watchdog::Watchdog;
use crate::arguments::Caller;
use crate::error::{Error, Result};
use crate::failure::Failure;
use crate::trace::{self, Start};

/// A process group's part on one GPU, over NCCL.
///
/// Made by [`ProcessGroup::use_cuda`](crate::ProcessGroup::use_cuda). An operation is enqueued on
/// the group's own stream and returns at once. It begins when the work that was enqueued on
/// `stream` before is over, and later work on `stream` begins when it is over. The host never
/// waits, except in [`CudaGroup::barrier`] and for NCCL to connect two ranks when they first send.
///
/// A failure (a lost peer, an error of NCCL's, a rank that does not come in time) is found by a
/// watchdog. It aborts what is on the device, fails the process group on all ranks, and is the
/// error of the next call. A program that makes none for 30 seconds, as it hangs in a call to the
/// device, is ended.
pub struct CudaGroup {
    /// Before the communicator: it uses that.
    watchdog: ForkSafe<Watchdog>,
    pub(super) communicator: ForkSafe<Arc<Communicator>>,
    pub(super) failure: ForkSafe<Arc<Failure>>,
    device: ForkSafe<Arc<Device>>,
    stream: ForkSafe<Stream>,
    state: ForkSafe<Mutex<IssueState>>,
    /// Prefix of the group's keys in the store.
    prefix: String,
}

/// The state that changes with each operation: operations are enqueued one at a time.
struct IssueState {
    /// The number of operations that were enqueued.
    enqueued: u64,
    /// The number of collectives among them.
    collectives: u64,
    splits: usize,
    ready: Event,
    /// All events of the group, the oldest first.
    events: VecDeque<Arc<Event>>,
}

impl CudaGroup {
    /// Makes the group. `tag` is the same on all ranks, and no other group's.
    pub(crate) fn new(failure: Arc<Failure>, device: Arc<Device>, tag: &str) -> Result<Self> {
        let prefix = format!("nccl/{tag}/");
        let communicator = init_communicator(&failure, &device, &prefix)?;
        Self::of(failure, device, communicator, prefix)
    }

    fn of(
        failure: Arc<Failure>,
        device: Arc<Device>,
        communicator: Arc<Communicator>,
        prefix: String,
    ) -> Result<Self> {
        let stream = Stream::high_priority(&device)
            .map_err(|error| cannot_join(&failure, error.to_string()))?;
        let ready =
            Event::new(&device).map_err(|error| cannot_join(&failure, error.to_string()))?;
        let watchdog =
            Watchdog::start(Arc::clone(&failure), Arc::clone(&communicator), prefix.clone())
                .map_err(|error| {
                    cannot_join(&failure, format!("cannot start a thread: {error}"))
                })?;
        let state = Mutex::new(IssueState {
            enqueued: 0,
            collectives: 0,
            splits: 0,
            ready,
            events: VecDeque::new(),
        });
        Ok(Self {
            watchdog: ForkSafe::new(watchdog),
            communicator: ForkSafe::new(communicator),
            failure: ForkSafe::new(failure),
            device: ForkSafe::new(device),
            stream: ForkSafe::new(stream),
            state: ForkSafe::new(state),
            prefix,
        })
    }

    /// Makes the part of a new sub-group; `member` is the failure part of this rank's own one, if
    /// it has one. All ranks of this group call this; it makes the sub-groups of all of them.
    pub(crate) fn split(&self, member: Option<&Arc<Failure>>) -> Result<Option<Self>> {
        let mut state = self.issue_state(&"new_group")?;
        self.watchdog.check(&"new_group")?;
        state.splits += 1;
        let prefix = format!("{}{}/", self.prefix, state.splits);
        let key = member.map_or(0, |failure| failure.core.rank);
        let mut cancelled = join_check(&self.failure, &prefix)?;
        // The first member's rank tells the sub-groups apart.
        let color = member.map(|failure| failure.core.ranks[0]);
        let split = self.communicator.split(color.map(|rank| rank as u32), key, &mut cancelled);
        drop(cancelled);
        let split = split.map_err(|error| self.watchdog.fail(not_joined(&self.failure, error)))?;
        match (split, member) {
            (Some(communicator), Some(failure)) => {
                let prefix = format!("{prefix}{}/", failure.core.ranks[0]);
                Self::of(Arc::clone(failure), Arc::clone(&self.device), communicator, prefix)
                    .map(Some)
            }
            _ => Ok(None),
        }
    }

    /// Returns the GPU.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.communicator.size()
    }

    /// Returns this rank in the group.
    pub fn rank(&self) -> usize {
        self.communicator.rank()
    }

    /// Waits until all operations that have been enqueued are over. To know that before results are
    /// kept: after a failure, what is in device memory is of no use.
    ///
    /// # Errors
    ///
    /// A failure of the group, now or before.
    pub fn synchronize(&self) -> Result<()> {
        let done = self.event()?;
        done.record(&self.stream).map_err(|error| self.system("synchronize", error.to_string()))?;
        self.wait("synchronize", &done)
    }

    /// Makes the host wait for an event; the watchdog bounds that.
    pub(crate) fn wait(&self, operation: &str, done: &Event) -> Result<()> {
        let mut pause = Duration::from_micros(20);
        while !done.is_done().map_err(|error| self.system(operation, error.to_string()))? {
            self.check()?;
            std::thread::sleep(pause);
            pause = (2 * pause).min(Duration::from_millis(1));
        }
        self.check()
    }

    /// Returns the failure of the group, if it has failed.
    pub fn check(&self) -> Result<()> {
        self.member(&"NCCL")?.watchdog.check(&"NCCL")
    }

    /// Lets later work on `stream` wait for all operations that have been enqueued.
    pub fn join(&self, stream: &Stream) -> Result<()> {
        let state = self.issue_state(&"joining a stream")?;
        let joined = state.ready.record(&self.stream).and_then(|()| stream.wait(&state.ready));
        joined.map_err(|error| self.system("joining a stream", error.to_string()))
    }

    /// Makes the group unusable on all ranks, and ends what is under way on this rank's device.
    pub fn abort(&self, cause: &str) {
        if self.member(&"abort").is_err() {
            return;
        }
        self.failure.abort(cause);
        let rank = self.failure.core.world.rank;
        self.watchdog.fail(Error::Poisoned {
            rank,
            operation: "NCCL".into(),
            cause: cause.into(),
            is_mismatch: false,
        });
    }

    /// Enqueues an operation between what was enqueued on `stream` before and what will be.
    pub(crate) fn in_order(
        &self,
        operation: impl Into<CudaOp>,
        stream: &Stream,
        issue: impl FnOnce(&Communicator, &Stream) -> Result<(), CommunicatorError>,
    ) -> Result<()> {
        let operation = operation.into();
        if !Arc::ptr_eq(stream.device(), &self.device) {
            let reason =
                format!("the stream is on {:?}, the group on {:?}", stream.device(), self.device);
            return Err(self.caller().argument(operation.descriptor.kind.name(), reason));
        }
        let after = std::slice::from_ref(stream);
        let done = self
            .enqueue(operation.clone(), after, |communicator, own| Ok(issue(communicator, own)?))?;
        stream.wait(&done).map_err(|error| self.system(&operation.to_string(), error.to_string()))
    }

    /// Enqueues an operation that begins when what was enqueued on the streams `after` is over.
    pub(crate) fn enqueue(
        &self,
        operation: impl Into<CudaOp>,
        after: &[Stream],
        issue: impl FnOnce(&Communicator, &Stream) -> Result<(), EnqueueError>,
    ) -> Result<Arc<Event>> {
        let mut op = operation.into();
        let operation = &mut op.descriptor;
        let mut state = self.issue_state(&operation.kind.name())?;
        let recorder = &self.failure.core.recorder;
        let is_message = operation.kind.is_message();
        operation.sequence =
            if is_message { recorder.next_message() } else { recorder.next_collective() };
        let start = Start { is_cuda: true, ..operation.record(None) };
        self.watchdog.check(&op)?;
        state.collectives += u64::from(!is_message);
        let enqueued = EnqueuedOp {
            op,
            number: state.enqueued,
            collectives: state.collectives,
            record: recorder.start(&start),
        };
        state.enqueued += 1;
        self.watchdog.begin(enqueued.clone());
        match self.issue(&mut state, after, issue) {
            Ok((started, done)) => {
                state.events.extend(started.iter().chain([&done]).cloned());
                self.watchdog.enqueued(started, Arc::clone(&done));
                Ok(done)
            }
            Err(error) => Err(self.watchdog.refused(&enqueued, error)),
        }
    }

    /// Returns when the operation begins on the device, if events are kept, and when it is over.
    fn issue(
        &self,
        state: &mut IssueState,
        after: &[Stream],
        issue: impl FnOnce(&Communicator, &Stream) -> Result<(), EnqueueError>,
    ) -> Result<(Option<Arc<Event>>, Arc<Event>), EnqueueError> {
        for stream in after {
            state.ready.record(stream)?;
            self.stream.wait(&state.ready)?;
        }
        let mut started = None;
        if trace::is_on() {
            started = Some(state.mark(&self.stream)?);
        }
        issue(&self.communicator, &self.stream)?;
        Ok((started, state.mark(&self.stream)?))
    }

    /// Returns an event that nobody else uses.
    pub(super) fn event(&self) -> Result<Arc<Event>> {
        let mut state = self.issue_state(&"making an event")?;
        let event = state
            .take_event(&self.device)
            .map_err(|error| self.system("making an event", error.to_string()))?;
        state.events.push_back(Arc::clone(&event));
        Ok(event)
    }

    /// Allocates memory that NCCL can register.
    pub(super) fn allocate(&self, bytes: usize) -> Result<FlatMemory> {
        self.member(&"allocating device memory")?.communicator.allocate(bytes).map_err(|failure| {
            self.system("allocating device memory", EnqueueError::from(failure).reason)
        })
    }

    /// Returns the group, for an operation that takes a member, and not a process that was forked
    /// from it.
    pub(crate) fn member(&self, operation: &dyn fmt::Display) -> Result<&Self> {
        if self.failure.is_ours() {
            Ok(self)
        } else {
            Err(self.failure.core.world.forked(operation))
        }
    }

    fn issue_state(&self, operation: &dyn fmt::Display) -> Result<MutexGuard<'_, IssueState>> {
        Ok(self.member(operation)?.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns the error of an operation that the system refuses.
    pub(crate) fn system(&self, operation: &str, reason: String) -> Error {
        system_error(&self.failure, operation, reason)
    }

    /// Returns this rank, for checks of its arguments.
    pub(crate) fn caller(&self) -> Caller {
        self.failure.core.caller()
    }
}

/// Fails the group because this rank cannot join it on its GPU.
fn cannot_join(failure: &Failure, reason: String) -> Error {
    failure.fail(system_error(failure, JOINING, reason))
}

impl Drop for CudaGroup {
    /// Waits until operations under way are over; the group's timeout bounds that.
    fn drop(&mut self) {
        if self.watchdog.is_ours() {
            self.watchdog.drain();
        }
    }
}

impl fmt::Debug for CudaGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaGroup(rank {} of {} on {:?})", self.rank(), self.size(), self.device)
    }
}

impl IssueState {
    /// Marks the stream: returns an event that is over when all that has been enqueued on it is.
    fn mark(&mut self, stream: &Stream) -> Result<Arc<Event>, EnqueueError> {
        let event = self.take_event(stream.device())?;
        event.record(stream)?;
        Ok(event)
    }

    /// Takes an event that nobody uses any more, or a new one.
    fn take_event(
        &mut self,
        device: &Arc<Device>,
    ) -> Result<Arc<Event>, flow_kernels::cuda::Error> {
        let free = self.events.iter().position(|event| Arc::strong_count(event) == 1);
        match free.and_then(|index| self.events.remove(index)) {
            Some(event) => Ok(event),
            None => Event::timed(device).map(Arc::new),
        }
    }
}
