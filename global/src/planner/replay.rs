//! Runs a trace again, without tensors: what rules make of other SBPs, and what that costs.

use std::collections::HashMap;

use super::cost::{Cost, Prices, flops, local};
use crate::boxing::plan::TensorLayout;
use crate::placement::Placement;
use crate::rules::infer::infer;
use crate::rules::op::{Input, Op};
use crate::sbp::{B, NdSbp};
use crate::trace::{CallKind, Role, Trace, TracedCall, received};

/// The number of an SBP.
pub(super) type SbpCode = u16;

/// SBPs that are given: of each leaf, and of values that are boxed as soon as they are there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Assignment {
    /// By value; of results it does not count.
    pub leaves: Vec<SbpCode>,
    /// By value.
    pub pins: Vec<Option<SbpCode>>,
}

pub(super) struct Replay<'a> {
    pub trace: &'a Trace,
    pub prices: Prices,
    sbps: Vec<NdSbp>,
    codes: HashMap<NdSbp, SbpCode>,
    /// Calls that are alike have the same class.
    pub classes: Vec<usize>,
    /// By class and the SBPs of the inputs.
    outcomes: Vec<HashMap<Box<[SbpCode]>, Outcome>>,
    /// Values of the same shape, kind and placement have the same class.
    shapes: Vec<usize>,
    boxings: HashMap<(usize, SbpCode, SbpCode), f64>,
    /// Weights, and what an optimizer has for them.
    pub kept: Vec<usize>,
}

#[derive(Clone, Debug)]
struct Outcome {
    outputs: Vec<SbpCode>,
    cost: Cost,
}

impl<'a> Replay<'a> {
    /// Prepares to replay a trace.
    pub fn new(trace: &'a Trace, prices: Prices) -> Self {
        let mut names = HashMap::new();
        let mut classes = Vec::new();
        for call in &trace.calls {
            let asked = call.outputs.iter().flatten().map(|&id| &trace.values[id].sbp);
            let asked: Vec<_> = asked.filter(|_| call.kind == CallKind::ToGlobal).collect();
            let TracedCall { kind, name, overload, args, in_place, .. } = call;
            let inputs = shapes(trace, &call.inputs);
            let outputs = shapes(trace, &call.outputs);
            let key = (kind, name, overload, args, in_place, inputs, outputs, asked);
            classes.push(class(&mut names, format!("{key:?} {:?}", trace.placement(call))));
        }
        let outcomes = vec![HashMap::new(); names.len()];
        let shapes = trace
            .values
            .iter()
            .map(|value| class(&mut names, format!("{:?} {:?}", value.tensor, value.placement)))
            .collect();
        let written = trace.calls.iter().filter(|call| call.in_place);
        let mut kept: Vec<usize> = written.filter_map(|call| call.inputs[0]).collect();
        kept.extend((0..trace.values.len()).filter(|&id| trace.values[id].role == Role::Weight));
        kept.retain(|&id| trace.values[id].role != Role::Result);
        kept.sort_unstable();
        kept.dedup();
        let sbps = Vec::new();
        let codes = HashMap::new();
        let boxings = HashMap::new();
        Self { trace, prices, sbps, codes, classes, outcomes, shapes, boxings, kept }
    }

    /// Returns the number of an SBP, and numbers it if it is new.
    pub fn code(&mut self, sbp: &NdSbp) -> SbpCode {
        if let Some(&code) = self.codes.get(sbp) {
            return code;
        }
        let code = self.sbps.len() as SbpCode;
        self.sbps.push(sbp.clone());
        self.codes.insert(sbp.clone(), code);
        code
    }

    /// Returns the SBP that has this number.
    pub fn sbp(&self, code: SbpCode) -> &NdSbp {
        &self.sbps[code as usize]
    }

    /// Returns the assignment with which the step was traced.
    pub fn recorded(&mut self) -> Assignment {
        let trace = self.trace;
        let leaves = trace.values.iter().map(|value| self.code(&value.sbp)).collect();
        Assignment { leaves, pins: vec![None; trace.values.len()] }
    }

    /// Returns what a step costs with these SBPs and pins, as one number.
    pub fn total(&mut self, given: &Assignment) -> f64 {
        let prices = self.prices;
        self.run(given).total(&prices)
    }

    /// Returns what a step costs with these SBPs and pins.
    pub fn run(&mut self, given: &Assignment) -> Cost {
        self.run_into(given, &mut Vec::new())
    }

