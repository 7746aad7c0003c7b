//! The ranks of a job: on this machine the arena they share, on all machines who they are and
//! whether they still live.

use std::fmt::Display;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use flow_kernels::digest;
use flow_store::{Server, Store};

use crate::bootstrap::lineage::{Lineage, Seat};
use crate::error::Error;
use crate::liveness::ended;
use crate::shm::arena::{Arena, Block};
use crate::shm::control::Control;
use crate::shm::machine_buffer::RetiredBuffers;
use crate::shm::tenancy::Tenancy;
use crate::stall::{Stall, StallReporter};
use crate::trace;
use crate::transport::Transport;

/// The time that a waiting rank sleeps before it looks whether its peers live.
pub const LIVENESS_INTERVAL: Duration = Duration::from_millis(100);
/// A wait this long is worth a line in the log.
pub const FIRST_WARNING: Duration = Duration::from_secs(30);
/// The time to wait for a departed rank's process to exit, and for the launcher to report its exit
/// status.
pub const EXIT_REPORT_TIMEOUT: Duration = Duration::from_millis(500);

/// The longest time that a rank that drops its last group waits for the store to take note.
const DEPARTURE_TIMEOUT: Duration = Duration::from_secs(2);

/// A rank, as the others know it.
pub struct Peer {
    pub pid: u32,
    pub host: String,
    /// The first rank of its node.
    pub node: usize,
    /// Readable once the process has ended. None for this rank itself, for one that is gone, and on
    /// other nodes.
    pub pidfd: Option<OwnedFd>,
    /// The process had ended before it could be watched.
    pub gone: bool,
}

/// The way in which the ranks of a join have come together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Origin {
    /// They are processes that have met by way of a store.
    Processes,
    /// They are threads of this process.
    Threads,
}

/// A group, of which a join knows only how to end it.
pub trait EndGroup: Send + Sync {
    /// Makes the group unusable on all ranks, whose waits end with `cause`.
    fn abort(&self, cause: &str);

    /// Waits until no operation of this process is under way in it.
    fn settle(&self);
}

/// A rank of a job, with all that its groups share in this process.
pub struct World {
    pub rank: usize,
    pub size: usize,
    /// The ranks of this node.
    pub locals: Vec<usize>,
    pub arena: Arc<Arena>,
    /// Every rank of this machine can have a core of its own: a short spin is then cheaper than
    /// sleeping.
    pub spin: bool,
    /// The use of the memory that the ranks of this node share.
    pub(crate) tenancy: Arc<Tenancy>,
    pub(crate) peers: Vec<Peer>,
    /// The ranks as the launcher numbers them.
    pub(crate) seats: Vec<Seat>,
    /// Whether an operation of this rank has failed because another one has ended, or failed.
    pub(crate) has_failed: AtomicBool,
    /// The groups of this join.
    pub(crate) groups: Mutex<Vec<Weak<dyn EndGroup>>>,
    /// How this process has joined, and whom it may meet next; None for threads.
    pub(crate) lineage: Option<Lineage>,
    pub(crate) store: Option<Store>,
    pub origin: Origin,
    /// Names the join, alike on all its ranks: a program's first is `0`.
    pub name: String,
    /// Begins the keys of this join.
    pub prefix: String,
    pub(crate) launched: bool,
    /// Reports long waits to flow-launch, if it listens.
    pub(crate) waits: Option<StallReporter>,
    /// The transport to other nodes; None if there are none.
    pub transport: Option<Box<dyn Transport>>,
    pub(crate) server: Option<Arc<Server>>,
    /// Control blocks of dropped groups that peers have not yet left.
    pub(crate) retired_blocks: Mutex<Vec<(Block, Control)>>,
    /// Blocks of dropped machine buffers that peers have not yet left.
    pub(crate) retired_buffers: Arc<RetiredBuffers>,
}

impl World {
    /// Returns the first rank of a rank's node.
    pub fn node_leader(&self, rank: usize) -> usize {
        self.peers[rank].node
    }

