//! Failing: how the ranks of a group learn that it is of no more use, and why.
//!
//! The first failure is written into the control block, where every later call finds it.

mod cause;
pub mod remote;
mod wait;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use cause::{Cause, PublishedFailure};
use remote::RemoteFailures;

use crate::error::{Error, Result};
use crate::group::core::GroupCore;
use crate::internode::leaders::LeaderConnections;
use crate::internode::presence::Presence;
use crate::shm::arena::Block;
use crate::shm::control::Control;
use crate::transport::{Connections, DisconnectReason, PeerDown};
use crate::world::EXIT_REPORT_TIMEOUT;

/// How flow-launch's report begins of a process that has ended by itself.
const EXITED: &str = "exit code ";
/// The interval at which a rank looks whether a peer was killed.
const EXIT_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Whether, and why, a group has failed.
pub struct Failure {
    pub core: Arc<GroupCore>,
    pub control: Arc<Control>,
    remote: RemoteFailures,
    quarantined: AtomicBool,
    /// This rank drops the group: nobody is to wait in it any longer.
    cancelled: AtomicBool,
    /// The memory of the control block, in the first rank of the node.
    block: Mutex<Option<Block>>,
    /// The last to be dropped.
    pub presence: Presence,
}

impl Failure {
    /// Makes this rank a member of the group until it drops this.
    pub fn new(
        core: Arc<GroupCore>,
        control: Arc<Control>,
        block: Option<Block>,
        presence: Presence,
    ) -> Self {
        Self {
            control,
            remote: RemoteFailures::new(Arc::clone(&core)),
            quarantined: AtomicBool::new(false),
            cancelled: AtomicBool::new(false),
            block: Mutex::new(block),
            presence,
            core,
        }
    }

    /// Marks the group as failed, wakes everyone, and hands the error back.
    pub fn fail(&self, error: Error) -> Error {
        let cause = if error.is_mismatch() { Cause::Mismatch } else { Cause::Error };
        self.poison(cause, &error.to_string());
        error
    }

    /// Fails the group for a reason to which other ranks may have details. Every rank calls this,
    /// with an empty text if it has nothing to add.
    pub fn await_error_details(&self, operation: &str, own: &str) {
        self.publish_error_detail(own);
        self.poison(
            Cause::ErrorDetails,
            &format!("rank {}: {operation}: {own}", self.core.world.rank),
        );
    }

    /// Returns all ranks' details, with their ranks, once all have called
    /// [`Failure::await_error_details`].
    pub fn collect_error_details(&self) -> Vec<(usize, String)> {
        let deadline = Instant::now() + self.core.timeout();
        // If the group had failed for another reason, the others know that reason and publish no
        // details.
        while self.awaits_error_details()
            && self.others_await_error_details()
            && !self.silent_ranks().is_empty()
            && Instant::now() < deadline
            && self.find_lost_peer(&|| self.silent_ranks()).is_none()
        {
            // A failure path: peers still finish their backward, so there is nothing to be quick
            // about.
            std::thread::sleep(Duration::from_millis(2));
        }
        if self.core.is_inter_node() && self.core.world.hosts_store() {
            // The others ask for them as well.
            std::thread::sleep(EXIT_REPORT_TIMEOUT);
        }
        let notices = (0..self.core.size()).filter_map(|r| {
            Some((self.core.ranks[r], self.control.rank(r).error_detail.read()?.1))
        });
        notices.filter(|(_, text)| !text.is_empty()).collect()
    }

    /// Returns the ranks that have not said what they have to say about the failure.
    fn silent_ranks(&self) -> Vec<usize> {
        self.fetch_error_details();
        self.core.ranks_where(|rank| !self.control.rank(rank).error_detail.is_set())
    }

    /// Whether the group failed because ranks have details to add, which
    /// [`Failure::collect_error_details`] collects.
    pub fn awaits_error_details(&self) -> bool {
        self.first_failure().is_some_and(|(cause, _)| cause == Cause::ErrorDetails)
    }

    /// Returns the group's first failure on this node: its cause, and the text of the rank that saw
    /// it first.
    fn first_failure(&self) -> Option<(Cause, String)> {
        let (code, text) = self.control.header().poison.read()?;
        Some((Cause::from_code(code), text))
    }

