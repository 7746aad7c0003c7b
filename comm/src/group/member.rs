//! This process as a member of a group: who it is, its state, and its memory there.

use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use flow_kernels::Element;
use flow_kernels::cuda::Device;
use flow_store::fork::ForkSafe;

use super::core::GroupCore;
use super::cuda::Cuda;
use super::lane::{Lane, Workers};
use super::parts::Parts;
use crate::arguments::Caller;
use crate::buffer::SharedBuffer;
use crate::error::{Error, Result};
use crate::failure::Failure;
use crate::shm::arena::{Arena, no_room};
use crate::trace::Record;
use crate::work::Worker;
use crate::world::EndGroup;

/// The longest timeout, which longer ones mean: a year.
pub const MAX_TIMEOUT: Duration = Duration::from_secs(365 * 24 * 3600);

/// This process as a member of a group. A [`ProcessGroup`](crate::ProcessGroup) is a handle of it,
/// and has all its methods.
pub struct Member {
    state: ForkSafe<MemberState>,
}

struct MemberState {
    // Before the parts: their threads must end first.
    workers: Workers,
    cuda: Mutex<Cuda>,
    parts: Parts,
    local_rank: usize,
}

impl Member {
    /// Returns a member without threads; `local_rank` is its number on its machine.
    pub(crate) fn new(parts: Parts, local_rank: usize, cuda: Cuda) -> Self {
        let workers = Workers::default();
        Self {
            state: ForkSafe::new(MemberState {
                workers,
                cuda: Mutex::new(cuda),
                parts,
                local_rank,
            }),
        }
    }

    /// Returns the same member without threads: its operations run at once.
    pub(crate) fn without_workers(&self) -> Self {
        Self::new(self.state.parts.clone(), self.state.local_rank, Cuda::default())
    }

    /// Returns this process' number in the group.
    pub fn rank(&self) -> usize {
        self.core().rank
    }

    /// Returns the number of processes in the group.
    pub fn world_size(&self) -> usize {
        self.core().size()
    }

    /// Returns the members' ranks in the job, by their rank in this group.
    pub fn ranks(&self) -> &[usize] {
        &self.core().ranks
    }

    /// Returns this process' number among those of the job on this machine: which of its devices to
    /// use.
    pub fn local_rank(&self) -> usize {
        self.state.local_rank
    }

    /// Returns how many members of the group are on this node, this process among them.
    pub fn local_world_size(&self) -> usize {
        self.core().locals.len()
    }

    /// Returns this rank's number among the members of the group that are on this node.
    pub fn local_index(&self) -> usize {
        self.core().local
    }

    /// Returns the members that are on the node of one of them, in their order; none if it is no member.
    pub fn ranks_on_machine_of(&self, rank: usize) -> Vec<usize> {
        let nodes = &self.core().nodes;
        self.core().ranks_where(|other| nodes.get(rank) == Some(&nodes[other]))
    }

    /// Returns how many ranks of the job are on this node, whether in the group or not: they share
    /// its cores.
    pub fn ranks_on_node(&self) -> usize {
        self.core().world.locals.len()
    }

    /// Whether the ranks are threads of one process, which has one allocator for all of them.
    pub fn is_in_process(&self) -> bool {
        self.core().world.is_in_process()
    }

    /// Returns how many collectives this rank has begun in the group on the host.
    pub fn sequence(&self) -> u64 {
        self.core().sequence.load(Ordering::Relaxed)
    }

    /// Returns the group's last operations on this rank, the oldest first, with those that are
    /// under way. They are those on the host and on GPUs, some hundred of them. Recording is always
    /// on.
    pub fn flight_recorder(&self) -> Vec<Record> {
        self.core().recorder.records()
    }

    /// Changes how long this rank waits; groups made from this one start with the new value.
    pub fn set_timeout(&self, timeout: Duration) {
        self.core().set_timeout(timeout.min(MAX_TIMEOUT));
    }

