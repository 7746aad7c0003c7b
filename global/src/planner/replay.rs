//! Runs a trace again, without tensors: what rules make of other SBPs, and what that costs.

use std::collections::HashMap;

use super::cost::{Cost, Costs, flops, local};
use crate::boxing::plan::Layout;
use crate::placement::Placement;
use crate::rules::infer::infer;
use crate::rules::op::{Input, Op};
use crate::sbp::{B, NdSbp};
use crate::trace::{Action, Call, Role, Trace, received};

/// The number of an SBP.
pub(super) type Code = u16;

/// SBPs that are given: of each leaf, and of values that are boxed as soon as they are there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Given {
    /// By value; of results it does not count.
    pub leaves: Vec<Code>,
    /// By value.
    pub pins: Vec<Option<Code>>,
}

pub(super) struct Replay<'a> {
    pub trace: &'a Trace,
    pub costs: Costs,
    sbps: Vec<NdSbp>,
    codes: HashMap<NdSbp, Code>,
    /// Calls that are alike have the same class.
    pub classes: Vec<usize>,
    /// By class and the SBPs of the inputs.
    outcomes: Vec<HashMap<Box<[Code]>, Outcome>>,
    /// Values of the same shape, kind and placement have the same class.
    shapes: Vec<usize>,
    boxings: HashMap<(usize, Code, Code), f64>,
    /// Weights, and what an optimizer has for them.
    pub kept: Vec<usize>,
}

#[derive(Clone, Debug)]
struct Outcome {
    outputs: Vec<Code>,
    cost: Cost,
}

impl<'a> Replay<'a> {
    pub fn new(trace: &'a Trace, costs: Costs) -> Self {
        let mut names = HashMap::new();
        let mut classes = Vec::new();
        for call in &trace.calls {
            let asked = call.outputs.iter().flatten().map(|&id| &trace.values[id].sbp);
            let asked: Vec<_> = asked.filter(|_| call.action == Action::ToGlobal).collect();
            let Call { action, name, overload, args, in_place, .. } = call;
            let inputs = shapes(trace, &call.inputs);
            let outputs = shapes(trace, &call.outputs);
            let key = (action, name, overload, args, in_place, inputs, outputs, asked);
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
        Self { trace, costs, sbps, codes, classes, outcomes, shapes, boxings, kept }
    }

    pub fn code(&mut self, sbp: &NdSbp) -> Code {
        if let Some(&code) = self.codes.get(sbp) {
            return code;
        }
        let code = self.sbps.len() as Code;
        self.sbps.push(sbp.clone());
        self.codes.insert(sbp.clone(), code);
        code
    }

    pub fn sbp(&self, code: Code) -> &NdSbp {
        &self.sbps[code as usize]
    }

    /// What the trace has.
    pub fn recorded(&mut self) -> Given {
        let trace = self.trace;
        let leaves = trace.values.iter().map(|value| self.code(&value.sbp)).collect();
        Given { leaves, pins: vec![None; trace.values.len()] }
    }

    pub fn total(&mut self, given: &Given) -> f64 {
        let costs = self.costs;
        self.run(given).total(&costs)
    }

    pub fn run(&mut self, given: &Given) -> Cost {
        self.run_into(given, &mut Vec::new())
    }

    /// Also says which SBP each value has.
    pub fn run_into(&mut self, given: &Given, current: &mut Vec<Code>) -> Cost {
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

    fn pin(&mut self, given: &Given, id: usize, current: &mut [Code], cost: &mut Cost) {
        if let Some(pin) = given.pins[id].filter(|&pin| pin != current[id]) {
            cost.bytes += self.boxing(id, current[id], pin);
            current[id] = pin;
        }
    }

    /// Returns bytes that a rank receives on average.
    fn boxing(&mut self, id: usize, from: Code, to: Code) -> f64 {
        if from == to {
            return 0.0;
        }
        let key = (self.shapes[id], from, to);
        if let Some(&bytes) = self.boxings.get(&key) {
            return bytes;
        }
        let value = &self.trace.values[id];
        let old = Layout { placement: &value.placement, sbp: self.sbp(from) };
        let new = Layout { placement: &value.placement, sbp: self.sbp(to) };
        let bytes = received(&value.tensor, old, new);
        self.boxings.insert(key, bytes);
        bytes
    }

    fn outcome(&mut self, call: &Call, have: &[Code]) -> Outcome {
        let values = &self.trace.values;
        let none = Outcome { outputs: Vec::new(), cost: Cost::default() };
        let Some(placement) = self.trace.placement(call) else { return none };
        if call.action != Action::Operation {
            let to = match (call.action, call.inputs[0], call.outputs[0]) {
                (Action::Gradient, ..) => have[1],
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
    fn convert(&mut self, id: usize, from: Code, placement: &Placement, to: Code) -> f64 {
        let value = &self.trace.values[id];
        if value.placement == *placement {
            return self.boxing(id, from, to);
        }
        let from = Layout { placement: &value.placement, sbp: self.sbp(from) };
        received(&value.tensor, from, Layout { placement, sbp: self.sbp(to) })
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