    /// Returns a rank's number among those of this node.
    pub fn local_index(&self, rank: usize) -> Option<usize> {
        self.locals.iter().position(|&local| local == rank)
    }

    /// Whether `other`, another join of this process, has the same processes as its ranks.
    pub fn has_ranks_of(&self, other: &World) -> bool {
        let mut peers = self.peers.iter().zip(&other.peers);
        self.rank == other.rank
            && self.size == other.size
            && peers.all(|(own, other)| {
                own.pid == other.pid && own.node == other.node && own.host == other.host
            })
    }

    /// Whether its ranks are threads of this process.
    pub fn is_in_process(&self) -> bool {
        self.origin == Origin::Threads
    }

    /// Tells joins apart, alike on all ranks of one: no process has two of the same prefix.
    pub fn digest(&self) -> u64 {
        let peers: Vec<(u32, &str)> =
            self.peers.iter().map(|peer| (peer.pid, &peer.host[..])).collect();
        digest(&(&self.prefix, peers))
    }

    /// Returns this rank's number as the launcher knows it.
    pub fn seat(&self) -> usize {
        self.seats[self.rank].number
    }

    /// Notes that this process has a group.
    pub fn register(&self, group: Weak<dyn EndGroup>) {
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        groups.retain(|group| group.strong_count() > 0);
        groups.push(group);
    }

    /// Ends all groups of this join on all their ranks, and waits until nothing of this process is
    /// under way in them.
    pub fn end_groups(&self, cause: &str) {
        let registered = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        let groups: Vec<Arc<dyn EndGroup>> = registered.iter().filter_map(Weak::upgrade).collect();
        // What is to end may make a group.
        drop(registered);
        groups.iter().for_each(|group| group.abort(cause));
        groups.iter().for_each(|group| group.settle());
    }

    /// Returns the control block of the group of all ranks.
    pub fn root_control(&self) -> Control {
        self.tenancy.memory.control()
    }

    /// Makes the control block of a new group of `size` ranks, `locals` of them on this node,
    /// allocated by the first of these.
    pub fn new_control_block(&self, size: usize, locals: usize) -> Option<Block> {
        self.reclaim();
        let block = self.arena.allocate_zeroed(Control::bytes(size, locals))?;
        let control = Control::attach(Arc::clone(&self.arena), block.offset(), size, locals);
        control.header().attached.store(locals as u32, Ordering::SeqCst);
        Some(block)
    }

    /// Frees a group's control block as soon as its last member has left.
    pub fn retire(&self, block: Block, control: Control) {
        self.retired_blocks.lock().unwrap_or_else(PoisonError::into_inner).push((block, control));
        self.reclaim();
    }

    fn reclaim(&self) {
        let mut retired_blocks = self.retired_blocks.lock().unwrap_or_else(PoisonError::into_inner);
        retired_blocks.retain(|(_, control)| control.header().attached.load(Ordering::SeqCst) != 0);
    }

