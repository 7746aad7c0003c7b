//! The ranks of a job: on this machine the arena they share, on all machines who they are and
//! whether they still live.

use std::fmt::Display;
use std::hash::{Hash, Hasher};
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};

use super::arena::{Arena, Block};
use super::control::{Control, Counter};
use crate::error::Error;
use crate::nodes::Network;
use crate::store::{Server, Store};
use crate::waits::{LongWait, Waits};

/// How long a waiting rank sleeps before it looks whether its peers live.
pub const SLICE: Duration = Duration::from_millis(100);
/// A wait this long is worth a line in the log.
pub const FIRST_WARNING: Duration = Duration::from_secs(30);
/// How long a rank that left a group may take to end, and the launcher to say how.
pub const EXIT_REPORT: Duration = Duration::from_millis(500);

/// What is known of a rank.
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

/// What the groups of one job share in this process.
pub struct World {
    pub rank: usize,
    pub size: usize,
    /// The ranks of this node.
    pub locals: Vec<usize>,
    pub arena: Arc<Arena>,
    /// Every rank of this machine can have a core of its own: a short spin is then cheaper than
    /// sleeping.
    pub spin: bool,
    pub(super) root: usize,
    pub(super) peers: Vec<Peer>,
    pub(super) store: Option<Store>,
    /// Begins the keys of this world.
    pub prefix: String,
    pub(super) launched: bool,
    /// How to tell flow-launch of long waits, if it listens.
    pub(super) waits: Option<Waits>,
    /// To other nodes; None if there are none.
    pub network: Option<Box<dyn Network>>,
    pub(super) server: Option<Arc<Server>>,
    /// Control blocks of dropped groups that peers have not yet left.
    pub(super) graveyard: Mutex<Vec<(Block, Control)>>,
}

impl World {
    /// The first rank of a rank's node.
    pub fn node(&self, rank: usize) -> usize {
        self.peers[rank].node
    }

    /// A rank's number among those of this node.
    pub fn local_index(&self, rank: usize) -> Option<usize> {
        self.locals.iter().position(|&local| local == rank)
    }

    /// Whether `other`, another join of this process, has the same processes as its ranks.
    pub fn has_ranks_of(&self, other: &World) -> bool {
        let same = |(own, other): (&Peer, &Peer)| {
            (own.pid, own.node, &own.host) == (other.pid, other.node, &other.host)
        };
        let peers = self.peers.iter().zip(&other.peers);
        (self.rank, self.size) == (other.rank, other.size) && peers.into_iter().all(same)
    }

    /// Tells joins apart, alike on all ranks of one: no process has two of the same prefix.
    pub fn mark(&self) -> u64 {
        let mut hasher = fnv::FnvHasher::default();
        self.prefix.hash(&mut hasher);
        self.peers.iter().for_each(|peer| (peer.pid, &peer.host).hash(&mut hasher));
        hasher.finish()
    }

    /// The control block of the group of all ranks.
    pub fn root_control(&self) -> Control {
        Control::attach(Arc::clone(&self.arena), self.root, self.size, self.locals.len())
    }

    /// The control block of a new group of `size` ranks, `locals` of them on this node, allocated
    /// by the first of these.
    pub fn new_control_block(&self, size: usize, locals: usize) -> Option<Block> {
        self.sweep();
        let block = self.arena.allocate_zeroed(Control::bytes(size, locals))?;
        let control = Control::attach(Arc::clone(&self.arena), block.offset(), size, locals);
        control.header().attached.store(locals as u32, Ordering::SeqCst);
        Some(block)
    }

    /// Frees a group's control block as soon as its last member has left.
    pub fn bury(&self, block: Block, control: Control) {
        self.graveyard.lock().unwrap_or_else(PoisonError::into_inner).push((block, control));
        self.sweep();
    }

    fn sweep(&self) {
        let mut graveyard = self.graveyard.lock().unwrap_or_else(PoisonError::into_inner);
        graveyard.retain(|(_, control)| control.header().attached.load(Ordering::SeqCst) != 0);
    }

