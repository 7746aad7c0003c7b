//! The members of a group, which all parts of the group use.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use flow_kernels::DType;

use crate::arguments::Caller;
use crate::descriptor::{Location, MessageDescriptor, OpDescriptor};
use crate::kind::Kind;
use crate::label::Label;
use crate::memory::BufferView;
use crate::operation_context::OperationContext;
use crate::trace::{RecordId, Recorder, Start};
use crate::world::World;

/// The name in records of what moves a group's data on one node.
const SHARED_MEMORY: &str = "shm";

/// A group's members, and this rank among them.
pub struct GroupCore {
    pub world: Arc<World>,
    /// This rank within the group, and the members' ranks in the job.
    pub rank: usize,
    pub ranks: Vec<usize>,
    /// The members on this node, and this rank's position among them.
    pub locals: Vec<usize>,
    pub local: usize,
    /// The node of each member: nodes are numbered by their first members, their leaders.
    pub nodes: Vec<usize>,
    pub leaders: Vec<usize>,
    /// The group's name, which no other group of the job has.
    pub name: String,
    /// The number of groups that were made from this one.
    pub children: AtomicU64,
    /// Groups by [`ProcessGroup::new_group_of`](crate::ProcessGroup::new_group_of) that this rank
    /// is about to join.
    pub pending_groups: Mutex<Vec<String>>,
    /// Collectives on the host that this rank has begun.
    pub sequence: AtomicU64,
    /// Records what the group does, on GPUs too.
    pub recorder: Recorder,
    pub launched_buckets: LaunchedBuckets,
    timeout: AtomicU64,
}

/// The records of the buckets under way.
#[derive(Default)]
pub struct LaunchedBuckets {
    records: Mutex<Vec<RecordId>>,
    /// The number of members there.
    count: AtomicUsize,
}

impl LaunchedBuckets {
    /// Whether no bucket is under way.
    pub fn is_empty(&self) -> bool {
        self.count.load(Ordering::Relaxed) == 0
    }

    /// Returns the records of all buckets under way.
    pub fn records(&self) -> Vec<RecordId> {
        self.lock().clone()
    }

    /// Adds a bucket that begins.
    pub fn add(&self, record: RecordId) {
        self.change(|records| records.push(record));
    }

    /// Removes a bucket that is over.
    pub fn remove(&self, record: RecordId) {
        self.change(|records| {
            let index = records.iter().position(|&other| other == record);
            index.map(|index| records.remove(index));
        });
    }

    fn change(&self, change: impl FnOnce(&mut Vec<RecordId>)) {
        let mut records = self.lock();
        change(&mut records);
        self.count.store(records.len(), Ordering::Relaxed);
    }

    fn lock(&self) -> MutexGuard<'_, Vec<RecordId>> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl GroupCore {
    /// Returns the members of a group, given by their ranks in the job.
    pub fn new(world: Arc<World>, ranks: Vec<usize>, timeout: Duration, name: String) -> Self {
        let caller = ranks.iter().position(|&rank| rank == world.rank);
        let rank = caller.expect("the caller is a member"); // invariant
        let locals: Vec<usize> =
            (0..ranks.len()).filter(|&r| world.local_index(ranks[r]).is_some()).collect();
        let own = locals.iter().position(|&member| member == rank);
        let local = own.expect("a rank is on its own node"); // invariant
        let mut leaders: Vec<usize> = Vec::new();
        let mut nodes = Vec::with_capacity(ranks.len());
        for (member, &rank) in ranks.iter().enumerate() {
            let node = leaders
                .iter()
                .position(|&leader| world.node_leader(ranks[leader]) == world.node_leader(rank));
            nodes.push(node.unwrap_or(leaders.len()));
            if node.is_none() {
                leaders.push(member);
            }
        }
        let transport = world.transport.as_ref().filter(|_| locals.len() < ranks.len());
        let backend = transport.map_or(SHARED_MEMORY, |transport| transport.name());
        let recorder = Recorder::new(name.clone(), backend, !world.is_in_process());
        let core = Self {
            world,
            rank,
            ranks,
            locals,
            local,
            nodes,
            leaders,
            name,
            children: AtomicU64::new(0),
            pending_groups: Mutex::default(),
            sequence: AtomicU64::new(0),
            recorder,
            launched_buckets: LaunchedBuckets::default(),
            timeout: AtomicU64::new(0),
        };
        core.set_timeout(timeout);
        core
    }

