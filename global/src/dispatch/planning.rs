//! Decides what an operation needs, on tensors of given sizes and specs.

use std::collections::BTreeMap;
use std::sync::Arc;

use flow_autograd::global::{Argument, Call};
use tch::Kind;

use super::agreed;
use super::logical::LogicalResults;
use super::op::{Written, op_of};
use super::plan::{ExecutionPlan, InputSource, OutputLayout};
use crate::boxing::execute::Boxing;
use crate::boxing::plan::TensorLayout;
use crate::code::{self, Code};
use crate::compare;
use crate::error::{Error, Result};
use crate::placement::Placement;
use crate::policy;
use crate::region::{regions, shape};
use crate::rules::infer::{Choice, infer};
use crate::rules::op::Op;
use crate::rules::{reads_without_gaps, rule, sizes};
use crate::runtime::Runtime;
use crate::sbp::{B, NdSbp, Sbp};
use crate::spec::Spec;

/// Operations that would change the sizes of a tensor, or its memory.
const RESIZES: &[&str] = &["aten::resize_", "aten::resize_as_", "aten::set_"];

/// A call that is being planned.
struct Planning<'a, 'c> {
    call: &'a Call<'c, Spec>,
    placement: &'a Placement,
    runtime: &'a Runtime,
    arguments: Vec<Argument<'a>>,
    written: Written,
    op: Op<'a>,
    /// The SBPs of all tensors; plain ones count as B.
    have: Vec<NdSbp>,
    logical: LogicalResults,
}

/// Plans a call for the tensors that it has.
///
/// # Errors
/// The operation cannot be carried out on global tensors.
pub fn plan(
    call: &Call<'_, Spec>,
    placement: &Placement,
    runtime: &Runtime,
) -> Result<ExecutionPlan> {
    let arguments = call.arguments();
    let written = Written::of(call, &arguments);
    refuse(call, &written)?;
    let op = op_of(call, written.rule_name(call), &arguments, &written);
    sizes::check(&op)
        .map_err(|reason| Error::Unsupported { operation: call.name.to_owned(), reason })?;
    let tensors = 0..call.tensors();
    let have: Vec<NdSbp> = tensors.map(|tensor| sbp_of(call, tensor, placement)).collect();
    let logical = LogicalResults::of(call, &have)?;
    let planning = Planning { call, placement, runtime, arguments, written, op, have, logical };
    planning.plan()
}

/// Fails for what cannot be done in place.
fn refuse(call: &Call<'_, Spec>, written: &Written) -> Result<()> {
    let reason = if written.tensors.iter().any(|&tensor| call.is_detached_view(tensor)) {
        "it would write a view of a global tensor that had to be boxed, and so does not share the \
         tensor's memory: write to the tensor itself, or split it along another dimension"
    } else if RESIZES.contains(&call.name) {
        "the sizes of a global tensor cannot be changed in place: make a new tensor (narrow, \
         reshape, zeros), and give it to all who hold the old one by set_data"
    } else {
        return Ok(());
    };
    Err(Error::Unsupported { operation: call.name.to_owned(), reason: reason.to_owned() })
}

fn sbp_of(call: &Call<'_, Spec>, tensor: usize, placement: &Placement) -> NdSbp {
    match call.spec(tensor) {
        Some(spec) => spec.sbp().to_vec(),
        None => vec![B; placement.axes()],
    }
}

impl Planning<'_, '_> {
    fn plan(&self) -> Result<ExecutionPlan> {
        let call = self.call;
        let ruled = self.ruled();
        let has_rule = ruled.is_some();
        let choice = match ruled {
            Some(choice) => choice,
            None => self.gathered()?,
        };
        let mut plan = ExecutionPlan {
            name: unqualified(call.name).to_owned(),
            inputs: Vec::new(),
            ints: ints(&self.op, &choice, self.placement, self.runtime.rank()),
            outputs: Vec::new(),
            write_backs: Vec::new(),
            outs: Vec::new(),
            plain_written: Vec::new(),
            backs: BTreeMap::new(),
            is_drawn_apart: !has_rule && call.is_random && self.placement.ranks().len() > 1,
            is_sent: !self.is_everywhere() && self.is_dynamic(has_rule),
            code: self.code(&choice)?,
            needs_shapes_only: code::always(self.op.name).is_some(),
            outside: Default::default(),
            operation: None,
            choice,
        };
        self.add_inputs(&mut plan)?;
        self.add_outputs(&mut plan)?;
        self.add_outs(&mut plan)?;
        if compare::is_on() || !self.is_harmless(&plan) {
            let operation = agreed::operation(call, &self.op, &self.have, self.placement);
            plan.operation = Some(operation);
        }
        if !self.is_everywhere() {
            let mut plain = self.written.tensors.clone();
            plain.retain(|&tensor| call.spec(tensor).is_none());
            plan.plain_written = plain;
        }
        Ok(plan)
    }