    /// A wait that begins now, if flow-launch wants to know of long ones.
    pub fn long_wait(&self) -> Option<LongWait<'_>> {
        Some(self.waits.as_ref()?.begin(self.store.as_ref()?))
    }

    /// The rendezvous store; None for a process alone.
    pub fn store(&self) -> Option<&Store> {
        self.store.as_ref()
    }

    /// Whether the store ends with this process.
    pub fn serves(&self) -> bool {
        self.server.is_some()
    }

    /// Which of `ranks`, as far as they are on this node, have ended, or the first that do within
    /// `time`.
    pub fn ended(&self, ranks: &[usize], time: Duration) -> Vec<usize> {
        let watched: Vec<(usize, &OwnedFd)> =
            ranks.iter().filter_map(|&r| Some((r, self.peers[r].pidfd.as_ref()?))).collect();
        let mut fds: Vec<PollFd<'_>> =
            watched.iter().map(|(_, fd)| PollFd::new(fd, PollFlags::IN)).collect();
        let time = rustix::event::Timespec {
            tv_sec: time.as_secs() as i64,
            tv_nsec: i64::from(time.subsec_nanos()),
        };
        if rustix::event::poll(&mut fds, Some(&time)).is_err() {
            return Vec::new();
        }
        let ended = watched
            .iter()
            .zip(&fds)
            .filter(|(_, fd)| !fd.revents().is_empty())
            .map(|((r, _), _)| *r);
        ranks.iter().copied().filter(|&r| self.peers[r].gone).chain(ended).collect()
    }

    /// "rank 1 (pid 42 on host) ...", for messages.
    pub fn describe(&self, rank: usize) -> String {
        format!("rank {rank} (pid {} on {})", self.peers[rank].pid, self.peers[rank].host)
    }

    /// The error of an operation in a process that was forked from this rank.
    pub fn forked(&self, operation: &dyn Display) -> Error {
        let (rank, pid, parent) = (self.rank, std::process::id(), self.describe(self.rank));
        Error::Forked { rank, operation: operation.to_string(), pid, parent }
    }

    /// How a rank has ended, if flow-launch says so within `time`.
    pub fn report_of_end(&self, rank: usize, time: Duration) -> Option<String> {
        let report = self
            .store
            .as_ref()
            .filter(|_| self.launched)?
            .get(&format!("exit/{rank}"), time)
            .ok()?;
        Some(String::from_utf8_lossy(&report).into_owned())
    }

    /// What became of a rank that has ended, or `left` its group, which it may have done on its way
    /// to its end: to wait for that tells the cause, and lets its process end before those that
    /// only fail because of it.
    pub fn cause_of_loss(&self, rank: usize, left: bool) -> String {
        if left && self.local_index(rank).is_some() && self.ended(&[rank], EXIT_REPORT).is_empty() {
            return "has left the group".into();
        }
        let end = self.report_of_end(rank, EXIT_REPORT).map(|end| format!("ended with {end}"));
        match (left, end) {
            (false, end) => end.unwrap_or_else(|| "died".into()),
            (true, None) if self.local_index(rank).is_none() => "has left the group".into(),
            (true, end) => format!("has left the group, and {}", end.as_deref().unwrap_or("ended")),
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.sweep();
        let graveyard = self.graveyard.get_mut().unwrap_or_else(PoisonError::into_inner);
        graveyard.drain(..).for_each(|(block, _)| block.abandon());
    }
}

/// Sleeps until `counter` may have come to `target`, at most for `time`.
pub fn sleep_on(counter: &Counter, target: u32, time: Duration) {
    use rustix::thread::futex;
    counter.waiters.fetch_add(1, Ordering::SeqCst);
    let seen = counter.value.load(Ordering::SeqCst);
    if (seen.wrapping_sub(target) as i32) < 0 {
        let time = futex::Timespec {
            tv_sec: time.as_secs() as i64,
            tv_nsec: i64::from(time.subsec_nanos()),
        };
        // Woken, timed out, interrupted: the caller looks at the counter in any case.
        let _ = futex::wait(&counter.value, futex::Flags::empty(), seen, Some(&time));
    }
    counter.waiters.fetch_sub(1, Ordering::SeqCst);
}