    /// Returns the error of an operation that begins in a group that has failed.
    pub fn check_poison(&self, operation: &dyn std::fmt::Display) -> Result<()> {
        if !self.is_cancelled() && !self.control.header().poison.is_set() {
            return Ok(());
        }
        self.check_failure(operation, false)
    }

    /// Returns the error of an operation in a group that has failed. The loss of a peer is the same
    /// error for every operation that was `under_way`, and for the first one after it. It does not
    /// matter which rank noticed the loss.
    pub fn check_failure(&self, operation: &dyn std::fmt::Display, under_way: bool) -> Result<()> {
        if under_way {
            self.poll_failure();
        }
        let Some((cause, text)) = self.first_failure() else {
            if !self.is_cancelled() {
                return Ok(());
            }
            return Err(Error::Poisoned {
                rank: self.core.world.rank,
                operation: operation.to_string(),
                cause: format!("rank {} has left it", self.core.world.rank),
                is_mismatch: false,
            });
        };
        let is_first = self.quarantine();
        if cause != Cause::Mismatch {
            self.core.world.has_failed.store(true, Ordering::Relaxed);
        }
        Err(match cause.lost_member(self.core.size()) {
            Some(peer) if under_way || is_first => self.peer_lost_error(peer, operation),
            _ => Error::Poisoned {
                rank: self.core.world.rank,
                operation: operation.to_string(),
                cause: text,
                is_mismatch: cause == Cause::Mismatch,
            },
        })
    }

    /// Makes the group unusable on all ranks because this one says so.
    pub fn abort(&self, cause: &str) {
        // Nor is there anything else to wait for from this rank.
        self.publish_error_detail("");
        self.poison(
            Cause::Error,
            &format!("rank {} aborted the group: {cause}", self.core.world.rank),
        );
    }

    /// Fails the group on all nodes.
    fn poison(&self, cause: Cause, text: &str) {
        if self.record_failure(cause, text) {
            self.remote.publish_failure(&self.published(cause, text.into()).encode());
        }
    }

    /// Fails the group on this node. Returns whether that was the first failure.
    fn record_failure(&self, cause: Cause, text: &str) -> bool {
        let is_first = self.control.header().poison.write(cause.code(), text);
        self.quarantine();
        self.control.wake_all();
        is_first
    }

    /// Ends all waits of this rank in the group.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// Whether this rank has dropped the group.
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    /// Returns whether this rank did not know of a failure before.
    pub fn quarantine(&self) -> bool {
        if self.quarantined.load(Ordering::SeqCst) {
            return false;
        }
        // Before anyone may take it for done; twice does no harm.
        self.core.world.arena.quarantine();
        !self.quarantined.swap(true, Ordering::SeqCst)
    }

    /// Returns the first of the missing ranks that can never arrive.
    pub fn find_lost_peer(
        &self,
        missing: &dyn Fn() -> Vec<usize>,
    ) -> Option<(usize, DisconnectReason)> {
        let ranks: Vec<usize> =
            self.core.with_leader(missing()).iter().map(|&rank| self.core.ranks[rank]).collect();
        let ended = self.core.world.ended(&ranks, Duration::ZERO);
        // Only now is it certain that a rank that has ended, or left, did so without arriving.
        let missing = self.core.with_leader(missing());
        if let Some(&rank) = missing.iter().find(|&&rank| self.has_left(rank)) {
            return Some((rank, DisconnectReason::Left));
        }
        for &rank in &missing {
            if let Some(reason) = self.disconnect_reason(rank) {
                return Some((rank, reason));
            }
        }
        let rank = missing.into_iter().find(|&rank| ended.contains(&self.core.ranks[rank]))?;
        Some((rank, DisconnectReason::Ended))
    }

    /// Fails the group because `peer`, a rank of it, has left or ended.
    pub fn fail_peer_lost(&self, peer: usize, operation: &dyn std::fmt::Display) -> Error {
        self.core.world.has_failed.store(true, Ordering::Relaxed);
        let error = self.peer_lost_error(peer, operation);
        self.poison(Cause::Lost(peer as u32), &error.to_string());
        error
    }

    /// Returns the other members that have left the group or ended.
    pub fn departed_peers(&self) -> Vec<usize> {
        let ended = self.core.world.ended(&self.core.ranks, Duration::ZERO);
        self.core.ranks_where(|rank| {
            rank != self.core.rank
                && (self.has_left(rank)
                    || ended.contains(&self.core.ranks[rank])
                    || self.disconnect_reason(rank).is_some())
        })
    }

