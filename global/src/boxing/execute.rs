//! Carries out plans of boxing on tensors.

use tch::{Device, Kind, Tensor};

use super::plan::{Copy, Layout, Plan, Reduction};
use crate::error::Result;
use crate::groups::Groups;
use crate::region::{regions, Region};
use flow_tensor::TensorCollectives;

/// A rank's part of a tensor, and where it is in the tensor.
struct Part {
    tensor: Tensor,
    region: Region,
}

impl Part {
    /// A region of the tensor, which this part has, as a view.
    fn view(&self, region: &Region) -> Tensor {
        let ranges = region.0.iter().zip(&self.region.0).enumerate();
        ranges.fold(self.tensor.shallow_clone(), |view, (dim, (range, own))| {
            view.narrow(dim as i64, (range.start - own.start) as i64, range.len() as i64)
        })
    }
}

/// Carries out a plan for a tensor of this shape; all ranks of both placements call this. `local` is
/// what this rank has of it: None on ranks outside the old placement. Returns what it has then: None
/// outside the new one. A part of what the rank has ([`Plan::slice`]) is not copied.
///
/// # Errors
/// A collective fails.
pub fn execute(
    groups: &Groups,
    plan: &Plan,
    (from, to): (Layout, Layout),
    (shape, kind, device): (&[usize], Kind, Device),
    local: Option<&Tensor>,
) -> Result<Option<Tensor>> {
    groups.add_moved(plan.received() * kind.elt_size_in_bytes());
    let rank = groups.rank();
    let position = from.placement.position(rank);
    if let (true, Some(reduction)) = (plan.is_all_reduce, &plan.reduction) {
        let Some((position, local)) = position.zip(local) else { return Ok(None) };
        let mut sum = local.contiguous().copy();
        if let Some(group) = reduction.groups.iter().find(|group| group.contains(&position)) {
            groups.group(&ranks_of(from, group))?.all_reduce_tensor(&mut sum, reduction.op)?;
        }
        return Ok(Some(sum));
    }
    let mut source = position.zip(local).map(|(position, local)| Part {
        tensor: local.shallow_clone(),
        region: regions(from.placement, from.sbp, shape).swap_remove(position),
    });
    if let (Some(reduction), Some(position), Some(part)) = (&plan.reduction, position, &mut source)
    {
        source = reduce(groups, reduction, from, position, part)?;
    }
    let target = to.placement.position(rank);
    if let (Some(target), Some(region), Some(source)) = (target, plan.slice(rank), &source) {
        if plan.results[target] == *region {
            return Ok(Some(source.view(region)));
        }
    }
    let result = target.map(|position| {
        let region = plan.results[position].clone();
        let sizes: Vec<i64> = region.shape().iter().map(|&size| size as i64).collect();
        Part { tensor: Tensor::zeros(&sizes[..], (kind, device)), region }
    });
    let is_remote = |copy: &&Copy| copy.from != copy.to;
    if let (Some(source), Some(result)) = (&source, &result) {
        for copy in plan.copies.iter().filter(|copy| copy.from == rank && copy.to == rank) {
            result.view(&copy.region).copy_(&source.view(&copy.region));
        }
    }
    let remote: Vec<&Copy> = plan.copies.iter().filter(is_remote).collect();
    let mut ranks: Vec<usize> = remote.iter().flat_map(|copy| [copy.from, copy.to]).collect();
    ranks.sort_unstable();
    ranks.dedup();
    if ranks.contains(&rank) {
        exchange(groups, &ranks, &remote, (kind, device), source.as_ref(), result.as_ref())?;
    }
    Ok(result.map(|result| result.tensor))
}

/// The ranks at these positions.
fn ranks_of(layout: Layout, positions: &[usize]) -> Vec<usize> {
    positions.iter().map(|&position| layout.placement.ranks()[position]).collect()
}

/// The first phase: a reduce-scatter. None if this rank has no part.
fn reduce(
    groups: &Groups,
    reduction: &Reduction,
    from: Layout,
    position: usize,
    own: &Part,
) -> Result<Option<Part>> {
    let Some(members) = reduction.groups.iter().find(|group| group.contains(&position)) else {
        return Ok(None);
    };
    let parts: Vec<_> = members.iter().map(|&member| reduction.parts[member].as_ref()).collect();
    if parts.iter().flatten().all(|part| part.elements() == 0) {
        return Ok(None);
    }
    let flat = parts.iter().flatten().map(|part| own.view(part).reshape([-1]));
    let flat = Tensor::cat(&flat.collect::<Vec<_>>(), 0);
    let count = |part: &Option<&Region>| part.map_or(0, Region::elements);
    let counts: Vec<usize> = parts.iter().map(count).collect();
    let sum = groups.group(&ranks_of(from, members))?.reduce_scatter_v_tensor(
        &flat,
        &counts,
        reduction.op,
    )?;
    Ok(reduction.parts[position].clone().map(|region| {
        let sizes: Vec<i64> = region.shape().iter().map(|&size| size as i64).collect();
        Part { tensor: sum.view(&sizes[..]), region }
    }))
}

/// The second phase: an all-to-all among `ranks`.
fn exchange(
    groups: &Groups,
    ranks: &[usize],
    copies: &[&Copy],
    options: (Kind, Device),
    source: Option<&Part>,
    result: Option<&Part>,
) -> Result<()> {
    let rank = groups.rank();
    let between = |from: usize, to: usize| {
        copies.iter().filter(move |copy| copy.from == from && copy.to == to)
    };
    let count = |from: usize, to: usize| -> usize {
        between(from, to).map(|copy| copy.region.elements()).sum()
    };
    let sent = ranks.iter().flat_map(|&to| between(rank, to));
    let sent = sent.filter_map(|copy| Some(source?.view(&copy.region).reshape([-1])));
    let mut sent: Vec<Tensor> = sent.collect();
    sent.push(Tensor::zeros([0], options));
    let sends: Vec<usize> = ranks.iter().map(|&to| count(rank, to)).collect();
    let receives: Vec<usize> = ranks.iter().map(|&from| count(from, rank)).collect();
    let group = groups.group(ranks)?;
    let received = group.all_to_all_v_tensor(&Tensor::cat(&sent, 0), &sends, &receives)?;
    let mut start = 0;
    for copy in ranks.iter().flat_map(|&from| between(from, rank)) {
        let Some(result) = result else { break };
        let length = copy.region.elements() as i64;
        let sizes: Vec<i64> = copy.region.shape().iter().map(|&size| size as i64).collect();
        let part = received.narrow(0, start, length).view(&sizes[..]);
        result.view(&copy.region).copy_(&part);
        start += length;
    }
    Ok(())
}
