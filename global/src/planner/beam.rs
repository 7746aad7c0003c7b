//! Beam search for the SBPs of a whole step, on one axis of the placement.
//!
//! A call may take any of its rule's signatures, whatever its inputs have: boxing costs its bytes.
//! The order of calls is free, as signatures are chosen, and nothing runs: a call may be decided
//! before the one that makes its inputs. So calls are taken in the order that keeps few values
//! undecided, such as a layer's forward, backward and update together. What is kept for a state is
//! the SBPs of these values, and those that are wanted. Of states that agree in that, the cheapest
//! stays, and of all states the cheapest [`WIDTH`].

use std::collections::HashMap;

use flow_comm::ReduceOp;

use super::cost::flops;
use super::replay::Replay;
use crate::region::part;
use crate::rules::infer::share;
use crate::rules::op::{Op, Signature};
use crate::rules::rule;
use crate::sbp::{B, NdSbp, S, Sbp};
use crate::trace::{CallKind, Role, TracedCall};

/// States that are kept.
const WIDTH: usize = 64;

/// SBPs on the axes that are decided.
#[derive(Clone, Debug)]
pub(super) struct Decided {
    /// The SBP of each value, where it is made.
    pub values: Vec<NdSbp>,
    /// The SBP that each input of each call is boxed to.
    pub inputs: Vec<Vec<NdSbp>>,
}

impl Decided {
    /// Returns the decisions of a search that has decided nothing.
    pub fn nothing(replay: &Replay) -> Self {
        let calls = &replay.trace.calls;
        Self {
            values: vec![Vec::new(); replay.trace.values.len()],
            inputs: calls.iter().map(|call| vec![Vec::new(); call.inputs.len()]).collect(),
        }
    }
}

/// A call, or a leaf that is chosen.
#[derive(Clone, Copy, Debug)]
enum Item {
    Call(usize),
    Leaf(usize),
}

/// A way to run a call.
#[derive(Clone, Debug, Default)]
struct Candidate {
    /// The value, what it is to have, its bytes.
    inputs: Vec<(usize, Sbp, f64)>,
    /// The inputs that are written in place, so that nothing else than this will do.
    written: Vec<(usize, Sbp, f64)>,
    outputs: Vec<(usize, Sbp, f64)>,
    cost: f64,
    signature: Option<Signature>,
}

/// The knowledge of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Slot {
    made: Option<Sbp>,
    /// The SBP that it must be made as.
    exact: Option<Sbp>,
    /// The SBPs that calls want, one bit each.
    wanted: u64,
}

#[derive(Clone, Debug)]
struct PartialAssignment {
    cost: f64,
    slots: Vec<Slot>,
    /// The last of its steps.
    step: usize,
}

/// A decision, and the one before it.
struct Step {
    before: usize,
    candidate: usize,
}

fn bit(sbp: Sbp) -> u32 {
    match sbp {
        Sbp::Broadcast => 0,
        Sbp::Partial(op) => OPS.iter().position(|&other| other == op).map_or(7, |at| at as u32 + 1),
        Sbp::Split(dim) => 8 + dim.min(55) as u32,
    }
}

fn of_bit(bit: u32) -> Sbp {
    match bit {
        0 => B,
        1..=7 => Sbp::Partial(OPS.get(bit as usize - 1).copied().unwrap_or(ReduceOp::Sum)),
        _ => S(bit as usize - 8),
    }
}

const OPS: [ReduceOp; 3] = [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min];

impl Slot {
    const NEW: Self = Self { made: None, exact: None, wanted: 0 };

    fn sbps(self) -> impl Iterator<Item = Sbp> {
        let bits = (0..64).filter(move |bit| self.wanted & (1 << bit) != 0);
        self.made.into_iter().chain(bits.map(of_bit))
    }

    /// A call wants this SBP: the share that is received for it, if that is known.
    fn want(&mut self, sbp: Sbp, ranks: f64) -> f64 {
        let has = self.wanted & (1 << bit(sbp)) != 0 || self.made == Some(sbp);
        let shares = self.sbps().map(|from| share(from, sbp, ranks));
        let least = shares.min_by(f64::total_cmp).filter(|_| !has && self.made.is_some());
        if self.made != Some(sbp) {
            self.wanted |= 1 << bit(sbp);
        }
        self.forget();
        least.unwrap_or(0.0)
    }