    /// Whether a member has left the group, as far as this node knows.
    pub fn has_left(&self, rank: usize) -> bool {
        self.control.rank(rank).left.load(Ordering::SeqCst) != 0
    }

    /// Returns the error where the connection to another leader has ended.
    pub fn peer_down_error(&self, loss: PeerDown, operation: &dyn std::fmt::Display) -> Error {
        self.handle_disconnect(self.core.leaders[loss.member], loss.how, operation)
    }

    /// Returns the error where a member has left or ended, or the connection to it has.
    pub fn handle_disconnect(
        &self,
        peer: usize,
        how: DisconnectReason,
        operation: &dyn std::fmt::Display,
    ) -> Error {
        self.core.world.has_failed.store(true, Ordering::Relaxed);
        // It may have ended because of a failure, which it, or its node, has published.
        match &how {
            DisconnectReason::Failed(why) => self.apply_failure(why),
            _ if self.core.locals.contains(&peer) => {}
            _ => self.wait_failure_of(peer),
        }
        if let Err(error) = self.check_failure(operation, true) {
            return error;
        }
        match how {
            DisconnectReason::Left => self.control.rank(peer).left.store(1, Ordering::SeqCst),
            // It may have gone while, or before, this rank connected.
            DisconnectReason::Ended | DisconnectReason::Refused(_)
                if !self.core.locals.contains(&peer)
                    && self.core.world.has_left(self.core.ranks[peer]) == Some(true) =>
            {
                self.control.rank(peer).left.store(1, Ordering::SeqCst);
            }
            DisconnectReason::Ended => {}
            // It was applied.
            DisconnectReason::Failed(_) => {}
            DisconnectReason::OutOfReach(_) | DisconnectReason::Refused(_)
                if self
                    .core
                    .world
                    .exit_report(self.core.ranks[peer], EXIT_REPORT_TIMEOUT)
                    .is_some() => {}
            DisconnectReason::OutOfReach(reason) | DisconnectReason::Refused(reason) => {
                let peer = format!(
                    "{} cannot be reached: {reason}",
                    self.core.world.describe(self.core.ranks[peer])
                );
                return self.fail(Error::PeerLost {
                    rank: self.core.world.rank,
                    operation: operation.to_string(),
                    peer,
                });
            }
        }
        self.fail_peer_lost(peer, operation)
    }

    /// Returns the error for an operation that needs `peer`, a rank of this group that has left or
    /// ended.
    fn peer_lost_error(&self, peer: usize, operation: &dyn std::fmt::Display) -> Error {
        let global = self.core.ranks[peer];
        let end = self.core.world.loss_cause(global, self.has_left(peer));
        Error::PeerLost {
            rank: self.core.world.rank,
            operation: operation.to_string(),
            peer: format!("{} {end}", self.core.world.describe(global)),
        }
    }

    /// Names missing ranks for messages: the first eight, and how many there are beside.
    pub fn describe_all(&self, missing: &[usize]) -> String {
        const MOST: usize = 8;
        let mut texts = Vec::new();
        for &rank in missing.iter().take(MOST) {
            let peer = self.core.world.describe(self.core.ranks[rank]);
            let rounds = self.control.rank(rank).arrived.load(Ordering::Acquire);
            texts.push(format!("{peer}, which has arrived {rounds} times"));
        }
        if missing.len() > MOST {
            texts.push(format!("and {} more", missing.len() - MOST));
        }
        texts.join("; ")
    }

    /// Watches the leader's connections, and aborts them when the group fails.
    pub fn watch_connections(&self, connections: Arc<LeaderConnections>) {
        self.remote.watch(connections);
    }

    /// Returns how the connection to a leader on another node has ended, as far as this rank can
    /// see. If that leader gave its group's failure as the reason, the group fails here too.
    pub fn disconnect_reason(&self, rank: usize) -> Option<DisconnectReason> {
        match self.remote.disconnect_reason(rank)? {
            DisconnectReason::Failed(why) => {
                self.apply_failure(&why);
                None
            }
            departure => Some(departure),
        }
    }

