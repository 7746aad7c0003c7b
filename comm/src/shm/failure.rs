//! Failing: how the ranks of a group learn that it is of no more use, and why.
//!
//! The first failure is written into the control block, where every later call finds it.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::engine::Engine;
use crate::error::{Error, Result};
use crate::transport::{DisconnectReason, PeerDown};
use crate::world::EXIT_REPORT_TIMEOUT;

/// Kind of a poison note whose ranks have more to say: see [`Engine::fail_and_collect`].
pub const ERROR_DETAILS: u32 = 1;
/// Kind of a poison note about the loss of the group's first rank; of the next, one more; and so
/// on.
pub const LOST: u32 = 2;

impl Engine {
    /// Marks the group as failed, wakes everyone, and hands the error back.
    pub fn fail(&self, error: Error) -> Error {
        self.poison(0, &error.to_string());
        error
    }

    /// Fails the group for a reason of which other ranks may have their own part to tell: every
    /// rank calls this, with an empty text if it has nothing to add, and gets what all ranks said,
    /// with their ranks.
    pub fn fail_and_collect(&self, operation: &str, own: &str) -> Vec<(usize, String)> {
        self.publish_error_detail(own);
        self.poison(ERROR_DETAILS, &format!("rank {}: {operation}: {own}", self.world.rank));
        let deadline = Instant::now() + self.timeout();
        let silent = || {
            self.fetch_error_details();
            self.ranks_where(|r| !self.control.rank(r).error_detail.is_set())
        };
        // If the group had failed for another reason, the others have heard of that and write no
        // notices.
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
        if self.inter_node.is_some() && self.world.hosts_store() {
            // The others ask for them as well.
            std::thread::sleep(EXIT_REPORT_TIMEOUT);
        }
        let notices = (0..self.size())
            .filter_map(|r| Some((self.ranks[r], self.control.rank(r).error_detail.read()?.1)));
        notices.filter(|(_, text)| !text.is_empty()).collect()
    }

    /// Whether the group failed in a way that [`Engine::fail_and_collect`] completes.
    pub fn awaits_error_details(&self) -> bool {
        self.control.header().poison.read().is_some_and(|(kind, _)| kind == ERROR_DETAILS)
    }

    /// The error of an operation that begins in a group that has failed.
    pub fn check_poison(&self, operation: &dyn std::fmt::Display) -> Result<()> {
        self.check_failure(operation, false)
    }

    /// Whichever rank saw it first, the loss of a peer is the same error to every operation that
    /// was `under_way`, and to the first that begins after it.
    pub fn check_failure(&self, operation: &dyn std::fmt::Display, under_way: bool) -> Result<()> {
        if under_way {
            self.poll_failure();
        }
        if self.is_cancelled() {
            let cause = format!("rank {} has left it", self.world.rank);
            return Err(Error::Poisoned {
                rank: self.world.rank,
                operation: operation.to_string(),
                cause,
            });
        }
        let Some((kind, cause)) = self.control.header().poison.read() else { return Ok(()) };
        let first = self.quarantine();
        let peer =
            kind.checked_sub(LOST).map(|peer| peer as usize).filter(|&peer| peer < self.size());
        Err(match peer {
            Some(peer) if under_way || first => self.peer_lost_error(peer, operation),
            _ => Error::Poisoned { rank: self.world.rank, operation: operation.to_string(), cause },
        })
    }

    /// Makes the group unusable on all ranks because this one says so.
    pub fn abort(&self, cause: &str) {
        // Nor is there anything else to wait for from this rank.
        self.publish_error_detail("");
        self.poison(0, &format!("rank {} aborted the group: {cause}", self.world.rank));
    }

