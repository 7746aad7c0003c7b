//! Traces: the operations that ran on global tensors, and what each made of SBPs.
//!
//! A trace is data. What happened is added to it ([`Trace::leaf`], [`Trace::call`],
//! [`Trace::convert`]); [`mod@crate::explain`] and [`crate::planner`] read it.

use std::collections::HashMap;

use crate::boxing::plan::{BoxingPlan, TensorLayout};
use crate::placement::Placement;
use crate::rules::infer::Choice;
use crate::rules::op::{Arg, Input, Op};
use crate::sbp::{B, NdSbp, Sbp};

/// Operations on global tensors, in the order in which they ran.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    /// The tensors, by id.
    pub values: Vec<Value>,
    /// The operations.
    pub calls: Vec<TracedCall>,
}

/// A tensor. What is written in place stays the same tensor.
#[derive(Clone, Debug)]
pub struct Value {
    /// Logical shape, and kind.
    pub tensor: Input,
    /// Its ranks.
    pub placement: Placement,
    /// Its layout on them.
    pub sbp: NdSbp,
    /// The name of a weight or an input; empty if it has none.
    pub name: String,
    /// The origin of the tensor.
    pub role: Role,
}

/// The origin of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A leaf that is trained: the planner may choose its SBP.
    Weight,
    /// A tensor that was there before: data, or the state of an optimizer.
    Input,
    /// The result of a call.
    Result,
}

/// The phase in which a call runs: autograd runs it, or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Phase {
    /// No: the program does, also an optimizer's operations.
    Forward,
    /// Yes.
    Backward,
}

/// The kinds of calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CallKind {
    /// An operation of libtorch.
    Operation,
    /// Boxing that the program asks for.
    ToGlobal,
    /// Boxing of a gradient, the first input, to the SBP of its leaf, the second one.
    Gradient,
}

/// Something that ran on global tensors.
#[derive(Clone, Debug)]
pub struct TracedCall {
    /// Whether it is an operation, a conversion or a gradient.
    pub kind: CallKind,
    /// The name of the operation, [`Op::name`]; `to_global` and `gradient` of boxing.
    pub name: String,
    /// The overload, [`Op::overload`].
    pub overload: String,
    /// The arguments, [`Op::args`].
    pub args: Vec<TracedArgument>,
    /// Ids of values; None for an optional tensor that is not there.
    pub inputs: Vec<Option<usize>>,
    /// The SBP that each input was boxed to.
    pub boxed: Vec<NdSbp>,
    /// Ids of values; None for a result that is not there.
    pub outputs: Vec<Option<usize>>,
    /// Whether it writes its first tensor.
    pub in_place: bool,
    /// Whether an operation has a rule; without one, all its inputs are boxed to B.
    pub has_rule: bool,
    /// Whether autograd runs it.
    pub phase: Phase,
    /// Autograd's number of the node that this call makes (forward) or is part of (backward). It
    /// says which call of backward belongs to which of forward.
    pub node: Option<u64>,
}

/// An argument: [`Arg`], but it owns what it has.
#[derive(Clone, Debug, PartialEq)]
pub enum TracedArgument {
    /// Sizes, dimensions and the like.
    Ints(Vec<i64>),
    /// Anything else.
    Other(Arg<'static>),
}

/// Boxing that a call needed.
#[derive(Clone, Copy, Debug)]
pub struct TracedBoxing<'a> {
    /// The tensor.
    pub value: usize,
    /// The SBP that it had.
    pub from: &'a [Sbp],
    /// The SBP that the call needed.
    pub to: &'a [Sbp],
    /// Bytes that a rank receives from others, on average.
    pub bytes: f64,
}

impl From<&Arg<'_>> for TracedArgument {
    fn from(arg: &Arg) -> Self {
        Self::Other(match arg {
            Arg::Ints(values) => return Self::Ints(values.to_vec()),
            Arg::None => Arg::None,
            Arg::Tensor(index) => Arg::Tensor(*index),
            Arg::Tensors(range) => Arg::Tensors(range.clone()),
            Arg::Int(value) => Arg::Int(*value),
            Arg::Float(value) => Arg::Float(*value),
            Arg::Bool(value) => Arg::Bool(*value),
            Arg::Other => Arg::Other,
        })
    }
}

impl TracedArgument {
    /// Returns the argument as rules have it.
    pub(crate) fn borrow(&self) -> Arg<'_> {
        match self {
            Self::Ints(values) => Arg::Ints(values.into()),
            Self::Other(arg) => arg.clone(),
        }
    }
}

impl Trace {
    /// Adds a tensor that was there before; returns its id.
    pub fn leaf(
        &mut self,
        role: Role,
        name: &str,
        tensor: Input,
        placement: &Placement,
        sbp: &[Sbp],
    ) -> usize {
        let placement = placement.clone();
        self.add(Value { tensor, placement, sbp: sbp.to_vec(), name: name.to_string(), role })
    }

