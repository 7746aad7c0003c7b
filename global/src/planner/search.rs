//! Search for SBPs of leaves, and for pins, that make a step cheaper as it will really run.
//! Signatures are then chosen one by one ([`crate::rules::infer`]).

use std::collections::BTreeMap;

use super::beam::{Decided, decide, domain};
use super::cost::local;
use super::replay::{Assignment, Replay, SbpCode};
use crate::sbp::{B, NdSbp};
use crate::trace::{Phase, Role, Trace, Value};

/// Values that get the same: a weight in all equal layers.
pub(super) type Group = Vec<usize>;

/// The part of the cost that a change must gain, so that rounding decides nothing.
const LEAST: f64 = 1e-7;

/// The part of the cost that the simplest plan may give away: B, and no pins, where little is gained.
const GIVEN_AWAY: f64 = 1e-3;

/// Times that everything is tried again.
const SWEEPS: usize = 4;

/// What may be changed.
struct Coordinate {
    group: Group,
    is_pin: bool,
    /// The first is no pin, or B.
    options: Vec<Option<SbpCode>>,
}

impl Coordinate {
    fn set(&self, given: &mut Assignment, option: Option<SbpCode>) {
        for &id in &self.group {
            match option {
                Some(code) if !self.is_pin => given.leaves[id] = code,
                _ => given.pins[id] = option,
            }
        }
    }
}

pub(super) struct Search<'a> {
    pub replay: Replay<'a>,
    /// Leaves that may be chosen, by value.
    free: Vec<bool>,
    weights: Vec<Group>,
    pins: Vec<Group>,
}

impl<'a> Search<'a> {
    /// Chooses pins, and the SBPs of weights if they are `free`.
    pub fn new(replay: Replay<'a>, is_free: bool) -> Self {
        let trace = replay.trace;
        let weights = if is_free { weights(&replay) } else { Vec::new() };
        let mut free = vec![false; trace.values.len()];
        weights.iter().flatten().for_each(|&id| free[id] = true);
        let pins = pins(&replay);
        Self { replay, free, weights, pins }
    }

    /// Returns the best that is found.
    pub fn run(&mut self) -> Assignment {
        let mut best = self.replay.recorded();
        let mut least = self.replay.total(&best);
        let mut starts = vec![self.beam(), best.clone()];
        if !self.weights.is_empty() {
            let axes = self.replay.trace.values.first().map_or(0, |value| value.sbp.len());
            let broadcast = self.replay.code(&vec![B; axes]);
            let mut start = best.clone();
            self.weights.iter().flatten().for_each(|&id| start.leaves[id] = broadcast);
            starts.push(start);
            starts.dedup();
        }
        let coordinates = self.coordinates();
        for mut start in starts {
            let total = self.descend(&mut start, &coordinates);
            if total < least * (1.0 - LEAST) {
                (best, least) = (start, total);
            }
        }
        self.simplify(&mut best, &coordinates);
        best
    }

    /// What the beam finds, by weights and pins.
    fn beam(&mut self) -> Assignment {
        let trace = self.replay.trace;
        let mut decided = Decided::nothing(&self.replay);
        let shape = trace.values.first().map_or(&[][..], |value| value.placement.shape());
        for &ranks in shape {
            decide(&self.replay, &mut decided, ranks, &self.free);
        }
        let mut given = self.replay.recorded();
        for group in &self.weights {
            // All layers alike, as the first one.
            let code = self.replay.code(&decided.values[group[0]]);
            group.iter().for_each(|&id| given.leaves[id] = code);
        }
        let mut wanted: Vec<Vec<&NdSbp>> = vec![Vec::new(); trace.values.len()];
        for (call, inputs) in trace.calls.iter().zip(&decided.inputs) {
            for (id, sbp) in call.inputs.iter().zip(inputs) {
                if let Some(id) = *id {
                    wanted[id].push(sbp);
                }
            }
        }
        for &id in self.pins.iter().flatten() {
            let without_terms =
                wanted[id].iter().rev().filter(|sbp| !sbp.iter().any(|sbp| sbp.is_partial()));
            let pin = without_terms.max_by_key(|sbp| sbp.iter().filter(|&&sbp| sbp == B).count());
            let pin = pin.filter(|&&sbp| *sbp != decided.values[id]);
            given.pins[id] = pin.map(|&sbp| self.replay.code(sbp));
        }
        given
    }

