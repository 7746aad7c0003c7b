//! The planner: SBPs for the weights of a traced step, by what the whole step costs. Pure.
//!
//! | file | subject |
//! |---|---|
//! | `cost` | bytes, work, memory |
//! | `replay` | what rules make of a trace with other SBPs |
//! | `beam` | signatures for all calls of a step together |
//! | `search` | weights and pins, from what the beam found |
//!
//! Rules choose for one operation at a time: the signature whose inputs need the fewest bytes. What
//! that costs later they do not see. The planner sees the whole step: beam search first decides all
//! calls together, as if each could be given its signature. A program cannot do that, but it can
//! give weights their SBPs and pin tensors with `to_global` and `grad_sbp`. So the search then takes
//! these over, and changes one at a time for the better, by what rules will make of them. It has no
//! randomness: the same trace gives the same plan on each rank.

mod beam;
mod cost;
mod replay;
mod search;

use std::fmt;

pub use cost::{Cost, Prices};

use crate::error::{Error, Result};
use crate::placement::Placement;
use crate::sbp::NdSbp;
use crate::trace::{Role, Trace};
use replay::{Assignment, Replay};
use search::Search;

/// The SBPs that [`auto_sbp`] chose.
#[derive(Clone, Debug, PartialEq)]
pub struct ChosenSbps {
    /// The SBP of each weight, by name, in the order of the trace.
    pub weights: Vec<(String, NdSbp)>,
    /// Tensors to pin; those that save most come first.
    pub pins: Vec<Pin>,
    /// The cost of the step with the weights and pins.
    pub cost: Cost,
    /// The cost with the weights alone.
    pub without_pins: Cost,
}

/// Tensors that had better have another layout, one in each of some equal layers.
#[derive(Clone, Debug, PartialEq)]
pub struct Pin {
    /// The tensors, by id in the trace.
    pub values: Vec<usize>,
    /// Their description in words.
    pub what: String,
    /// The SBP that they need.
    pub sbp: NdSbp,
    /// Tensors are gradients of `values`: `grad_sbp` pins them. Otherwise `to_global` does.
    pub is_gradient: bool,
    /// Bytes that each rank receives less, with the pins before this one.
    pub saved: f64,
}

/// Chooses SBPs for the weights of a traced step (forward, backward and update), and tensors to
/// pin. The step is to cost as little as possible. Inputs keep the SBPs that the trace has.
/// [`Trace::on`] takes a trace to another placement first.
///
/// # Errors
/// The trace has tensors on several placements.
pub fn auto_sbp(trace: &Trace, prices: &Prices) -> Result<ChosenSbps> {
    if let Some((one, other)) = several(trace) {
        return Err(Error::SeveralPlacements(one.to_string(), other.to_string()));
    }
    let mut search = Search::new(Replay::new(trace, *prices), true);
    let best = search.run();
    let mut weights = Vec::new();
    for (id, value) in trace.values.iter().enumerate() {
        if value.role == Role::Weight {
            weights.push((value.name.clone(), search.replay.sbp(best.leaves[id]).clone()));
        }
    }
    let without = Assignment { pins: vec![None; best.pins.len()], ..best.clone() };
    let without_pins = search.replay.run(&without);
    let cost = search.replay.run(&best);
    let pins = describe(&mut search, &best, without_pins.bytes);
    Ok(ChosenSbps { weights, pins, cost, without_pins })
}

/// Returns the cost of a traced step as it is.
pub fn cost(trace: &Trace) -> Cost {
    let mut replay = Replay::new(trace, Prices::default());
    let recorded = replay.recorded();
    replay.run(&recorded)
}

/// Finds the pins that save most, if leaves have the layout of the trace. None if tensors have
/// several placements.
pub(crate) fn pins(trace: &Trace, prices: &Prices) -> Vec<Pin> {
    if several(trace).is_some() {
        return Vec::new();
    }
    let mut search = Search::new(Replay::new(trace, *prices), false);
    let recorded = search.replay.recorded();
    let before = search.replay.run(&recorded).bytes;
    let best = search.run();
    describe(&mut search, &best, before)
}

/// Returns two placements of a trace, if there is more than one.
fn several(trace: &Trace) -> Option<(&Placement, &Placement)> {
    let mut placements = trace.values.iter().map(|value| &value.placement);
    let first = placements.next()?;
    Some((first, placements.find(|&other| other != first)?))
}

fn describe(search: &mut Search, best: &Assignment, before: f64) -> Vec<Pin> {
    let trace = search.replay.trace;
    let gradients = trace.gradients();
    let mut pins: Vec<Pin> = Vec::new();
    let mut bytes = before;
    for (group, with) in search.order(best) {
        let Some(&first) = group.first() else { continue };
        let is_gradient = gradients.contains(&Some(first));
        let mut values = group.clone();
        if is_gradient {
            for id in &mut values {
                let of = gradients.iter().position(|&gradient| gradient == Some(*id));
                *id = of.unwrap_or(*id);
            }
        }
        let sbp = best.pins[first].map(|code| search.replay.sbp(code).clone()).unwrap_or_default();
        let what = trace.describe(values[0]);
        pins.push(Pin { values, what, sbp, is_gradient, saved: bytes - with });
        bytes = with;
    }
    pins
}

impl fmt::Display for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let method = if self.is_gradient { "grad_sbp" } else { "to_global" };
        write!(f, "{method}({:?}) of {}", self.sbp, self.what)?;
        match self.values.len() {
            1 => Ok(()),
            count => write!(f, ", and of {} like it", count - 1),
        }
    }
}