    /// Does as [`Replay::run`], and also says which SBP each value has.
    pub fn run_into(&mut self, given: &Assignment, current: &mut Vec<SbpCode>) -> Cost {
        let mut cost = Cost::default();
        current.clone_from(&given.leaves);
        let trace = self.trace;
        for (id, value) in trace.values.iter().enumerate() {
            if value.role != Role::Result {
                self.pin(given, id, current, &mut cost);
            }
        }
        for &id in &self.kept {
            let value = &trace.values[id];
            let sbp = &self.sbps[given.leaves[id] as usize];
            let shape = local(&value.tensor.shape, &value.placement, sbp);
            cost.memory += (shape.iter().product::<usize>() * value.tensor.bytes()) as f64;
        }
        let absent = self.code(&Vec::new());
        let mut have = Vec::new();
        for (index, call) in trace.calls.iter().enumerate() {
            have.clear();
            have.extend(call.inputs.iter().map(|id| id.map_or(absent, |id| current[id])));
            let class = self.classes[index];
            if !self.outcomes[class].contains_key(&have[..]) {
                let outcome = self.outcome(call, &have);
                self.outcomes[class].insert(have.clone().into(), outcome);
            }
            let outcome = &self.outcomes[class][&have[..]];
            cost += outcome.cost;
            if call.in_place {
                continue;
            }
            for (id, &code) in call.outputs.iter().zip(&outcome.outputs) {
                if let Some(id) = *id {
                    current[id] = code;
                }
            }
            for &id in call.outputs.iter().flatten() {
                self.pin(given, id, current, &mut cost);
            }
        }
        cost
    }

    fn pin(&mut self, given: &Assignment, id: usize, current: &mut [SbpCode], cost: &mut Cost) {
        if let Some(pin) = given.pins[id].filter(|&pin| pin != current[id]) {
            cost.bytes += self.boxing(id, current[id], pin);
            current[id] = pin;
        }
    }

    /// Returns bytes that a rank receives on average.
    fn boxing(&mut self, id: usize, from: SbpCode, to: SbpCode) -> f64 {
        if from == to {
            return 0.0;
        }
        let key = (self.shapes[id], from, to);
        if let Some(&bytes) = self.boxings.get(&key) {
            return bytes;
        }
        let value = &self.trace.values[id];
        let old = TensorLayout { placement: &value.placement, sbp: self.sbp(from) };
        let new = TensorLayout { placement: &value.placement, sbp: self.sbp(to) };
        let bytes = received(&value.tensor, old, new);
        self.boxings.insert(key, bytes);
        bytes
    }

    fn outcome(&mut self, call: &TracedCall, have: &[SbpCode]) -> Outcome {
        let values = &self.trace.values;
        let none = Outcome { outputs: Vec::new(), cost: Cost::default() };
        let Some(placement) = self.trace.placement(call) else { return none };
        if call.kind != CallKind::Operation {
            let to = match (call.kind, call.inputs[0], call.outputs[0]) {
                (CallKind::Gradient, ..) => have[1],
                (_, _, Some(output)) => self.code(&values[output].sbp),
                _ => return none,
            };
            let Some(input) = call.inputs[0] else { return none };
            let bytes = self.convert(input, have[0], placement, to);
            return Outcome { outputs: vec![to], cost: Cost { bytes, ..Cost::default() } };
        }
        let op = call.op(values);
        let broadcast = vec![B; placement.axes()];
        let had = call.inputs.iter().zip(have).map(|(id, &code)| match *id {
            Some(id) if values[id].placement == *placement => self.sbp(code).clone(),
            _ => broadcast.clone(),
        });
        let had: Vec<NdSbp> = had.collect();
        // As operations are carried out: what is written in place may be boxed, and boxed back.
        let choice = infer(&op, placement, &had)
            .or_else(|| infer(&Op { in_place: false, ..op.clone() }, placement, &had));
        let mut cost = Cost::default();
        let mut inputs = Vec::new();
        for (index, (id, &from)) in call.inputs.iter().zip(have).enumerate() {
            let Some(id) = *id else {
                inputs.push(Vec::new());
                continue;
            };
            let sbp = choice.as_ref().map_or(&broadcast, |choice| &choice.inputs[index]).clone();
            let to = self.code(&sbp);
            cost.bytes += self.convert(id, from, placement, to);
            if op.in_place && index == 0 {
                cost.bytes += self.convert(id, to, placement, from);
            }
            inputs.push(local(&values[id].tensor.shape, placement, &sbp));
        }
        let mut outputs = Vec::new();
        let mut shapes = Vec::new();
        for (index, id) in call.outputs.iter().enumerate() {
            let sbp = choice.as_ref().map_or(&broadcast, |choice| &choice.outputs[index]);
            let shape = id.map(|id| local(&values[id].tensor.shape, placement, sbp));
            shapes.extend(shape);
            outputs.push(self.code(&sbp.clone()));
        }
        cost.flops = flops(op.name, &inputs, &shapes);
        Outcome { outputs, cost }
    }

    /// As [`Replay::boxing`], to another placement if need be.
    fn convert(&mut self, id: usize, from: SbpCode, placement: &Placement, to: SbpCode) -> f64 {
        let value = &self.trace.values[id];
        if value.placement == *placement {
            return self.boxing(id, from, to);
        }
        let from = TensorLayout { placement: &value.placement, sbp: self.sbp(from) };
        received(&value.tensor, from, TensorLayout { placement, sbp: self.sbp(to) })
    }
}

/// Returns the class of a key, by the keys before.
fn class(known: &mut HashMap<String, usize>, key: String) -> usize {
    let next = known.len();
    *known.entry(key).or_insert(next)
}

fn shapes<'a>(trace: &'a Trace, ids: &[Option<usize>]) -> Vec<Option<&'a Input>> {
    ids.iter().map(|id| id.map(|id| &trace.values[id].tensor)).collect()
}