    fn add(&mut self, value: Value) -> usize {
        self.values.push(value);
        self.values.len() - 1
    }

    /// Adds an operation that ran: the ids of its inputs, what was chosen, and its results' shapes
    /// and kinds. The choice is None if the operation has no rule. A result is None if it is not
    /// there. Returns the results' ids.
    pub fn call(
        &mut self,
        op: &Op,
        placement: &Placement,
        inputs: &[Option<usize>],
        choice: Option<&Choice>,
        results: &[Option<Input>],
        (phase, node): (Phase, Option<u64>),
    ) -> Vec<Option<usize>> {
        let broadcast = vec![B; placement.axes()];
        let mut boxed = Vec::new();
        for index in 0..inputs.len() {
            let chosen = choice.and_then(|choice| choice.inputs.get(index));
            boxed.push(chosen.unwrap_or(&broadcast).clone());
        }
        let mut outputs = Vec::new();
        for (index, tensor) in results.iter().enumerate() {
            let written = inputs.first().filter(|_| op.in_place && index == 0);
            let chosen = choice.and_then(|choice| choice.outputs.get(index));
            outputs.push(match (written, tensor) {
                (Some(&written), _) => written,
                (None, None) => None,
                (None, Some(tensor)) => Some(self.add(Value {
                    tensor: tensor.clone(),
                    placement: placement.clone(),
                    sbp: chosen.unwrap_or(&broadcast).clone(),
                    name: String::new(),
                    role: Role::Result,
                })),
            });
        }
        self.calls.push(TracedCall {
            kind: CallKind::Operation,
            name: op.name.to_string(),
            overload: op.overload.to_string(),
            args: op.args.iter().map(TracedArgument::from).collect(),
            inputs: inputs.to_vec(),
            boxed,
            outputs: outputs.clone(),
            in_place: op.in_place,
            has_rule: choice.is_some(),
            phase,
            node,
        });
        outputs
    }

    /// Adds boxing that the program asked for, to this placement and SBP; returns the result's id.
    pub fn convert(
        &mut self,
        input: usize,
        placement: &Placement,
        sbp: &[Sbp],
        (phase, node): (Phase, Option<u64>),
    ) -> usize {
        self.boxing(CallKind::ToGlobal, &[input], placement, sbp, (phase, node))
    }

    /// Adds that a gradient was boxed to the SBP of its leaf; returns the id of what the leaf gets.
    pub fn gradient(&mut self, gradient: usize, leaf: usize) -> usize {
        let Value { placement, sbp, .. } = self.values[leaf].clone();
        let phase = (Phase::Backward, None);
        self.boxing(CallKind::Gradient, &[gradient, leaf], &placement, &sbp, phase)
    }

    fn boxing(
        &mut self,
        kind: CallKind,
        inputs: &[usize],
        placement: &Placement,
        sbp: &[Sbp],
        (phase, node): (Phase, Option<u64>),
    ) -> usize {
        let tensor = self.values[inputs[0]].tensor.clone();
        let placement = placement.clone();
        let role = Role::Result;
        let result =
            self.add(Value { tensor, placement, sbp: sbp.to_vec(), name: String::new(), role });
        self.calls.push(TracedCall {
            kind,
            name: if kind == CallKind::Gradient { "gradient" } else { "to_global" }.to_string(),
            overload: String::new(),
            args: Vec::new(),
            inputs: inputs.iter().map(|&input| Some(input)).collect(),
            boxed: vec![sbp.to_vec(); inputs.len()],
            outputs: vec![Some(result)],
            in_place: false,
            has_rule: true,
            phase,
            node,
        });
        result
    }

    /// Returns the tensors that were boxed for a call; those that it writes are boxed back.
    pub fn boxings<'a>(&'a self, call: &'a TracedCall) -> impl Iterator<Item = TracedBoxing<'a>> {
        let to_placement = self.placement(call);
        call.inputs.iter().zip(&call.boxed).enumerate().filter_map(move |(index, (input, to))| {
            let value = (*input)?;
            let Value { tensor, placement, sbp: from, .. } = &self.values[value];
            if from == to && Some(placement) == to_placement {
                return None;
            }
            let old = TensorLayout { placement, sbp: from };
            let new = TensorLayout { placement: to_placement?, sbp: to };
            let is_written = call.in_place && index == 0;
            let back = if is_written { received(tensor, new, old) } else { 0.0 };
            let bytes = received(tensor, old, new) + back;
            Some(TracedBoxing { value, from, to, bytes })
        })
    }

    /// Returns the placement of what a call returns, else of what it gets.
    pub fn placement(&self, call: &TracedCall) -> Option<&Placement> {
        let value = call.outputs.iter().chain(&call.inputs).copied().flatten().next()?;
        Some(&self.values[value].placement)
    }