    fn coordinates(&mut self) -> Vec<Coordinate> {
        let mut coordinates = Vec::new();
        let pins = self.pins.iter().map(|group| (group, true));
        let weights = self.weights.iter().map(|group| (group, false));
        for (group, is_pin) in pins.chain(weights) {
            let group = group.clone();
            let sbps = sbps(&self.replay.trace.values[group[0]]);
            let none = is_pin.then_some(None);
            let options = sbps.iter().map(|sbp| Some(self.replay.code(sbp)));
            let options = none.into_iter().chain(options).collect();
            coordinates.push(Coordinate { group, is_pin, options });
        }
        coordinates
    }

    /// Changes one thing after the other for the better; returns the cost.
    fn descend(&mut self, given: &mut Assignment, coordinates: &[Coordinate]) -> f64 {
        let mut least = self.replay.total(given);
        for _ in 0..SWEEPS {
            let before = least;
            for coordinate in coordinates {
                least = self.improve(given, coordinate, least);
            }
            if least >= before {
                break;
            }
        }
        least
    }

    /// Leaves out what gains little.
    fn simplify(&mut self, given: &mut Assignment, coordinates: &[Coordinate]) {
        let bound = self.replay.total(given) * (1.0 + GIVEN_AWAY);
        for coordinate in coordinates {
            let mut simple = given.clone();
            coordinate.set(&mut simple, coordinate.options[0]);
            if simple != *given && self.replay.total(&simple) <= bound {
                *given = simple;
            }
        }
    }

    fn improve(&mut self, given: &mut Assignment, coordinate: &Coordinate, mut least: f64) -> f64 {
        for &option in &coordinate.options {
            let mut other = given.clone();
            coordinate.set(&mut other, option);
            if other == *given {
                continue;
            }
            let total = self.replay.total(&other);
            if total < least * (1.0 - LEAST) {
                least = total;
                *given = other;
            }
        }
        least
    }

    /// Pins in the order in which they help most, and the bytes received with each and those before.
    pub fn order(&mut self, best: &Assignment) -> Vec<(Group, f64)> {
        let mut left = self.pins.clone();
        left.retain(|group| group.iter().any(|&id| best.pins[id].is_some()));
        let mut given = Assignment { pins: vec![None; best.pins.len()], ..best.clone() };
        let mut order = Vec::new();
        while !left.is_empty() {
            let mut totals = Vec::new();
            for group in &left {
                let with = with(&given, best, group);
                totals.push(self.replay.total(&with));
            }
            let next = (0..left.len()).min_by(|&one, &other| totals[one].total_cmp(&totals[other]));
            let group = left.remove(next.unwrap_or(0));
            given = with(&given, best, &group);
            order.push((group, self.replay.run(&given).bytes));
        }
        order
    }
}

/// Gives the pins of a group as well.
fn with(given: &Assignment, best: &Assignment, group: &Group) -> Assignment {
    let mut given = given.clone();
    group.iter().for_each(|&id| given.pins[id] = best.pins[id]);
    given
}

/// B and splits on each axis, where dimensions are long enough.
fn sbps(value: &Value) -> Vec<NdSbp> {
    let mut all = vec![Vec::new()];
    for &ranks in value.placement.shape() {
        let mut longer = Vec::new();
        for sbp in &all {
            let shape = local(&value.tensor.shape, &value.placement, sbp);
            longer.extend(domain(&shape, ranks).iter().map(|&next| [&sbp[..], &[next]].concat()));
        }
        all = longer;
    }
    all
}

/// Weights of equal layers, with what an optimizer has for them. Names that differ in numbers only
/// are those of equal layers.
fn weights(replay: &Replay) -> Vec<Group> {
    let trace = replay.trace;
    let mut groups = BTreeMap::<usize, Group>::new();
    let mut first = BTreeMap::<String, usize>::new();
    for (id, owner) in owners(replay) {
        let Value { tensor, name, .. } = &trace.values[owner];
        let layer: String = name.split(|c: char| c.is_ascii_digit()).collect();
        let key = if name.is_empty() { owner.to_string() } else { format!("{layer} {tensor:?}") };
        let place = *first.entry(key).or_insert(id);
        groups.entry(place).or_default().push(id);
    }
    groups.into_values().collect()
}

