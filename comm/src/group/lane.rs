//! Lanes: what keeps its order among a group's operations.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::work::Worker;

/// What keeps its order: collectives, the messages to each rank, and those with each tag from each
/// rank. Each lane has a thread of its own for its asynchronous operations, so that a rank may send
/// while it waits to receive.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub enum Lane {
    /// All collectives.
    Collectives,
    /// Messages to this rank.
    To(usize),
    /// Messages from this rank, with this tag.
    From(usize, u32),
    /// Messages from any rank, with this tag.
    FromAny(u32),
}

impl Lane {
    /// Programs may use any number of tags, each for a short time.
    pub(super) fn is_lasting(self) -> bool {
        !matches!(self, Lane::From(_, 1..) | Lane::FromAny(1..))
    }
}

impl fmt::Display for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Lane::Collectives => write!(f, "a collective"),
            Lane::To(peer) => write!(f, "send to rank {peer} of the group"),
            Lane::From(peer, _) => write!(f, "recv from rank {peer} of the group"),
            Lane::FromAny(_) => write!(f, "recv from any rank"),
        }
    }
}

/// Started with the first operation of their lanes.
#[derive(Default)]
pub(super) struct Workers {
    lanes: Mutex<HashMap<Lane, Arc<Worker>>>,
    /// Whether [`Workers::lock`] was ever called. Until then `lanes` is empty, and [`Workers::get`]
    /// takes no lock.
    started: AtomicBool,
}

impl Workers {
    /// All of them, to start another.
    pub fn lock(&self) -> MutexGuard<'_, HashMap<Lane, Arc<Worker>>> {
        self.started.store(true, Ordering::Relaxed);
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The lane's, if it was started.
    #[inline]
    pub fn get(&self, lane: Lane) -> Option<Arc<Worker>> {
        // A thread sees what it has started itself; threads that start operations beside each
        // other have no order.
        self.started.load(Ordering::Relaxed).then(|| self.lock().get(&lane).cloned())?
    }
}
