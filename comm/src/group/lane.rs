//! Lanes: what keeps its order among a group's operations.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::work::Worker;

/// Operations that keep their order: collectives, the messages to each rank, and those with each
/// tag from each rank. Each lane has a thread of its own for its asynchronous operations, so that a
/// rank may send while it waits to receive.
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

/// The workers of a group's lanes, each started with the first operation of its lane.
#[derive(Default)]
pub struct Workers {
    lanes: Mutex<HashMap<Lane, Arc<Worker>>>,
    /// Whether [`Workers::lock`] was ever called. Until then `lanes` is empty, and [`Workers::get`]
    /// takes no lock.
    started: AtomicBool,
}

impl Workers {
    /// Locks the table of workers, to look one up or add one.
    pub fn lock(&self) -> MutexGuard<'_, HashMap<Lane, Arc<Worker>>> {
        self.started.store(true, Ordering::Relaxed);
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the operations of all lanes that were started.
    pub fn drain(&self) {
        let workers: Vec<Arc<Worker>> = self.lock().values().cloned().collect();
        workers.iter().for_each(|worker| worker.drain());
    }

    /// Returns the lane's worker, if it was started.
    #[inline]
    pub fn get(&self, lane: Lane) -> Option<Arc<Worker>> {
        // A thread sees what it has started itself; threads that start operations beside each
        // other have no order.
        self.started.load(Ordering::Relaxed).then(|| self.lock().get(&lane).cloned())?
    }
}