    /// Returns the number of members.
    pub fn size(&self) -> usize {
        self.ranks.len()
    }

    /// Returns how many members are on other nodes.
    pub fn remote_size(&self) -> usize {
        self.ranks.len() - self.locals.len()
    }

    /// Whether this rank sends and receives between nodes for the members on its own.
    pub fn is_leader(&self) -> bool {
        self.is_inter_node() && self.local == 0
    }

    /// Whether members are on other nodes.
    pub fn is_inter_node(&self) -> bool {
        self.locals.len() < self.ranks.len()
    }

    /// Returns this rank, for checks of its arguments.
    pub fn caller(&self) -> Caller {
        Caller { job_rank: self.world.rank, rank: self.rank, size: self.size() }
    }

    /// Returns how long the operation that this thread runs waits.
    pub fn timeout(&self) -> Duration {
        match OperationContext::timeout() {
            Some(timeout) => timeout,
            None => Duration::from_nanos(self.timeout.load(Ordering::Relaxed)),
        }
    }

    /// Changes how long the group's operations wait.
    pub fn set_timeout(&self, timeout: Duration) {
        self.timeout
            .store(u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Describes a message to or from a member, or from any.
    pub fn message(
        &self,
        kind: Kind,
        peer: Option<usize>,
        (data, dtype): (BufferView, DType),
        tag: u32,
        label: Option<Label>,
    ) -> MessageDescriptor {
        MessageDescriptor {
            kind,
            peer: peer.map(|peer| self.ranks[peer]),
            count: data.bytes / dtype.size(),
            dtype,
            tag,
            label,
        }
    }

    /// Gives a collective on the host its sequence number: that of the asynchronous call that runs
    /// here, or the next. Returns what is recorded of it.
    pub fn assign_sequence(&self, operation: &mut OpDescriptor) -> Start {
        let (sequence, queued) = self.recorder.begin_collective();
        operation.sequence = sequence;
        operation.record(queued)
    }

    /// Notes that a collective begins on the host.
    pub fn count_collective(&self) {
        self.sequence.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns where the other ranks of this node can find memory of this one.
    pub fn locate(&self, data: *const u8, bytes: usize) -> Location {
        self.world.arena.offset_of(data, bytes).map_or(Location::Staged, Location::Shared)
    }

    /// Whether a member can have memory there: offsets of peers are checked before use.
    pub fn is_reachable(&self, rank: usize, offset: usize, bytes: usize) -> bool {
        self.world
            .local_index(self.ranks[rank])
            .map(|index| self.world.tenancy.region(index))
            .is_some_and(|region| self.world.arena.holds(region, offset, bytes))
    }

    /// Returns the members for which `condition` holds.
    pub fn ranks_where(&self, condition: impl Fn(usize) -> bool) -> Vec<usize> {
        (0..self.size()).filter(|&rank| condition(rank)).collect()
    }

    /// Returns the members on this node for which `condition` holds.
    pub fn locals_where(&self, condition: impl Fn(usize) -> bool) -> Vec<usize> {
        self.locals.iter().copied().filter(|&rank| condition(rank)).collect()
    }

    /// Returns missing ranks, with the leader if others come by way of it.
    pub fn with_leader(&self, mut missing: Vec<usize>) -> Vec<usize> {
        let leader = self.locals[0];
        if self.rank != leader && missing.iter().any(|rank| !self.locals.contains(rank)) {
            missing.push(leader);
        }
        missing
    }

    /// Returns the key of something of this group in the store.
    pub fn key(&self, what: &str) -> String {
        format!("{}group/{}/{what}", self.world.prefix, self.name)
    }
}