    /// Returns the GPU that this rank computes on, if one was chosen.
    pub fn cuda_device(&self) -> Option<Arc<Device>> {
        self.cuda().device.clone()
    }

    /// Returns the memory that all ranks of the machine map.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.core().world.arena
    }

    /// Allocates `len` zeros in memory that collectives use in place.
    pub fn alloc_shared<T: Element>(&self, len: usize) -> Result<SharedBuffer<T>> {
        let group = self.parts(&"alloc_shared")?;
        SharedBuffer::new(&group.core.world.arena, len).ok_or_else(|| {
            let what = format!("{len} x {}", T::DTYPE);
            let reason = no_room(&what, group.core.world.rank);
            self.system("alloc_shared", reason)
        })
    }

    /// Returns the error of `operation` if this process was forked from the rank.
    pub fn check_process(&self, operation: &str) -> Result<()> {
        self.parts(&operation).map(drop)
    }

    /// Returns the error of `operation` if the group has failed.
    pub fn check(&self, operation: &str) -> Result<()> {
        self.parts(&operation)?.failure.check_poison(&operation)
    }

    /// Makes the group unusable on all ranks, whose waits end with `cause`.
    pub fn abort(&self, cause: &str) {
        if let Ok(group) = self.parts(&"abort") {
            group.failure.abort(cause);
        }
    }

    /// Fails the group on all ranks for a reason that one or more of them found out. All ranks call
    /// this, with an empty text if they have nothing to add, and then
    /// [`Member::collect_error_details`].
    pub fn await_error_details(&self, operation: &str, own: &str) {
        if let Ok(group) = self.parts(&operation) {
            group.failure.await_error_details(operation, own);
        }
    }

    /// Returns what all ranks have given [`Member::await_error_details`], by rank in the job.
    pub fn collect_error_details(&self) -> Vec<(usize, String)> {
        match self.parts(&"collect_error_details") {
            Ok(group) => group.failure.collect_error_details(),
            Err(_) => Vec::new(),
        }
    }

    /// Whether another rank has called [`Member::await_error_details`].
    pub fn awaits_error_details(&self) -> bool {
        self.parts(&"awaits_error_details").is_ok_and(|group| group.failure.awaits_error_details())
    }

    /// Returns the members of the group.
    pub(crate) fn core(&self) -> &GroupCore {
        &self.state.parts.core
    }

    /// Whether, and why, the group has failed.
    pub(crate) fn failure(&self) -> &Arc<Failure> {
        &self.state.parts.failure
    }

    /// Returns the group's parts, for an operation that takes the member itself, and not a process
    /// that was forked from it.
    pub(crate) fn parts(&self, operation: &dyn fmt::Display) -> Result<&Parts> {
        if self.state.is_ours() {
            Ok(&self.state.parts)
        } else {
            Err(self.core().world.forked(operation))
        }
    }

    /// Returns the threads of operations that run beside the caller.
    pub(crate) fn workers(&self) -> &Workers {
        &self.state.workers
    }

    /// Waits for the asynchronous operations of a lane that were started.
    #[inline]
    pub(crate) fn drain(&self, lane: Lane) {
        if let Some(worker) = self.state.workers.get(lane) {
            Worker::drain(&worker);
        }
    }

    /// Locks what the group has on GPUs.
    pub(crate) fn cuda(&self) -> MutexGuard<'_, Cuda> {
        self.state.cuda.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns this rank, for checks of its arguments.
    pub(crate) fn caller(&self) -> Caller {
        self.core().caller()
    }

    /// Returns the error of an operation that the system refuses.
    pub(crate) fn system(&self, operation: &str, reason: String) -> Error {
        Error::System { rank: self.core().world.rank, operation: operation.into(), reason }
    }
}

impl EndGroup for Member {
    fn abort(&self, cause: &str) {
        self.abort(cause);
    }

    fn settle(&self) {
        // Ends waits, also where a process has died as it noted why the group fails.
        self.state.parts.failure.cancel();
        self.state.workers.drain();
        self.state.parts.host.settle();
    }
}