    fn poison(&self, kind: u32, text: &str) {
        if self.record_failure(kind, text) {
            self.publish_failure(kind, text);
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

    /// Returns whether this is the first that this rank hears of a failure.
    pub fn quarantine(&self) -> bool {
        if self.quarantined.load(Ordering::SeqCst) {
            return false;
        }
        // Before anyone may take it for done; twice does no harm.
        self.world.arena.quarantine();
        !self.quarantined.swap(true, Ordering::SeqCst)
    }

    /// The first of the missing ranks that can never arrive.
    pub fn find_lost_peer(
        &self,
        missing: &dyn Fn() -> Vec<usize>,
    ) -> Option<(usize, DisconnectReason)> {
        let leader = self.locals[0];
        let missing = || {
            let mut missing = missing();
            // Others come by way of the leader.
            if missing.iter().any(|rank| !self.locals.contains(rank)) && self.rank != leader {
                missing.push(leader);
            }
            missing
        };
        let ranks: Vec<usize> = missing().iter().map(|&r| self.ranks[r]).collect();
        let ended = self.world.ended(&ranks, Duration::ZERO);
        // Only now is it certain that a rank that has ended, or left, did so without arriving.
        let missing = missing();
        let left =
            missing.iter().find(|&&r| self.has_left(r)).map(|&r| (r, DisconnectReason::Left));
        let cut_off = || missing.iter().find_map(|&r| Some((r, self.disconnect_reason(r)?)));
        let ended = || {
            missing
                .iter()
                .find(|&&r| ended.contains(&self.ranks[r]))
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
        let ended = self.world.ended(&self.ranks, Duration::ZERO);
        let gone = |r| {
            self.has_left(r)
                || ended.contains(&self.ranks[r])
                || self.disconnect_reason(r).is_some()
        };
        self.ranks_where(|r| r != self.rank && gone(r))
    }

    pub fn has_left(&self, rank: usize) -> bool {
        self.control.rank(rank).left.load(Ordering::SeqCst) != 0
    }

    /// The error where the connection to another leader has ended.
    pub fn link_lost_error(&self, loss: PeerDown, operation: &dyn std::fmt::Display) -> Error {
        let Some(inter_node) = &self.inter_node else {
            return self.fail_peer_lost(self.rank, operation);
        };
        self.handle_disconnect(inter_node.leaders[loss.member], loss.how, operation)
    }

    /// The error where a member has gone, or the connection to it.
    pub fn handle_disconnect(
        &self,
        peer: usize,
        how: DisconnectReason,
        operation: &dyn std::fmt::Display,
    ) -> Error {
        // It may have ended because of a failure, of which it, or its node, has told.
        match &how {
            DisconnectReason::Failed(why) => self.apply_failure(why),
            _ if self.locals.contains(&peer) => {}
            _ => self.wait_failure(EXIT_REPORT_TIMEOUT),
        }
        if let Err(error) = self.check_failure(operation, true) {
            return error;
        }
        match how {
            DisconnectReason::Ended => {}
            // That was heard.
            DisconnectReason::Failed(_) => {}
            DisconnectReason::Left => self.control.rank(peer).left.store(1, Ordering::SeqCst),
            DisconnectReason::OutOfReach(_) | DisconnectReason::Refused(_)
                if self.world.exit_report(self.ranks[peer], EXIT_REPORT_TIMEOUT).is_some() => {}
            DisconnectReason::OutOfReach(reason) | DisconnectReason::Refused(reason) => {
                let peer = format!(
                    "{} cannot be reached: {reason}",
                    self.world.describe(self.ranks[peer])
                );
                let (rank, operation) = (self.world.rank, operation.to_string());
                return self.fail(Error::PeerLost { rank, operation, peer });
            }
        }
        self.fail_peer_lost(peer, operation)
    }

    /// The error for an operation that needs `peer`, a rank of this group that has left or ended.
    fn peer_lost_error(&self, peer: usize, operation: &dyn std::fmt::Display) -> Error {
        let global = self.ranks[peer];
        let end = self.world.loss_cause(global, self.has_left(peer));
        Error::PeerLost {
            rank: self.world.rank,
            operation: operation.to_string(),
            peer: format!("{} {end}", self.world.describe(global)),
        }
    }

    pub fn describe_all(&self, missing: &[usize]) -> String {
        let one = |&rank: &usize| {
            let rounds = self.control.rank(rank).posted.load(Ordering::Acquire);
            format!("{}, which has arrived {rounds} times", self.world.describe(self.ranks[rank]))
        };
        let mut text = missing.iter().take(8).map(one).collect::<Vec<_>>().join("; ");
        if missing.len() > 8 {
            text += &format!("; and {} more", missing.len() - 8);
        }
        text
    }
}
