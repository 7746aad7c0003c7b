//! The phases of boxing by collectives, where ranks cannot read each other's memory: on GPUs, and
//! between machines. What a collective takes is side by side in memory, so other regions are copied
//! before and after.

use flow_tensor::{ProcessGroup, TensorCollectives};
use tch::{Device, Kind, Tensor};

use super::memory::{Part, sizes};
use super::phases::{Exchange, Reduce};
use super::plan::Copy;
use crate::error::Result;
use crate::region::{Region, are_rows};

/// Runs both phases at once.
pub fn all_reduce(
    group: &ProcessGroup,
    reduce: &Reduce,
    terms: &Part,
    result: &Part,
) -> Result<()> {
    let mut sum = result.tensor.shallow_clone();
    sum.copy_(&terms.tensor);
    Ok(group.all_reduce_tensor(&mut sum, reduce.op)?)
}

/// Runs the first phase. None if this rank has no part.
pub fn reduce_scatter(group: &ProcessGroup, reduce: &Reduce, terms: &Part) -> Result<Option<Part>> {
    let parts = &reduce.parts;
    let flat = if are_rows(parts, &reduce.held) {
        terms.tensor.view([-1])
    } else {
        side_by_side(parts.iter().flatten().map(|part| terms.view(part)).collect())
    };
    let counts: Vec<usize> =
        parts.iter().map(|part| part.as_ref().map_or(0, Region::elements)).collect();
    let sum = group.reduce_scatter_v_tensor(&flat, &counts, reduce.op)?;
    Ok(reduce
        .own
        .as_ref()
        .map(|own| Part { tensor: sum.view(&sizes(own)[..]), region: own.clone() }))
}

/// Runs the second phase.
pub fn exchange(
    group: &ProcessGroup,
    exchange: &Exchange,
    (rank, kind, device): (usize, Kind, Device),
    source: Option<&Part>,
    mut result: Option<&mut Part>,
) -> Result<()> {
    let nothing = Tensor::empty([0], (kind, device));
    if exchange.is_all_gather
        && let Some(result) = &mut result
    {
        let counts: Vec<usize> = exchange.counts().collect();
        let shows = counts[group.rank()] > 0;
        let own = source.filter(|_| shows).map_or(nothing, |source| source.tensor.view([-1]));
        let all = group.all_gather_v_tensor(&own, &counts)?;
        result.tensor = all.view(&sizes(&result.region)[..]);
        return Ok(());
    }
    let ranks = &exchange.members.ranks;
    let copies = &exchange.copies;
    let mut parts = Vec::new();
    for copy in ranks.iter().flat_map(|&to| between(copies, rank, to)) {
        parts.extend(source.map(|source| source.view(&copy.region)));
    }
    let sent = if parts.is_empty() { nothing } else { side_by_side(parts) };
    let sends: Vec<usize> = ranks.iter().map(|&to| elements(copies, rank, to)).collect();
    let receives: Vec<usize> = ranks.iter().map(|&from| elements(copies, from, rank)).collect();
    let received = group.all_to_all_v_tensor(&sent, &sends, &receives)?;
    let mut start = 0;
    for copy in ranks.iter().flat_map(|&from| between(copies, from, rank)) {
        let Some(result) = &result else { break };
        let length = copy.region.elements() as i64;
        let part = received.narrow(0, start, length).view(&sizes(&copy.region)[..]);
        result.view(&copy.region).copy_(&part);
        start += length;
    }
    Ok(())
}

/// Returns the copies from one rank to another.
fn between(copies: &[Copy], from: usize, to: usize) -> impl Iterator<Item = &Copy> {
    copies.iter().filter(move |copy| copy.from == from && copy.to == to)
}

/// Returns how many elements one rank sends to another.
fn elements(copies: &[Copy], from: usize, to: usize) -> usize {
    between(copies, from, to).map(|copy| copy.region.elements()).sum()
}

/// Returns all elements one after the other; an undefined tensor without any.
fn side_by_side(mut tensors: Vec<Tensor>) -> Tensor {
    match tensors.len() {
        0 => Tensor::new(),
        1 => tensors.remove(0).reshape([-1]),
        _ => Tensor::cat(&tensors.iter().map(|tensor| tensor.reshape([-1])).collect::<Vec<_>>(), 0),
    }
}
