//! Failures that ranks on different nodes publish.
//!
//! Everything here is rare and goes through the store, where each rank has a connection of its own.
//! It is the group's first failure, what ranks have to say about it, and how far those are that
//! have waited long. A leader that fails also aborts its connections, so that the other leaders
//! learn of it at once.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::group::core::GroupCore;
use crate::internode::leaders::{LeaderConnections, LeaderState};
use crate::transport::DisconnectReason;

/// The interval at which a rank that waits asks for failures on other nodes.
pub const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// The time that a rank has waited when it publishes its progress.
const PUBLISH_AFTER: Duration = Duration::from_secs(1);

/// A group's failures between nodes. In a group on one node it does nothing.
pub struct RemoteFailures {
    core: Arc<GroupCore>,
    /// The connections to other leaders, in a leader.
    connections: OnceLock<Arc<LeaderConnections>>,
    /// The last progress that was published.
    published: AtomicU64,
    /// The time at which this rank last asked for failures.
    last_poll: Mutex<Option<Instant>>,
}

impl RemoteFailures {
    /// Returns the failures of a group, of which none is known yet.
    pub fn new(core: Arc<GroupCore>) -> Self {
        Self {
            core,
            connections: OnceLock::new(),
            published: AtomicU64::new(0),
            last_poll: Mutex::default(),
        }
    }

    /// Watches the leader's connections, and aborts them when the group fails.
    pub fn watch(&self, connections: Arc<LeaderConnections>) {
        let _ = self.connections.set(connections);
    }

    /// Returns the leader's connections, once they are watched, unless a thread uses them: that
    /// thread sees the failure itself.
    pub fn try_lock_connections(&self) -> Option<MutexGuard<'_, LeaderState>> {
        self.connections.get()?.try_lock()
    }

    /// Returns how the connection to a leader on another node has ended, as far as this rank can
    /// see.
    pub fn disconnect_reason(&self, rank: usize) -> Option<DisconnectReason> {
        if !self.core.leaders.contains(&rank) {
            return None;
        }
        self.try_lock_connections()?.leaders.disconnect_reason(self.core.nodes[rank])
    }

    /// Publishes the group's first failure.
    pub fn publish_failure(&self, failure: &str) {
        if let Some(mut connections) = self.try_lock_connections() {
            connections.leaders.abort(failure);
        }
        self.publish("failure", failure);
    }

    /// Asks for the failure that another node has published, waiting at most for `time`.
    pub fn failure(&self, time: Duration) -> Option<String> {
        self.lookup("failure", time)
    }

    /// Looks as [`RemoteFailures::failure`] does, without waiting, and not more often than every
    /// [`POLL_INTERVAL`].
    pub fn poll_failure(&self) -> Option<String> {
        if !self.core.is_inter_node() {
            return None;
        }
        let mut last = self.last_poll.lock().unwrap_or_else(PoisonError::into_inner);
        let last = last.get_or_insert_with(Instant::now);
        if last.elapsed() < POLL_INTERVAL {
            return None;
        }
        *last = Instant::now();
        self.failure(Duration::ZERO)
    }

    /// Publishes what this rank has to say about the failure.
    pub fn publish_detail(&self, own: &str) {
        self.publish(&format!("notice/{}", self.core.rank), own);
    }

    /// Returns the details that a rank on another node has published about the failure.
    pub fn detail(&self, rank: usize) -> Option<String> {
        self.lookup(&format!("notice/{rank}"), Duration::ZERO)
    }

    /// Publishes in which collective this rank is, when it has waited long.
    pub fn publish_progress(&self, waited: Duration, timeout: Duration) {
        if !self.core.is_inter_node() || waited < PUBLISH_AFTER.min(timeout / 4) {
            return;
        }
        let own = self.core.sequence.load(Ordering::Relaxed);
        if self.published.swap(own, Ordering::Relaxed) == own {
            return;
        }
        if let Some(store) = self.core.world.store() {
            let key = self.core.key(&format!("at/{}", self.core.rank));
            let _ = store.set(&key, own.to_string().as_bytes());
        }
    }

    /// Returns the missing ranks without those on other nodes that are known to be as far as this
    /// rank: they wait as well.
    pub fn lagging(&self, missing: Vec<usize>) -> Vec<usize> {
        if !self.core.is_inter_node() {
            return missing;
        }
        let own = self.core.sequence.load(Ordering::Relaxed);
        let late: Vec<usize> =
            missing.iter().copied().filter(|&rank| !self.is_remote_at(rank, own)).collect();
        if late.is_empty() { missing } else { late }
    }

    /// Whether a rank on another node has published that it has come to this collective.
    fn is_remote_at(&self, rank: usize, sequence: u64) -> bool {
        let progress = self.lookup(&format!("at/{rank}"), Duration::ZERO);
        let progress = progress.and_then(|progress| progress.parse::<u64>().ok());
        !self.core.locals.contains(&rank) && progress.is_some_and(|progress| progress >= sequence)
    }

    /// Sets one of the group's keys, unless it is set.
    fn publish(&self, key: &str, text: &str) {
        let Some(store) = self.core.world.store().filter(|_| self.core.is_inter_node()) else {
            return;
        };
        // If the store is gone, so is the rank, or the launcher, that hosted it: the others see
        // that.
        let _ = store.compare_and_set(&self.core.key(key), None, text.as_bytes());
    }

    fn lookup(&self, key: &str, time: Duration) -> Option<String> {
        let store = self.core.world.store().filter(|_| self.core.is_inter_node())?;
        let value = store.get(&self.core.key(key), time).ok()?;
        Some(String::from_utf8_lossy(&value).into_owned())
    }
}
