//! A rank's call that makes a group with its members alone: its arguments, and its errors.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use flow_store::Error as StoreError;
use serde::{Deserialize, Serialize};

use super::core::GroupCore;
use super::parts::Parts;
use crate::error::Error;
use crate::interrupt::has_ended_call;

/// The reason for which a group is not made.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AbortReason {
    /// This member has left the group that the members are of, or has ended.
    Departed { member: usize },
    /// Members gave lists that differ.
    Differ { detail: String },
    /// Another rank reconfigures the job.
    Reconfigured,
    /// Anything else.
    Other { reason: String },
}

/// A call of [`ProcessGroup::new_group_of`](crate::ProcessGroup::new_group_of).
pub struct NewGroupCall<'a> {
    pub group: &'a Parts,
    pub ranks: &'a [usize],
    pub key: &'a str,
}

impl fmt::Display for NewGroupCall<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "new_group_of({:?}, {:?})", self.ranks, self.key)
    }
}

impl NewGroupCall<'_> {
    /// Returns a name for the group to be, which no other group has.
    pub fn new_name(&self) -> String {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let core = self.core();
        format!("{}.{}-{number}", core.name, core.world.rank)
    }

    /// Returns the call's error, for a reason of its own.
    pub fn failed(&self, reason: String) -> Error {
        Error::System { rank: self.core().world.rank, operation: self.to_string(), reason }
    }

    /// Returns the group that the members are of.
    pub fn core(&self) -> &GroupCore {
        &self.group.core
    }

    /// Returns the error of a store that cannot be asked.
    pub fn store_failed(&self, error: StoreError) -> Error {
        if has_ended_call() { self.interrupted() } else { self.failed(error.to_string()) }
    }

    /// Returns the error of a wait for `missing` that has taken too long.
    pub fn timed_out(&self, missing: String) -> Error {
        Error::Timeout {
            rank: self.core().world.rank,
            operation: self.to_string(),
            timeout: self.core().timeout(),
            missing,
        }
    }

    /// Returns the error of a wait that the program has interrupted.
    pub fn interrupted(&self) -> Error {
        Error::Interrupted { rank: self.core().world.rank, operation: self.to_string() }
    }

    /// Returns the error of a group that is not made.
    pub fn error(&self, cause: AbortReason) -> Error {
        let core = self.core();
        let rank = core.world.rank;
        match cause {
            AbortReason::Departed { member } if member < core.size() => {
                let departed = core.ranks[member];
                core.world.has_failed.store(true, Ordering::Relaxed);
                let end = core.world.loss_cause(departed, self.group.failure.has_left(member));
                let peer = format!("{} {end}", core.world.describe(departed));
                Error::PeerLost { rank, operation: self.to_string(), peer }
            }
            AbortReason::Departed { member } => {
                self.failed(format!("malformed outcome in the store: there is no member {member}"))
            }
            AbortReason::Differ { detail } => Error::Mismatch { rank, detail },
            AbortReason::Reconfigured => Error::Poisoned {
                rank,
                operation: self.to_string(),
                cause: "another rank reconfigures the job".to_owned(),
                is_mismatch: false,
            },
            AbortReason::Other { reason } => self.failed(reason),
        }
    }

    /// Returns the members but this rank.
    pub fn others(&self) -> Vec<usize> {
        self.ranks.iter().copied().filter(|&member| member != self.core().rank).collect()
    }

    /// Returns a text that names members and where they run.
    pub fn describe(&self, members: &[usize]) -> String {
        let core = self.core();
        let texts: Vec<String> =
            members.iter().map(|&member| core.world.describe(core.ranks[member])).collect();
        texts.join("; ")
    }

    /// Returns the first member on each node.
    pub fn first_on_nodes(&self) -> Vec<usize> {
        let nodes = &self.core().nodes;
        let mut firsts: Vec<usize> = Vec::new();
        for &member in self.ranks {
            if firsts.iter().all(|&first| nodes[first] != nodes[member]) {
                firsts.push(member);
            }
        }
        firsts
    }
}