    /// All parts can be had of a whole, so that only the whole is remembered.
    fn forget(&mut self) {
        let whole = 1 << bit(B);
        if self.made == Some(B) {
            self.wanted = 0;
        } else if self.wanted & whole != 0 {
            self.wanted = whole;
        }
    }

    /// The value is made: the share that is received for all that calls want.
    fn make(&mut self, sbp: Sbp, ranks: f64) -> f64 {
        let mut own = Self { made: Some(sbp), exact: None, wanted: 0 };
        let wanted = Self { made: None, ..*self };
        let received: f64 = wanted.sbps().map(|wanted| own.want(wanted, ranks)).sum();
        let written = self.exact.map_or(0.0, |exact| there_and_back(sbp, exact, ranks));
        *self = own;
        received + written
    }

    /// A call writes the value, so that it must be made so: else it is boxed and boxed back.
    fn fix(&mut self, sbp: Sbp, ranks: f64) -> f64 {
        let known = self.made.or(self.exact);
        self.exact = self.made.is_none().then_some(sbp);
        known.map_or(0.0, |known| there_and_back(known, sbp, ranks))
    }
}

fn there_and_back(from: Sbp, to: Sbp, ranks: f64) -> f64 {
    share(from, to, ranks) + share(to, from, ranks)
}

/// Returns SBPs of a tensor on one axis: B, and splits along dimensions that are long enough.
pub(super) fn domain(shape: &[usize], ranks: usize) -> Vec<Sbp> {
    let dims = shape.iter().enumerate().filter(|&(_, &size)| size >= ranks);
    [B].into_iter().chain(dims.map(|(dim, _)| S(dim))).collect()
}

/// Decides one more axis. Leaves that are not `free` keep what is recorded.
pub(super) fn decide(replay: &Replay, decided: &mut Decided, ranks: usize, free: &[bool]) {
    let beam = Beam { replay, decided, ranks, free };
    let items = beam.order();
    let candidates: Vec<_> = items.iter().map(|&item| beam.candidates(item)).collect();
    let chosen = beam.run(&candidates);
    for ((item, mut candidates), chosen) in items.into_iter().zip(candidates).zip(chosen) {
        let candidate = candidates.swap_remove(chosen);
        for (value, sbp, _) in candidate.outputs {
            decided.values[value].push(sbp);
        }
        let Item::Call(call) = item else { continue };
        let Some(signature) = candidate.signature else { continue };
        for (input, &sbp) in decided.inputs[call].iter_mut().zip(&signature.inputs) {
            input.push(sbp);
        }
    }
}

struct Beam<'a> {
    replay: &'a Replay<'a>,
    decided: &'a Decided,
    ranks: usize,
    free: &'a [bool],
}