    /// Returns whether the placement has all ranks of the job.
    fn is_everywhere(&self) -> bool {
        self.placement.ranks().len() == self.runtime.world().world_size()
    }

    /// Asks the rule; None if there is none, or none that can be carried out.
    fn ruled(&self) -> Option<Choice> {
        let given = &self.have[..self.op.inputs.len()];
        let choice = infer(&self.op, self.placement, given).or_else(|| {
            // What is written fits no signature: another layout is written, and that boxed back.
            infer(&Op { boxes_written: true, ..self.op.clone() }, self.placement, given)
        })?;
        // Code gives its results, and writes no `out`.
        (!choice.has_code || self.written.outs.is_empty()).then_some(choice)
    }

    /// Returns all tensors B: what every operation can run on.
    fn gathered(&self) -> Result<Choice> {
        if rule(self.op.name).is_none() {
            policy::gathered(unqualified(self.call.name))?;
        }
        Ok(Choice::all_broadcast(&self.op, self.placement))
    }

    /// Returns whether the shapes of results depend on values.
    fn is_dynamic(&self, has_rule: bool) -> bool {
        let call = self.call;
        match unqualified(call.name) {
            // Numbers as indices say how many elements there will be, masks do not.
            "index" | "index_put" | "index_put_" | "_index_put_impl_" => (1..call.tensors())
                .any(|tensor| matches!(call.kind(tensor), Some(Kind::Bool | Kind::Uint8))),
            _ => call.is_dynamic && !has_rule,
        }
    }

    fn code(&self, choice: &Choice) -> Result<Option<Code>> {
        if !choice.has_code {
            return Ok(code::always(self.op.name));
        }
        let code = code::of(self.op.name).ok_or_else(|| Error::Unsupported {
            operation: self.call.name.to_owned(),
            reason: "its rule has no code".to_owned(),
        })?;
        Ok(Some(code))
    }

    /// Returns the boxing of a tensor.
    ///
    /// # Errors
    /// The tensor's kind cannot be boxed so: an error of all ranks, of those outside the placement too.
    fn boxing(&self, tensor: usize, from: &[Sbp], to: &[Sbp]) -> Result<Arc<Boxing>> {
        let call = self.call;
        let placement = self.placement;
        let shape = shape(call.sizes(tensor));
        let [before, after] = [from, to].map(|sbp| TensorLayout { placement, sbp });
        let boxing = Boxing::between(self.runtime, &shape, before, after);
        if let Some(kind) = call.kind(tensor) {
            let checked = boxing.check_kind(kind);
            checked.map_err(|error| agreed::unboxed(call, tensor, from, to, error))?;
        }
        Ok(boxing)
    }

    /// Decides the source of each input.
    fn add_inputs(&self, plan: &mut ExecutionPlan) -> Result<()> {
        let reshapes = self.call.reshapes;
        for tensor in 0..self.op.inputs.len() {
            let from = &self.have[tensor];
            let to = plan.choice.inputs[tensor].clone();
            let is_written = self.written.tensors.contains(&tensor);
            let is_defined = self.call.is_defined(tensor);
            if !is_defined || lies_alike(self.placement, from, &to) {
                let needs_handle = reshapes && is_written && is_defined;
                let source = if needs_handle { InputSource::Handle } else { InputSource::Own };
                plan.inputs.push(source);
                continue;
            }
            if is_written && !reshapes {
                plan.write_backs.push((tensor, None));
                plan.backs.insert(tensor, self.boxing(tensor, &to, from)?);
            }
            plan.inputs.push(InputSource::Boxed {
                boxing: self.boxing(tensor, from, &to)?,
                from: from.clone(),
                to,
                is_written,
                is_contiguous: reads_without_gaps(self.op.name),
            });
        }
        Ok(())
    }

    /// Decides the layouts of the results.
    fn add_outputs(&self, plan: &mut ExecutionPlan) -> Result<()> {
        let call = self.call;
        let is_boxed = plan.inputs.iter().any(|input| matches!(input, InputSource::Boxed { .. }));
        let is_detached = (0..call.tensors()).any(|tensor| call.is_detached_view(tensor));
        let is_detached_view = call.is_view && (is_boxed || is_detached);
        let strides = if call.is_view { self.logical.strides() } else { Vec::new() };
        for index in 0..call.returns {
            let sbp = plan.choice.outputs[index].clone();
            let (split_dims, split_sizes) = splits(&self.op, &plan.choice, &sbp);
            let spec = Spec::of(self.placement, &sbp)?;
            let output = OutputLayout {
                spec: (Arc::downgrade(&spec), spec.id()),
                split_dims,
                split_sizes,
                strides: strides.clone(),
                shares: sbp.iter().all(|&sbp| sbp == B),
                is_detached_view,
                is_written: call.written(index).is_some(),
                sbp,
            };
            self.logical.check(call, index, &output)?;
            plan.outputs.push(output);
        }
        Ok(())
    }

