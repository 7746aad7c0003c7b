//! What this rank does in the two phases of a boxing.

use std::sync::OnceLock;

use flow_tensor::{ProcessGroup, ReduceOp};

use super::plan::Copy;
use crate::error::{Error, Result};
use crate::groups::Groups;
use crate::region::Region;
use crate::sequence;

/// Ranks that do something together.
pub struct Members {
    pub ranks: Vec<usize>,
    pub group: OnceLock<ProcessGroup>,
    /// Of what they do.
    pub digest: u64,
    /// The placement, if there is one only, whose operations they compare.
    pub placement: Option<u64>,
}

/// The first phase, for this rank's group.
pub struct Reduce {
    pub members: Members,
    pub op: ReduceOp,
    /// What the members have, and what each gets a sum of.
    pub held: Region,
    pub parts: Vec<Option<Region>>,
    /// This rank's part, and whether it is a part of the result.
    pub own: Option<Region>,
    pub is_in_result: bool,
    /// This phase and the next are an all-reduce.
    pub is_all_reduce: bool,
}

/// The second phase, for the ranks that this one has to do with.
pub struct Exchange {
    pub members: Members,
    /// What each member shows the others: nothing if they need nothing of it.
    pub shown: Vec<Option<Region>>,
    /// All copies between the members.
    pub copies: Vec<Copy>,
    /// All members need what all have, which are rows in their order.
    pub is_all_gather: bool,
}

impl Members {
    pub fn group(&self, groups: &Groups) -> Result<&ProcessGroup> {
        if let Some(group) = self.group.get() {
            return Ok(group);
        }
        let group = groups.group(&self.ranks)?;
        Ok(self.group.get_or_init(|| group))
    }

    /// What all must agree on: this boxing, and what was done before it.
    pub fn agreed(&self, groups: &Groups) -> u64 {
        let before = self.placement.map_or(0, |placement| sequence::digest(groups, placement));
        self.digest ^ before
    }

    /// An error, with what ranks were doing.
    pub fn explained(&self, error: Error, groups: &Groups) -> Error {
        match self.placement {
            Some(placement) => {
                let group = self.group.get().map(|group| (group, &self.ranks[..]));
                sequence::explained(error, groups, group, placement)
            }
            None => error,
        }
    }
}
