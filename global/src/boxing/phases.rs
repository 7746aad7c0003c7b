//! This rank's part in the two phases of a boxing.

use std::sync::OnceLock;

use flow_tensor::{ProcessGroup, ReduceOp};

use super::plan::{BoxingPlan, Copy, TensorLayout};
use crate::error::{Error, Result};
use crate::groups::Groups;
use crate::region::{Region, are_rows};
use crate::sequence;

/// Ranks that do something together.
pub struct Members {
    pub ranks: Vec<usize>,
    pub group: OnceLock<ProcessGroup>,
    /// The digest of the boxing that they do.
    pub digest: u64,
    /// The placement, if there is one only, whose operations they compare.
    pub placement: Option<u64>,
}

/// The first phase, for this rank's group.
pub struct Reduce {
    pub members: Members,
    pub op: ReduceOp,
    /// The region that the members have, and the part that each reduces.
    pub held: Region,
    pub parts: Vec<Option<Region>>,
    /// This rank's part, and whether it is a part of the result.
    pub own: Option<Region>,
    pub is_in_result: bool,
    /// Whether this phase and the next are an all-reduce.
    pub is_all_reduce: bool,
}

/// The second phase, for the ranks that this one has to do with.
pub struct Exchange {
    pub members: Members,
    /// The region that each member shows the others; None if they need nothing of it.
    pub shown: Vec<Option<Region>>,
    /// All copies between the members.
    pub copies: Vec<Copy>,
    /// All members need what all have, which are rows in their order.
    pub is_all_gather: bool,
}

/// The regions that ranks have and need in a plan.
pub struct Shares<'a> {
    pub plan: &'a BoxingPlan,
    pub from: TensorLayout<'a>,
    pub to: TensorLayout<'a>,
    /// The region that each position of the old placement has.
    pub held: Vec<Region>,
    /// The digest that [`Members`] compare.
    pub digest: u64,
    pub placement: Option<u64>,
}

impl Shares<'_> {
    /// Returns the regions that `rank` copies from its old local to its result.
    pub fn own(&self, rank: usize) -> Vec<Region> {
        if self.reduces_in_result(rank) {
            return Vec::new();
        }
        let own = self.plan.copies.iter().filter(|copy| copy.from == rank && copy.to == rank);
        own.map(|copy| copy.region.clone()).collect()
    }

    /// Returns the result of `rank`, if copies are all of it: the rest of new partial values is
    /// zero.
    pub fn covered(&self, rank: usize) -> Option<&Region> {
        let copies = self.plan.copies.iter().filter(|copy| copy.to == rank);
        let copied: usize = copies.map(|copy| copy.region.elements()).sum();
        let result = &self.plan.results[self.to.placement.position(rank)?];
        (copied == result.elements()).then_some(result)
    }

    /// Returns the first phase, if `rank` has to do with it.
    pub fn reduce(&self, rank: usize) -> Option<Reduce> {
        let reduction = self.plan.reduction.as_ref()?;
        let position = self.from.placement.position(rank)?;
        let group = reduction.groups.iter().find(|group| group.contains(&position))?;
        let parts: Vec<_> = group.iter().map(|&member| reduction.parts[member].clone()).collect();
        let elements: usize = parts.iter().flatten().map(Region::elements).sum();
        if elements == 0 {
            return None;
        }
        let ranks = group.iter().map(|&member| self.from.placement.ranks()[member]).collect();
        Some(Reduce {
            members: self.members(ranks),
            op: reduction.op,
            held: self.held[position].clone(),
            parts,
            own: reduction.parts[position].clone().filter(|part| part.elements() > 0),
            is_in_result: self.reduces_in_result(rank),
            is_all_reduce: self.plan.is_all_reduce,
        })
    }

    /// Returns the second phase, if `rank` has to do with it.
    pub fn exchange(&self, rank: usize) -> Option<Exchange> {
        let (ranks, copies) = connected(rank, &self.plan.copies)?;
        let mut shown = Vec::new();
        for &member in &ranks {
            let is_read = copies.iter().any(|copy| copy.from == member);
            shown.push(if is_read { self.shown(member) } else { None });
        }
        let is_all_gather = ranks
            .iter()
            .all(|&rank| self.covered(rank).is_some_and(|result| are_rows(&shown, result)));
        Some(Exchange { members: self.members(ranks), shown, copies, is_all_gather })
    }

    fn members(&self, ranks: Vec<usize>) -> Members {
        let digest = self.digest;
        let placement = self.placement;
        Members { ranks, group: OnceLock::new(), digest, placement }
    }

    /// Returns the region that `rank` has between the phases.
    fn part(&self, rank: usize) -> Option<Region> {
        let position = self.from.placement.position(rank)?;
        match &self.plan.reduction {
            Some(reduction) => reduction.parts[position].clone(),
            None => Some(self.held[position].clone()),
        }
    }

    /// Returns whether the result of `rank` has its part as it is: the part is reduced there.
    fn reduces_in_result(&self, rank: usize) -> bool {
        let part = self.part(rank);
        self.plan.reduction.is_some()
            && self.plan.copies.iter().any(|copy| {
                copy.from == rank && copy.to == rank && Some(&copy.region) == part.as_ref()
            })
    }

    /// Returns the region of the memory in which others read the part of `rank`.
    fn shown(&self, rank: usize) -> Option<Region> {
        match self.to.placement.position(rank) {
            Some(target) if self.reduces_in_result(rank) => Some(self.plan.results[target].clone()),
            _ => self.part(rank),
        }
    }
}

/// Returns the ranks that this one copies to or from, and those that they do, in order; and the
/// copies between them. None if there are none.
fn connected(rank: usize, copies: &[Copy]) -> Option<(Vec<usize>, Vec<Copy>)> {
    let mut ranks = vec![rank];
    let remote: Vec<&Copy> = copies.iter().filter(|copy| copy.from != copy.to).collect();
    loop {
        let before = ranks.len();
        for copy in &remote {
            match (ranks.contains(&copy.from), ranks.contains(&copy.to)) {
                (true, false) => ranks.push(copy.to),
                (false, true) => ranks.push(copy.from),
                _ => {}
            }
        }
        if ranks.len() == before {
            break;
        }
    }
    ranks.sort_unstable();
    let between: Vec<Copy> =
        remote.into_iter().filter(|copy| ranks.contains(&copy.from)).cloned().collect();
    (!between.is_empty()).then_some((ranks, between))
}

impl Members {
    /// Returns the process group of the members, which is made once.
    pub fn group(&self, groups: &Groups) -> Result<&ProcessGroup> {
        if let Some(group) = self.group.get() {
            return Ok(group);
        }
        let group = groups.group(&self.ranks)?;
        Ok(self.group.get_or_init(|| group))
    }

    /// Returns the digest that all must agree on: of this boxing and the operations before it.
    pub fn agreed(&self, groups: &Groups) -> u64 {
        let before = self.placement.map_or(0, |placement| sequence::digest_of(groups, placement));
        self.digest ^ before
    }

    /// Returns an error, with what ranks were doing.
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