    /// Decides what `out` tensors get: the result itself if it has their layout, else boxed.
    fn add_outs(&self, plan: &mut ExecutionPlan) -> Result<()> {
        for (index, &argument) in self.written.outs.iter().enumerate() {
            let Argument::Tensor(tensor) = self.arguments[argument] else { continue };
            plan.outs.push((tensor, index));
            let own = &self.have[tensor];
            let gets = plan.choice.outputs[index].clone();
            if lies_alike(self.placement, own, &gets) && self.call.spec(tensor).is_some() {
                plan.inputs.push(InputSource::Own);
            } else {
                plan.inputs.push(InputSource::Empty);
                plan.write_backs.push((tensor, Some(index)));
                plan.backs.insert(tensor, self.boxing(tensor, &gets, own)?);
            }
            plan.choice.inputs.push(gets);
        }
        Ok(())
    }

    /// Returns whether a rank may run the operation alone. It then needs nothing of others and
    /// writes nothing. Its results are the same on all ranks, or those of its input. So each rank
    /// may print what is B, and autograd may copy a gradient on some ranks.
    fn is_harmless(&self, plan: &ExecutionPlan) -> bool {
        let is_alone = plan.code.is_none()
            && !plan.is_sent
            && !self.call.is_random
            && plan.inputs.iter().all(|input| matches!(input, InputSource::Own))
            && self.written.tensors.is_empty();
        let is_same = self.call.is_view || matches!(plan.name.as_str(), "clone" | "detach");
        let mut all = self.have.iter().chain(&plan.choice.outputs).flatten();
        is_alone && (is_same || all.all(|&sbp| sbp == B))
    }
}

/// Returns whether each rank has the same of a tensor with these two SBPs: an axis of one rank has
/// all.
fn lies_alike(placement: &Placement, one: &[Sbp], other: &[Sbp]) -> bool {
    let mut axes = one.iter().zip(other).zip(placement.shape());
    axes.all(|((one, other), &extent)| one == other || extent == 1)
}

/// Returns an operation's name without `aten::`.
fn unqualified(name: &str) -> &str {
    name.strip_prefix("aten::").unwrap_or(name)
}

/// Lists that are the shape of a tensor: the argument, and the sizes of this rank's part.
fn ints(
    op: &Op<'_>,
    choice: &Choice,
    placement: &Placement,
    rank: usize,
) -> Vec<(usize, Vec<i64>)> {
    // A rank outside finds out what the first one has.
    let position = placement.position(rank).unwrap_or(0);
    let mut all = Vec::new();
    for (argument, sbp) in &choice.shapes {
        let mut sizes = op.ints(*argument).to_vec();
        let logical = known_sizes(op, *argument);
        let local = regions(placement, sbp, &logical).swap_remove(position).shape();
        for (size, local) in sizes.iter_mut().zip(local) {
            if *size != -1 || op.name != "expand" {
                *size = local as i64;
            }
        }
        all.push((*argument, sizes));
    }
    all
}

/// Returns the sizes that a list asks for; -1 is what is left of the first input.
fn known_sizes(op: &Op<'_>, argument: usize) -> Vec<usize> {
    let asked = op.ints(argument);
    let elements: usize = op.inputs[0].shape.iter().product();
    let known: usize = asked.iter().filter_map(|&size| usize::try_from(size).ok()).product();
    let left = elements.checked_div(known).unwrap_or(0);
    asked.iter().map(|&size| usize::try_from(size).unwrap_or(left)).collect()
}

/// Returns the dimensions of a result that are split, and their logical sizes. An argument says
/// them, or they are those of the first input that is split on the same axis.
fn splits(op: &Op<'_>, choice: &Choice, sbp: &[Sbp]) -> (Vec<i32>, Vec<i64>) {
    let mut splits = BTreeMap::new();
    for (axis, sbp) in sbp.iter().enumerate() {
        let Some(dim) = sbp.dim() else { continue };
        let size = named_size(op, choice, axis, dim).or_else(|| input_size(op, choice, axis));
        if let Some(size) = size {
            splits.insert(dim as i32, size as i64);
        }
    }
    splits.into_iter().unzip()
}

/// Returns the size that an argument gives the dimension which is split on an axis.
fn named_size(op: &Op<'_>, choice: &Choice, axis: usize, dim: usize) -> Option<usize> {
    let (argument, _) = choice.shapes.iter().find(|(_, sbps)| sbps[axis] == Sbp::Split(dim))?;
    known_sizes(op, *argument).get(dim).copied()
}

/// Returns the size of the dimension that is split on an axis, of the first input that is split
/// there.
fn input_size(op: &Op<'_>, choice: &Choice, axis: usize) -> Option<usize> {
    let mut inputs = op.inputs.iter().zip(&choice.inputs).filter(|(input, _)| input.is_defined());
    inputs.find_map(|(input, sbp)| Some(input.shape[sbp[axis].dim()?]))
}
