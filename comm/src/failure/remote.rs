//! Failures and members on other nodes.
//!
//! Everything here is rare and goes through the store, where each rank has a connection of its own:
//! the group's first failure, what ranks say about it, and how far those are that have waited long.
//! A leader that fails also aborts its connections, so that the other leaders learn of it at once.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::{Failure, ERROR_DETAILS, LOST};
use crate::transport::{Connections, DisconnectReason};

/// How often a rank that waits asks for failures on other nodes.
pub const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// How long a rank has waited when it publishes its progress.
const PUBLISH_AFTER: Duration = Duration::from_secs(1);

/// A leader's connections to the leaders of other nodes, as far as failures concern them. No call
/// waits for a thread that uses the connections: that thread sees the failure itself.
pub trait WatchedConnections: Send + Sync {
    /// Ends the connections with the group's failure as the reason.
    fn abort(&self, failure: &str);

    /// How the connection to a node has ended, if it has.
    fn disconnect_reason(&self, node: usize) -> Option<DisconnectReason>;

    /// Closes the connections in good order: this rank leaves.
    fn shutdown(&self);
}

/// What a rank knows of other nodes.
#[derive(Default)]
pub struct Remote {
    /// In the leader.
    pub connections: OnceLock<Arc<dyn WatchedConnections>>,
    /// The last progress that was published.
    published: AtomicU64,
    /// When this rank last asked for failures.
    polled: Mutex<Option<Instant>>,
}

impl Failure {
    /// Watches the leader's connections, and aborts them when the group fails.
    pub fn watch_connections(&self, connections: Arc<dyn WatchedConnections>) {
        let _ = self.remote.connections.set(connections);
    }

    /// Closes the leader's connections, with the group's failure as the reason if it has failed.
    pub fn close_connections(&self) {
        let Some(connections) = self.remote.connections.get() else { return };
        match self.control.header().poison.read() {
            Some((kind, text)) => connections.abort(&self.encode_failure(kind, &text)),
            None => connections.shutdown(),
        }
    }

    /// How the connection to a leader on another node has ended, as far as this rank can see. If that
    /// leader gave its group's failure as the reason, the group fails here too.
    pub fn disconnect_reason(&self, rank: usize) -> Option<DisconnectReason> {
        let connections =
            self.remote.connections.get().filter(|_| self.core.leaders.contains(&rank))?;
        match connections.disconnect_reason(self.core.nodes[rank])? {
            DisconnectReason::Failed(why) => {
                self.apply_failure(&why);
                None
            }
            departure => Some(departure),
        }
    }

    /// Publishes the group's first failure for the other nodes.
    pub fn publish_failure(&self, kind: u32, text: &str) {
        if !self.core.is_inter_node() {
            return;
        }
        let failure = self.encode_failure(kind, text);
        if let Some(connections) = self.remote.connections.get() {
            connections.abort(&failure);
        }
        self.publish("failure", &failure);
    }

    /// Aborts connections with the group's failure as the reason, or because this rank leaves.
    pub fn abandon(&self, connections: &mut dyn Connections) {
        match self.control.header().poison.read() {
            Some((kind, text)) => connections.abort(&self.encode_failure(kind, &text)),
            None => {
                if self.is_cancelled() {
                    connections.shutdown();
                }
                connections.abort("");
            }
        }
    }

    /// A failure as other nodes read it: its kind, whether it is about a rank that has left, and its
    /// text.
    fn encode_failure(&self, kind: u32, text: &str) -> String {
        let lost = kind
            .checked_sub(LOST)
            .map(|rank| rank as usize)
            .filter(|&rank| rank < self.core.size());
        format!("{kind} {} {text}", u8::from(lost.is_some_and(|rank| self.has_left(rank))))
    }

    /// Fails the group on this node because of a failure on another.
    pub fn apply_failure(&self, words: &str) {
        let mut parts = words.splitn(3, ' ');
        let (Some(Ok(kind)), Some(left), Some(text)) =
            (parts.next().map(str::parse), parts.next(), parts.next())
        else {
            return;
        };
        let lost = u32::checked_sub(kind, LOST)
            .map(|rank| rank as usize)
            .filter(|&rank| rank < self.core.size());
        if let Some(rank) = lost.filter(|_| left == "1") {
            self.control.rank(rank).left.store(1, Ordering::SeqCst);
        }
        self.record_failure(kind, text);
    }

    /// Looks for failures on other nodes, every [`POLL_INTERVAL`].
    pub fn poll_failure(&self) {
        if !self.core.is_inter_node() {
            return;
        }
        let mut last = self.remote.polled.lock().unwrap_or_else(PoisonError::into_inner);
        let last = last.get_or_insert_with(Instant::now);
        if last.elapsed() >= POLL_INTERVAL {
            *last = Instant::now();
            self.wait_failure(Duration::ZERO);
        }
    }

    /// Waits for a failure on another node.
    pub fn wait_failure(&self, time: Duration) {
        if self.control.header().poison.is_set() {
            return;
        }
        if let Some(words) = self.lookup("failure", time) {
            self.apply_failure(&words);
        }
    }

    /// Publishes what this rank has to say about the failure.
    pub fn publish_error_detail(&self, own: &str) {
        self.control.rank(self.core.rank).error_detail.write(0, own);
        self.publish(&format!("notice/{}", self.core.rank), own);
    }

    /// Fetches what ranks on other nodes have to say.
    pub fn fetch_error_details(&self) {
        for rank in self.core.ranks_where(|rank| {
            !self.core.locals.contains(&rank) && !self.control.rank(rank).error_detail.is_set()
        }) {
            if let Some(notice) = self.lookup(&format!("notice/{rank}"), Duration::ZERO) {
                self.control.rank(rank).error_detail.write(0, &notice);
            }
        }
    }

    /// Whether the group did not fail for another reason on other nodes.
    pub fn others_await_error_details(&self) -> bool {
        self.lookup("failure", Duration::ZERO)
            .is_none_or(|words| words.starts_with(&format!("{ERROR_DETAILS} ")))
    }

    /// Publishes in which operation this rank is, when it has waited long.
    pub fn publish_progress(&self, waited: Duration, timeout: Duration) {
        if !self.core.is_inter_node() {
            return;
        }
        let place = self.core.sequence.load(Ordering::Relaxed);
        if waited >= PUBLISH_AFTER.min(timeout / 4)
            && self.remote.published.swap(place, Ordering::Relaxed) != place
        {
            if let Some(store) = self.core.world.store() {
                let _ = store.set(
                    &self.core.key(&format!("at/{}", self.core.rank)),
                    place.to_string().as_bytes(),
                );
            }
        }
    }

    /// The missing ranks without those on other nodes that are known to have come as far as this
    /// rank: they wait as well.
    pub fn lagging(&self, missing: Vec<usize>) -> Vec<usize> {
        if !self.core.is_inter_node() {
            return missing;
        }
        let own = self.core.sequence.load(Ordering::Relaxed);
        let there = |&rank: &usize| {
            let place = self
                .lookup(&format!("at/{rank}"), Duration::ZERO)
                .and_then(|place| place.parse::<u64>().ok());
            !self.core.locals.contains(&rank) && place.is_some_and(|place| place >= own)
        };
        let late: Vec<usize> = missing.iter().copied().filter(|rank| !there(rank)).collect();
        if late.is_empty() {
            missing
        } else {
            late
        }
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