/// Returns the weight that a weight or an optimizer's state belongs to: the update takes them
/// together.
fn owners(replay: &Replay) -> BTreeMap<usize, usize> {
    let trace = replay.trace;
    let mut root: Vec<usize> = (0..trace.values.len()).collect();
    fn find(root: &[usize], mut id: usize) -> usize {
        while root[id] != id {
            id = root[id];
        }
        id
    }
    for call in &trace.calls[update(trace)..] {
        let values: Vec<usize> =
            call.inputs.iter().chain(&call.outputs).copied().flatten().collect();
        let Some(&first) = values.first() else { continue };
        for &other in &values[1..] {
            if trace.values[first].tensor.shape == trace.values[other].tensor.shape {
                let one = find(&root, first);
                let other = find(&root, other);
                root[one.max(other)] = one.min(other);
            }
        }
    }
    let mut weights = Vec::new();
    for (id, value) in trace.values.iter().enumerate() {
        if value.role == Role::Weight {
            weights.push(id);
        }
    }
    let mut owners = BTreeMap::new();
    for &id in &replay.kept {
        let owner = if weights.contains(&id) {
            Some(id)
        } else {
            weights.iter().copied().find(|&weight| find(&root, weight) == find(&root, id))
        };
        owners.extend(owner.map(|owner| (id, owner)));
    }
    owners
}

/// Returns where the update begins: after the last call of backward.
fn update(trace: &Trace) -> usize {
    let backward = trace.calls.iter().rposition(|call| call.phase == Phase::Backward);
    backward.map_or(trace.calls.len(), |last| last + 1)
}

/// Returns values that a program can pin, with `to_global` and `grad_sbp`: results of its own
/// operations, but not views of weights, and their gradients. Those of equal layers are a group.
fn pins(replay: &Replay) -> Vec<Group> {
    let trace = replay.trace;
    let gradients = trace.gradients();
    let mut is_data: Vec<bool> =
        trace.values.iter().map(|value| value.role == Role::Input).collect();
    let mut pins = Vec::new();
    for call in trace.calls[..update(trace)].iter().filter(|call| call.phase == Phase::Forward) {
        let mut inputs = call.inputs.iter().flatten();
        let is_of_weight = call.inputs.len() == 1 && !inputs.any(|&id| is_data[id]);
        if is_of_weight || call.in_place {
            continue;
        }
        for &id in call.outputs.iter().flatten() {
            is_data[id] = true;
            if trace.values[id].tensor.is_float() && !trace.values[id].tensor.shape.is_empty() {
                pins.push(id);
                pins.extend(gradients[id]);
            }
        }
    }
    let labels = labels(replay);
    let mut groups = BTreeMap::<usize, Group>::new();
    let mut first = BTreeMap::new();
    for (place, id) in pins.into_iter().enumerate() {
        let place = *first.entry(labels[id]).or_insert(place);
        let group = groups.entry(place).or_default();
        if !group.contains(&id) {
            group.push(id);
        }
    }
    groups.into_values().collect()
}

/// Numbers that are the same for values around which the trace looks the same.
fn labels(replay: &Replay) -> Vec<usize> {
    let trace = replay.trace;
    let mut labels = vec![0; trace.values.len()];
    for _ in 0..2 {
        let mut around = vec![Vec::new(); labels.len()];
        for (call, class) in trace.calls.iter().zip(&replay.classes) {
            let values: Vec<_> = call.inputs.iter().chain(&call.outputs).copied().collect();
            let seen: Vec<_> = values.iter().map(|id| id.map(|id| labels[id])).collect();
            for (place, id) in values.iter().enumerate() {
                if let Some(id) = *id {
                    around[id].push((class, place, seen.clone()));
                }
            }
        }
        let mut names = BTreeMap::new();
        for (label, around) in labels.iter_mut().zip(around) {
            let next = names.len();
            *label = *names.entry((*label, around)).or_insert(next);
        }
    }
    labels
}