    /// Begins a wait, if flow-launch wants to know of long ones.
    pub fn long_wait(&self) -> Option<Stall<'_>> {
        Some(self.waits.as_ref()?.begin(self.store.as_ref()?))
    }

    /// Keeps this rank's events, if `FLOW_TRACE` asks for that. All ranks call this.
    pub fn join_trace(&self) {
        let Some(folder) = trace::folder() else { return };
        let leaders: Vec<usize> =
            (0..self.size).filter(|&rank| self.node_leader(rank) == rank).collect();
        let offset = self.store.as_ref().filter(|_| leaders.len() > 1).map(|store| {
            let leader = self.node_leader(self.rank);
            trace::clock_offset(store, &self.prefix, self.rank, &leaders, leader)
        });
        let clock_offset = offset.unwrap_or(Ok(0)).unwrap_or_else(|error| {
            log::warn!("rank {}: the trace has this machine's own time: {error}", self.rank);
            0
        });
        trace::join(trace::RankInfo {
            // The launcher merges the timelines by the ranks that it knows.
            rank: self.seat(),
            world_size: self.size,
            host: self.peers[self.rank].host.clone(),
            clock_offset,
            folder,
            pid: std::process::id(),
        });
    }

    /// Returns the rendezvous store; None for a process alone.
    pub fn store(&self) -> Option<&Store> {
        self.store.as_ref()
    }

    /// Whether the store ends with this process.
    pub fn hosts_store(&self) -> bool {
        self.server.is_some()
    }

    /// Returns which of `ranks`, as far as they are on this node, have ended, or the first that do
    /// within `time`.
    pub fn ended(&self, ranks: &[usize], time: Duration) -> Vec<usize> {
        let (watched, pidfds): (Vec<usize>, Vec<&OwnedFd>) =
            ranks.iter().filter_map(|&r| Some((r, self.peers[r].pidfd.as_ref()?))).unzip();
        let time = if watched.is_empty() { Duration::ZERO } else { time };
        let ended = ended(&pidfds, time).into_iter().map(|index| watched[index]);
        ranks.iter().copied().filter(|&r| self.peers[r].gone).chain(ended).collect()
    }

    /// Names a rank for messages, as "rank 1 (pid 42 on host)".
    pub fn describe(&self, rank: usize) -> String {
        format!("rank {rank} (pid {} on {})", self.peers[rank].pid, self.peers[rank].host)
    }

    /// Returns the error of an operation in a process that was forked from this rank.
    pub fn forked(&self, operation: &dyn Display) -> Error {
        Error::Forked {
            rank: self.rank,
            operation: operation.to_string(),
            pid: std::process::id(),
            parent: self.describe(self.rank),
        }
    }

    /// Returns how a rank has ended, if flow-launch says so within `time`.
    pub fn exit_report(&self, rank: usize, time: Duration) -> Option<String> {
        let report = self
            .store
            .as_ref()
            .filter(|_| self.launched)?
            .get(&self.seats[rank].exit_key(), time)
            .ok()?;
        Some(String::from_utf8_lossy(&report).into_owned())
    }

    /// Whether a rank has dropped all its groups of this join, over several nodes. None where the
    /// store does not answer.
    pub fn has_left(&self, rank: usize) -> Option<bool> {
        let departure = self.store.as_ref()?.try_get(&self.departure_key(rank)).ok()?;
        Some(departure.is_some())
    }

    fn departure_key(&self, rank: usize) -> String {
        format!("{}left/{rank}", self.prefix)
    }

    /// Returns how a rank has ended, or that it has `left` its group. A rank often leaves because
    /// its process ends, so this waits for the end. The end is the cause, and comes before the ends
    /// of those that fail because of it.
    pub fn loss_cause(&self, rank: usize, left: bool) -> String {
        if left
            && self.local_index(rank).is_some()
            && self.ended(&[rank], EXIT_REPORT_TIMEOUT).is_empty()
        {
            return "has left the group".into();
        }
        let end =
            self.exit_report(rank, EXIT_REPORT_TIMEOUT).map(|end| format!("ended with {end}"));
        match (left, end) {
            (false, end) => end.unwrap_or_else(|| "died".into()),
            (true, None) if self.local_index(rank).is_none() => "has left the group".into(),
            (true, end) => format!("has left the group, and {}", end.as_deref().unwrap_or("ended")),
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if let (Some(store), Some(_)) = (&self.store, &self.transport) {
            // Before the transport refuses connections. The store's machine may be gone.
            store.set_reply_timeout(DEPARTURE_TIMEOUT);
            let _ = store.set(&self.departure_key(self.rank), &[]);
        }
        self.reclaim();
        let retired_blocks = self.retired_blocks.get_mut().unwrap_or_else(PoisonError::into_inner);
        retired_blocks.drain(..).for_each(|(block, _)| self.tenancy.retire(block));
    }
}