    /// Aborts connections with the group's failure as the reason, or because this rank leaves.
    pub fn abort_connections(&self, connections: &mut dyn Connections) {
        match self.encoded_failure() {
            Some(failure) => connections.abort(&failure),
            None => {
                if self.is_cancelled() {
                    connections.shutdown();
                }
                connections.abort("");
            }
        }
    }

    /// Closes connections as this rank leaves, with the group's failure as the reason if it has
    /// failed.
    pub fn close(&self, connections: &mut dyn Connections) {
        match self.encoded_failure() {
            Some(failure) => connections.abort(&failure),
            None => connections.shutdown(),
        }
    }

    /// Returns the group's failure as other nodes read it.
    fn encoded_failure(&self) -> Option<String> {
        let (cause, text) = self.first_failure()?;
        Some(self.published(cause, text).encode())
    }

    fn published(&self, cause: Cause, text: String) -> PublishedFailure {
        let has_left = cause.lost_member(self.core.size()).is_some_and(|rank| self.has_left(rank));
        PublishedFailure { cause, has_left, text }
    }

    /// Fails the group on this node because of a failure that another node has published.
    fn apply_failure(&self, published: &str) {
        let Some(PublishedFailure { cause, has_left, text }) = PublishedFailure::decode(published)
        else {
            return;
        };
        if let Some(rank) = cause.lost_member(self.core.size()).filter(|_| has_left) {
            self.control.rank(rank).left.store(1, Ordering::SeqCst);
        }
        self.record_failure(cause, &text);
    }

    /// Fails the group on this node if it has failed on another.
    fn poll_failure(&self) {
        if self.control.header().poison.is_set() {
            return;
        }
        if let Some(failure) = self.remote.poll_failure() {
            self.apply_failure(&failure);
        }
    }

    /// Fails the group as `poll_failure` does, waiting at most for `time`.
    fn wait_failure(&self, time: Duration) {
        if self.control.header().poison.is_set() {
            return;
        }
        if let Some(failure) = self.remote.failure(time) {
            self.apply_failure(&failure);
        }
    }

    /// Waits for the failure because of which a peer on another node may have ended. One that was killed, or
    /// lost with its node, has none to publish any more.
    fn wait_failure_of(&self, peer: usize) {
        let deadline = Instant::now() + EXIT_REPORT_TIMEOUT;
        loop {
            let end = self.core.world.exit_report(self.core.ranks[peer], Duration::ZERO);
            let was_killed = end.is_some_and(|end| !end.starts_with(EXITED));
            let left = deadline.saturating_duration_since(Instant::now());
            self.wait_failure(if was_killed {
                Duration::ZERO
            } else {
                left.min(EXIT_POLL_INTERVAL)
            });
            if was_killed || left.is_zero() || self.control.header().poison.is_set() {
                return;
            }
        }
    }

    /// Publishes what this rank has to say about the failure.
    fn publish_error_detail(&self, own: &str) {
        self.control.rank(self.core.rank).error_detail.write(0, own);
        self.remote.publish_detail(own);
    }

    /// Fetches what ranks on other nodes have to say.
    fn fetch_error_details(&self) {
        let missing = self.core.ranks_where(|rank| {
            !self.core.locals.contains(&rank) && !self.control.rank(rank).error_detail.is_set()
        });
        for rank in missing {
            if let Some(detail) = self.remote.detail(rank) {
                self.control.rank(rank).error_detail.write(0, &detail);
            }
        }
    }

    /// Whether the group did not fail for another reason on other nodes.
    fn others_await_error_details(&self) -> bool {
        match self.remote.failure(Duration::ZERO) {
            Some(failure) => PublishedFailure::decode(&failure)
                .is_some_and(|failure| failure.cause == Cause::ErrorDetails),
            None => true,
        }
    }
}

impl Drop for Failure {
    /// This rank leaves the group.
    fn drop(&mut self) {
        if let Some(mut connections) = self.remote.try_lock_connections() {
            self.close(&mut *connections.leaders);
        }
        self.control.rank(self.core.rank).left.store(1, Ordering::SeqCst);
        self.control.wake_all();
        self.control.header().attached.fetch_sub(1, Ordering::SeqCst);
        let block = self.block.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(block) = block {
            let control = Control::attach(
                Arc::clone(&self.core.world.arena),
                block.offset(),
                self.core.size(),
                self.core.locals.len(),
            );
            self.core.world.retire(block, control);
        }
    }
}