impl Beam<'_> {
    /// Returns all items. Calls are by autograd's node, so that the backward of a call follows it.
    /// So do the calls that take the results, such as the update of a weight. Before a call are the
    /// leaves that it takes.
    fn order(&self) -> Vec<Item> {
        let trace = self.replay.trace;
        // The node that a tensor was last written in, and that it is next used in.
        let mut nodes: Vec<Option<u64>> = vec![None; trace.values.len()];
        let mut calls = Vec::new();
        for (index, call) in trace.calls.iter().enumerate() {
            let inputs = call.inputs.iter().flatten().filter_map(|&id| nodes[id]);
            let node = call.node.or_else(|| inputs.max());
            call.outputs.iter().flatten().for_each(|&id| nodes[id] = node);
            calls.push((node, index));
        }
        nodes.fill(None);
        for (node, index) in calls.iter_mut().rev() {
            let call = &trace.calls[*index];
            *node = node.or_else(|| call.outputs.iter().flatten().find_map(|&id| nodes[id]));
            call.inputs.iter().flatten().for_each(|&id| nodes[id] = *node);
        }
        calls.sort_unstable();
        let mut left: Vec<usize> = calls.into_iter().map(|(_, index)| index).collect();
        let mut is_known = vec![false; nodes.len()];
        let mut order = Vec::new();
        while !left.is_empty() {
            // What takes one tensor follows from what is known of that, so it waits until
            // something is.
            let ready = left.iter().position(|&index| {
                let TracedCall { inputs, outputs, .. } = &trace.calls[index];
                inputs.len() > 1 || inputs.iter().chain(outputs).flatten().any(|&id| is_known[id])
            });
            let call = left.remove(ready.unwrap_or(0));
            let TracedCall { inputs, outputs, .. } = &trace.calls[call];
            for &id in inputs.iter().flatten() {
                if trace.values[id].role != Role::Result && !is_known[id] {
                    order.push(Item::Leaf(id));
                }
                is_known[id] = true;
            }
            outputs.iter().flatten().for_each(|&id| is_known[id] = true);
            order.push(Item::Call(call));
        }
        for (id, value) in trace.values.iter().enumerate() {
            if !is_known[id] && value.role != Role::Result {
                order.push(Item::Leaf(id));
            }
        }
        order
    }

    /// Returns a tensor's shape on the axes that are decided.
    fn local(&self, value: usize, sbp: &[Sbp]) -> Vec<usize> {
        let value = &self.replay.trace.values[value];
        super::cost::local(&value.tensor.shape, &value.placement, sbp)
    }

    fn bytes(&self, value: usize, shape: &[usize]) -> f64 {
        (shape.iter().product::<usize>() * self.replay.trace.values[value].tensor.bytes()) as f64
    }

    fn candidates(&self, item: Item) -> Vec<Candidate> {
        match item {
            Item::Leaf(value) => self.leaf(value),
            Item::Call(call) => self.call(call),
        }
    }

    fn leaf(&self, value: usize) -> Vec<Candidate> {
        let sbp = &self.decided.values[value];
        let shape = self.local(value, sbp);
        let bytes = self.bytes(value, &shape);
        let sbps = if self.free[value] {
            domain(&shape, self.ranks)
        } else {
            vec![self.replay.trace.values[value].sbp[sbp.len()]]
        };
        let is_kept = self.replay.kept.contains(&value);
        let memory = if is_kept { self.replay.prices.memory } else { 0.0 };
        let mut candidates = Vec::new();
        for sbp in sbps {
            let part = if sbp == B { 1.0 } else { 1.0 / self.ranks as f64 };
            let outputs = vec![(value, sbp, bytes)];
            let cost = memory * bytes * part;
            candidates.push(Candidate { outputs, cost, ..Candidate::default() });
        }
        candidates
    }

    fn call(&self, index: usize) -> Vec<Candidate> {
        let trace = self.replay.trace;
        let call = &trace.calls[index];
        let mut op = call.op(&trace.values);
        op.ranks = self.ranks;
        for ((left, sbp), id) in
            op.left.iter_mut().zip(&self.decided.inputs[index]).zip(&call.inputs)
        {
            if let Some(id) = *id {
                *left = self.local(id, sbp);
            }
        }
        let signatures = match call.kind {
            CallKind::Operation => {
                let candidates = rule(op.name).map(|rule| (rule.signatures)(&op));
                let all = Signature::all(&op, B);
                candidates.unwrap_or_default().into_iter().chain([all]).collect()
            }
            CallKind::ToGlobal => {
                let sbp = call.outputs[0]
                    .map_or(B, |id| trace.values[id].sbp[self.decided.values[id].len()]);
                vec![Signature::new([sbp], [sbp])]
            }
            CallKind::Gradient => {
                let sbps = domain(&op.left[1], self.ranks).into_iter();
                sbps.map(|sbp| Signature::new([sbp, sbp], [sbp])).collect::<Vec<_>>()
            }
        };
        let mut candidates = Vec::new();
        for signature in signatures {
            if !self.fits(&op, &signature) {
                continue;
            }
            let mut candidate = Candidate::default();
            let mut shapes = Vec::new();
            for (at, (left, &sbp)) in op.left.iter().zip(&signature.inputs).enumerate() {
                let Some(id) = call.inputs[at] else {
                    shapes.push(Vec::new());
                    continue;
                };
                let wanted = (id, sbp, self.bytes(id, left));
                let is_written = match call.kind {
                    CallKind::Operation => op.is_fixed(at),
                    CallKind::ToGlobal => false,
                    CallKind::Gradient => at == 1,
                };
                if is_written {
                    candidate.written.push(wanted)
                } else {
                    candidate.inputs.push(wanted)
                }
                shapes.push(self.part(left.clone(), sbp));
            }
            let mut results = Vec::new();
            for (&id, &sbp) in call.outputs.iter().zip(&signature.outputs) {
                let Some(id) = id else { continue };
                let shape = self.local(id, &self.decided.values[id]);
                if !call.in_place {
                    candidate.outputs.push((id, sbp, self.bytes(id, &shape)));
                }
                results.push(self.part(shape, sbp));
            }
            if call.kind == CallKind::Operation {
                candidate.cost =
                    flops(op.name, &shapes, &results) / self.replay.prices.flops_per_byte;
            }
            candidate.signature = Some(signature);
            candidates.push(candidate);
        }
        candidates
    }

    /// Returns whether the dimensions that a signature splits are long enough.
    fn fits(&self, op: &Op, signature: &Signature) -> bool {
        (0..op.inputs.len()).all(|at| match signature.inputs[at].dim() {
            Some(dim) if op.inputs[at].is_defined() => {
                op.left[at].get(dim).is_some_and(|&size| size >= self.ranks)
            }
            _ => true,
        })
    }

    /// What the first rank has.
    fn part(&self, mut shape: Vec<usize>, sbp: Sbp) -> Vec<usize> {
        if let Some(size) = sbp.dim().and_then(|dim| shape.get_mut(dim)) {
            *size = part(*size, self.ranks, 0).len();
        }
        shape
    }

    /// Returns the index of the candidate for each item.
    fn run(&self, items: &[Vec<Candidate>]) -> Vec<usize> {
        let ranks = self.ranks as f64;
        let mut uses = vec![0; self.replay.trace.values.len()];
        items.iter().flat_map(|item| touched(item)).for_each(|value| uses[value] += 1);
        let mut open: Vec<usize> = Vec::new();
        let mut steps = vec![Step { before: 0, candidate: 0 }];
        let mut states = vec![PartialAssignment { cost: 0.0, slots: Vec::new(), step: 0 }];
        for candidates in items {
            let touched = touched(candidates);
            let new: Vec<usize> =
                touched.iter().copied().filter(|value| !open.contains(value)).collect();
            open.extend(&new);
            touched.iter().for_each(|&value| uses[value] -= 1);
            let stays: Vec<bool> = open.iter().map(|&value| uses[value] > 0).collect();
            let mut next: Vec<PartialAssignment> = Vec::new();
            let mut known = HashMap::<Vec<Slot>, usize>::new();
            for state in &states {
                for (index, candidate) in candidates.iter().enumerate() {
                    let mut slots = state.slots.clone();
                    slots.resize(open.len(), Slot::NEW);
                    let mut cost = state.cost + candidate.cost;
                    for &(id, sbp, bytes) in &candidate.written {
                        cost += bytes * slots[place(&open, id)].fix(sbp, ranks);
                    }
                    for &(id, sbp, bytes) in &candidate.inputs {
                        cost += bytes * slots[place(&open, id)].want(sbp, ranks);
                    }
                    for &(id, sbp, bytes) in &candidate.outputs {
                        cost += bytes * slots[place(&open, id)].make(sbp, ranks);
                    }
                    let mut is_kept = stays.iter();
                    slots.retain(|_| is_kept.next() == Some(&true));
                    match known.get(&slots) {
                        Some(&other) if next[other].cost <= cost => {}
                        other => {
                            steps.push(Step { before: state.step, candidate: index });
                            let state = PartialAssignment { cost, slots, step: steps.len() - 1 };
                            match other {
                                Some(&other) => next[other] = state,
                                None => {
                                    known.insert(state.slots.clone(), next.len());
                                    next.push(state);
                                }
                            }
                        }
                    }
                }
            }
            // Equally cheap states keep the order in which they were found.
            next.sort_by(|one, other| one.cost.total_cmp(&other.cost));
            next.truncate(WIDTH);
            states = next;
            open.retain(|&value| uses[value] > 0);
        }
        let mut step = states.first().map_or(0, |state| state.step);
        let mut chosen: Vec<usize> = Vec::new();
        while step != 0 {
            chosen.push(steps[step].candidate);
            step = steps[step].before;
        }
        chosen.reverse();
        chosen
    }
}

/// Returns the values that an item's candidates take or make.
fn touched(item: &[Candidate]) -> Vec<usize> {
    let values = item.iter().flat_map(|one| {
        one.inputs.iter().chain(&one.written).chain(&one.outputs).map(|&(id, ..)| id)
    });
    let mut values: Vec<usize> = values.collect();
    values.sort_unstable();
    values.dedup();
    values
}

/// Returns the slot of an open value.
fn place(open: &[usize], value: usize) -> usize {
    open.iter().position(|&other| other == value).unwrap_or(0)
}
