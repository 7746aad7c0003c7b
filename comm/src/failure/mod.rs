//! Failing: how the ranks of a group learn that it is of no more use, and why.
//!
//! The first failure is written into the control block, where every later call finds it.

pub mod remote;
mod wait;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use remote::{RemoteFailures, WatchedConnections};

use crate::error::{Error, Result};
use crate::group::core::GroupCore;
use crate::internode::presence::Presence;
use crate::shm::arena::Block;
use crate::shm::control::Control;
use crate::transport::{Connections, DisconnectReason, PeerDown};
use crate::world::EXIT_REPORT_TIMEOUT;

/// Kind of a poison note whose ranks have more to say: see [`Failure::fail_and_collect`].
pub const ERROR_DETAILS: u32 = 1;
/// Kind of a poison note about ranks that called different operations.
const MISMATCH: u32 = 2;
/// Kind of a poison note about the loss of the group's first rank; of the next, one more; and so
/// on.
const LOST: u32 = 3;

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
    /// This rank is a member of the group until it drops this.
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
        self.poison(if error.is_mismatch() { MISMATCH } else { 0 }, &error.to_string());
        error
    }

    /// Fails the group for a reason to which other ranks may have details: every rank calls this,
    /// with an empty text if it has nothing to add, and gets all ranks' details, with their ranks.
    pub fn fail_and_collect(&self, operation: &str, own: &str) -> Vec<(usize, String)> {
        self.publish_error_detail(own);
        self.poison(ERROR_DETAILS, &format!("rank {}: {operation}: {own}", self.core.world.rank));
        let deadline = Instant::now() + self.core.timeout();
        let silent = || {
            self.fetch_error_details();
            self.core.ranks_where(|r| !self.control.rank(r).error_detail.is_set())
        };
        // If the group had failed for another reason, the others know that reason and publish no
        // details.
        let awaited = || self.awaits_error_details() && self.others_await_error_details();
        while awaited()
            && !silent().is_empty()
            && Instant::now() < deadline
            && self.find_lost_peer(&silent).is_none()
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

    /// Whether the group failed in a way that [`Failure::fail_and_collect`] completes.
    pub fn awaits_error_details(&self) -> bool {
        self.control.header().poison.read().is_some_and(|(kind, _)| kind == ERROR_DETAILS)
    }

    /// The error of an operation that begins in a group that has failed.
    pub fn check_poison(&self, operation: &dyn std::fmt::Display) -> Result<()> {
        if !self.is_cancelled() && !self.control.header().poison.is_set() {
            return Ok(());
        }
        self.check_failure(operation, false)
    }

    /// Whichever rank saw it first, the loss of a peer is the same error to every operation that
    /// was `under_way`, and to the first that begins after it.
    pub fn check_failure(&self, operation: &dyn std::fmt::Display, under_way: bool) -> Result<()> {
        if under_way {
            self.poll_failure();
        }
        if self.is_cancelled() {
            let cause = format!("rank {} has left it", self.core.world.rank);
            return Err(Error::Poisoned {
                rank: self.core.world.rank,
                operation: operation.to_string(),
                cause,
                is_mismatch: false,
            });
        }
        let Some((kind, cause)) = self.control.header().poison.read() else { return Ok(()) };
        let first = self.quarantine();
        Err(match self.lost_rank(kind) {
            Some(peer) if under_way || first => self.peer_lost_error(peer, operation),
            _ => Error::Poisoned {
                rank: self.core.world.rank,
                operation: operation.to_string(),
                cause,
                is_mismatch: kind == MISMATCH,
            },
        })
    }

    /// Makes the group unusable on all ranks because this one says so.
    pub fn abort(&self, cause: &str) {
        // Nor is there anything else to wait for from this rank.
        self.publish_error_detail("");
        self.poison(0, &format!("rank {} aborted the group: {cause}", self.core.world.rank));
    }

    fn poison(&self, kind: u32, text: &str) {
        if self.record_failure(kind, text) {
            self.remote.publish_failure(&self.encode_failure(kind, text));
        }
    }

    /// Fails the group on this node; whether that was the first failure.
    pub fn record_failure(&self, kind: u32, text: &str) -> bool {
        let first = self.control.header().poison.write(kind, text);
        self.quarantine();
        self.control.wake_all();
        first
    }

    /// Has all waits of this rank in the group end.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

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

    /// The first of the missing ranks that can never arrive.
    pub fn find_lost_peer(
        &self,
        missing: &dyn Fn() -> Vec<usize>,
    ) -> Option<(usize, DisconnectReason)> {
        let leader = self.core.locals[0];
        let missing = || {
            let mut missing = missing();
            // Others come by way of the leader.
            if missing.iter().any(|rank| !self.core.locals.contains(rank))
                && self.core.rank != leader
            {
                missing.push(leader);
            }
            missing
        };
        let ranks: Vec<usize> = missing().iter().map(|&r| self.core.ranks[r]).collect();
        let ended = self.core.world.ended(&ranks, Duration::ZERO);
        // Only now is it certain that a rank that has ended, or left, did so without arriving.
        let missing = missing();
        let left =
            missing.iter().find(|&&r| self.has_left(r)).map(|&r| (r, DisconnectReason::Left));
        let cut_off = || missing.iter().find_map(|&r| Some((r, self.disconnect_reason(r)?)));
        let ended = || {
            missing
                .iter()
                .find(|&&r| ended.contains(&self.core.ranks[r]))
                .map(|&r| (r, DisconnectReason::Ended))
        };
        left.or_else(cut_off).or_else(ended)
    }

    /// Fails the group because `peer`, a rank of it, has left or ended.
    pub fn fail_peer_lost(&self, peer: usize, operation: &dyn std::fmt::Display) -> Error {
        let error = self.peer_lost_error(peer, operation);
        self.poison(LOST + peer as u32, &error.to_string());
        error
    }

    /// The other members that have left the group or ended.
    pub fn departed_peers(&self) -> Vec<usize> {
        let ended = self.core.world.ended(&self.core.ranks, Duration::ZERO);
        let gone = |r| {
            self.has_left(r)
                || ended.contains(&self.core.ranks[r])
                || self.disconnect_reason(r).is_some()
        };
        self.core.ranks_where(|r| r != self.core.rank && gone(r))
    }

    pub fn has_left(&self, rank: usize) -> bool {
        self.control.rank(rank).left.load(Ordering::SeqCst) != 0
    }

    /// The error where the connection to another leader has ended.
    pub fn peer_down_error(&self, loss: PeerDown, operation: &dyn std::fmt::Display) -> Error {
        self.handle_disconnect(self.core.leaders[loss.member], loss.how, operation)
    }

    /// The error where a member has left or ended, or the connection to it has.
    pub fn handle_disconnect(
        &self,
        peer: usize,
        how: DisconnectReason,
        operation: &dyn std::fmt::Display,
    ) -> Error {
        // It may have ended because of a failure, which it, or its node, has published.
        match &how {
            DisconnectReason::Failed(why) => self.apply_failure(why),
            _ if self.core.locals.contains(&peer) => {}
            _ => self.wait_failure(EXIT_REPORT_TIMEOUT),
        }
        if let Err(error) = self.check_failure(operation, true) {
            return error;
        }
        match how {
            DisconnectReason::Left => self.control.rank(peer).left.store(1, Ordering::SeqCst),
            // It may have gone while, or before, this rank connected.
            DisconnectReason::Ended | DisconnectReason::Refused(_)
                if !self.core.locals.contains(&peer)
                    && self.core.world.has_left(self.core.ranks[peer]) =>
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
                let (rank, operation) = (self.core.world.rank, operation.to_string());
                return self.fail(Error::PeerLost { rank, operation, peer });
            }
        }
        self.fail_peer_lost(peer, operation)
    }

    /// The error for an operation that needs `peer`, a rank of this group that has left or ended.
    fn peer_lost_error(&self, peer: usize, operation: &dyn std::fmt::Display) -> Error {
        let global = self.core.ranks[peer];
        let end = self.core.world.loss_cause(global, self.has_left(peer));
        Error::PeerLost {
            rank: self.core.world.rank,
            operation: operation.to_string(),
            peer: format!("{} {end}", self.core.world.describe(global)),
        }
    }

    pub fn describe_all(&self, missing: &[usize]) -> String {
        let one = |&rank: &usize| {
            let rounds = self.control.rank(rank).arrived.load(Ordering::Acquire);
            format!(
                "{}, which has arrived {rounds} times",
                self.core.world.describe(self.core.ranks[rank])
            )
        };
        let mut text = missing.iter().take(8).map(one).collect::<Vec<_>>().join("; ");
        if missing.len() > 8 {
            text += &format!("; and {} more", missing.len() - 8);
        }
        text
    }

    /// Watches the leader's connections, and aborts them when the group fails.
    pub fn watch_connections(&self, connections: Arc<dyn WatchedConnections>) {
        self.remote.watch(connections);
    }

    /// How the connection to a leader on another node has ended, as far as this rank can see. If
    /// that leader gave its group's failure as the reason, the group fails here too.
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

    /// The group's failure as other nodes read it.
    fn encoded_failure(&self) -> Option<String> {
        let (kind, text) = self.control.header().poison.read()?;
        Some(self.encode_failure(kind, &text))
    }

    /// A failure as other nodes read it: its kind, whether it is about a rank that has left, and
    /// its text.
    fn encode_failure(&self, kind: u32, text: &str) -> String {
        let has_left = self.lost_rank(kind).is_some_and(|rank| self.has_left(rank));
        format!("{kind} {} {text}", u8::from(has_left))
    }

    /// The rank whose loss a poison note is about.
    fn lost_rank(&self, kind: u32) -> Option<usize> {
        let rank = kind.checked_sub(LOST)? as usize;
        (rank < self.core.size()).then_some(rank)
    }

    /// Fails the group on this node because of a failure on another.
    fn apply_failure(&self, words: &str) {
        let mut parts = words.splitn(3, ' ');
        let (Some(Ok(kind)), Some(left), Some(text)) =
            (parts.next().map(str::parse), parts.next(), parts.next())
        else {
            return;
        };
        if let Some(rank) = self.lost_rank(kind).filter(|_| left == "1") {
            self.control.rank(rank).left.store(1, Ordering::SeqCst);
        }
        self.record_failure(kind, text);
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

    /// As `poll_failure`, waiting at most for `time`.
    fn wait_failure(&self, time: Duration) {
        if self.control.header().poison.is_set() {
            return;
        }
        if let Some(failure) = self.remote.failure(time) {
            self.apply_failure(&failure);
        }
    }

    /// Publishes what this rank has to say about the failure.
    fn publish_error_detail(&self, own: &str) {
        self.control.rank(self.core.rank).error_detail.write(0, own);
        self.remote.publish_detail(own);
    }

    /// Fetches what ranks on other nodes have to say.
    fn fetch_error_details(&self) {
        let is_missing = |rank| {
            !self.core.locals.contains(&rank) && !self.control.rank(rank).error_detail.is_set()
        };
        for rank in self.core.ranks_where(is_missing) {
            if let Some(detail) = self.remote.detail(rank) {
                self.control.rank(rank).error_detail.write(0, &detail);
            }
        }
    }

    /// Whether the group did not fail for another reason on other nodes.
    fn others_await_error_details(&self) -> bool {
        let failure = self.remote.failure(Duration::ZERO);
        failure.is_none_or(|failure| failure.starts_with(&format!("{ERROR_DETAILS} ")))
    }
}

impl Drop for Failure {
    /// This rank leaves the group.
    fn drop(&mut self) {
        if let Some(connections) = self.remote.connections() {
            match self.encoded_failure() {
                Some(failure) => connections.abort(&failure),
                None => connections.shutdown(),
            }
        }
        self.control.rank(self.core.rank).left.store(1, Ordering::SeqCst);
        self.control.wake_all();
        self.control.header().attached.fetch_sub(1, Ordering::SeqCst);
        let block = self.block.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(block) = block {
            let (arena, offset) = (Arc::clone(&self.core.world.arena), block.offset());
            let (size, locals) = (self.core.size(), self.core.locals.len());
            self.core.world.retire(block, Control::attach(arena, offset, size, locals));
        }
    }
}