    /// Returns the same operations on another placement. Inputs and weights get the SBPs that `sbp`
    /// gives; what operations do then is not asked here, so that results are B. Boxing that the
    /// program asks for gives what `sbp` gives for its result.
    pub fn on(&self, placement: &Placement, sbp: impl Fn(&Value) -> NdSbp) -> Self {
        let mut trace = self.clone();
        let broadcast = vec![B; placement.axes()];
        let converted = self.calls.iter().filter(|call| call.kind == CallKind::ToGlobal);
        let converted: Vec<_> = converted.filter_map(|call| call.outputs[0]).collect();
        for (id, value) in trace.values.iter_mut().enumerate() {
            let is_given = value.role != Role::Result || converted.contains(&id);
            value.sbp = if is_given { sbp(value) } else { broadcast.clone() };
            value.placement = placement.clone();
        }
        for call in &mut trace.calls {
            call.boxed.fill(broadcast.clone());
        }
        trace
    }

    /// Describes a tensor in words: its name, or the operation that made it, of what, and its
    /// shape.
    pub fn describe(&self, value: usize) -> String {
        let shape = &self.values[value].tensor.shape;
        format!("{} {shape:?}", self.source(value, 4))
    }

    fn source(&self, value: usize, depth: usize) -> String {
        let name = &self.values[value].name;
        if !name.is_empty() {
            return name.clone();
        }
        let mut calls = self.calls.iter().filter(|call| !call.in_place);
        let Some(call) = calls.find(|call| call.outputs.contains(&Some(value))) else {
            return "a tensor".to_string();
        };
        let inputs: Vec<_> = call.inputs.iter().flatten().collect();
        let weights = inputs.iter().filter_map(|&&input| self.weight(input));
        match (weights.collect::<Vec<_>>().join(", "), &inputs[..]) {
            (weights, _) if !weights.is_empty() => format!("{} of {weights}", call.name),
            (_, &[&input]) if depth > 0 => {
                format!("{} of {}", call.name, self.source(input, depth - 1))
            }
            _ => call.name.clone(),
        }
    }

    /// Returns the name of the weight that a tensor is a view of.
    fn weight(&self, value: usize) -> Option<&str> {
        let Value { name, role, .. } = &self.values[value];
        if *role != Role::Result {
            return Some(&name[..]).filter(|_| *role == Role::Weight);
        }
        let call = self.calls.iter().find(|call| call.outputs.contains(&Some(value)))?;
        match call.inputs[..] {
            [Some(input)] if input < value => self.weight(input),
            _ => None,
        }
    }

    /// Returns the gradient of each value, where the trace shows it: what enters the backward of
    /// the call that made the value.
    pub fn gradients(&self) -> Vec<Option<usize>> {
        let mut maker: Vec<Option<&TracedCall>> = vec![None; self.values.len()];
        let mut backward = HashMap::<u64, Vec<&TracedCall>>::new();
        for call in &self.calls {
            if call.phase == Phase::Backward
                && let Some(node) = call.node
            {
                backward.entry(node).or_default().push(call);
            }
            for &output in call.outputs.iter().flatten().filter(|_| !call.in_place) {
                maker[output] = Some(call);
            }
        }
        let mut gradients = vec![None; self.values.len()];
        for (id, value) in self.values.iter().enumerate() {
            let Some(made) = maker[id].filter(|call| call.phase == Phase::Forward) else {
                continue;
            };
            let Some(calls) = made.node.and_then(|node| backward.get(&node)) else { continue };
            let mut inputs = calls.iter().flat_map(|call| call.inputs.iter().flatten()).copied();
            gradients[id] = inputs.find(|&input| {
                let comes_from = maker[input].filter(|call| call.phase == Phase::Backward);
                comes_from.is_some_and(|call| call.node != made.node)
                    && self.values[input].tensor.shape == value.tensor.shape
            });
        }
        gradients
    }
}

impl TracedCall {
    /// Returns the operation, as rules see it.
    pub fn op(&self, values: &[Value]) -> Op<'_> {
        let args = self.args.iter().map(TracedArgument::borrow).collect();
        let inputs = self
            .inputs
            .iter()
            .map(|input| input.map_or_else(Input::absent, |id| values[id].tensor.clone()))
            .collect();
        Op::new(&self.name, &self.overload, args, inputs, self.outputs.len(), self.in_place)
    }
}

/// Returns the bytes that a rank of the new layout receives from others, on average.
pub fn received(tensor: &Input, from: TensorLayout, to: TensorLayout) -> f64 {
    let elements = BoxingPlan::new(&tensor.shape, from, to).received();
    (elements * tensor.bytes()) as f64 / to.placement.ranks().len() as f64
}
