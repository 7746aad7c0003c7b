//! An operation on its way, whose code boxes what it needs and returns locals.

use std::sync::Arc;

use flow_autograd::global::{Argument, Call, Scalar};
use flow_comm::ReduceOp;
use tch::Tensor;

use crate::boxing::execute::Boxing;
use crate::boxing::plan::TensorLayout;
use crate::error::{Error, Result};
use crate::handle::{local_of, wrap};
use crate::placement::Placement;
use crate::region::{Region, regions, shape};
use crate::rules::infer::Choice;
use crate::runtime::Runtime;
use crate::sbp::{B, NdSbp, P, Sbp};
use crate::spec::Spec;

/// Carries out an operation on a rank of the placement.
pub type Code = fn(&mut Context<'_, '_>) -> Result<()>;

/// An operation on its way, on a rank of the placement.
pub struct Context<'a, 'c> {
    /// The operation.
    pub call: &'a mut Call<'c, Spec>,
    /// The decision of its rule.
    pub choice: &'a Choice,
    /// Lists that are sizes of this rank's local: the argument, and its value.
    pub ints: &'a [(usize, Vec<i64>)],
    /// The placement of all its tensors.
    pub placement: &'a Placement,
    /// The position of this rank in the placement.
    pub position: usize,
}

impl Context<'_, '_> {
    /// Returns the runtime, which the tensors of the job share.
    pub fn runtime(&self) -> Result<&Arc<Runtime>> {
        self.placement.runtime()
    }

    /// Returns a tensor's local, as the signature wants it.
    pub fn local(&self, tensor: usize) -> Result<Tensor> {
        self.optional(tensor)?.ok_or_else(|| self.fail(&format!("tensor {tensor} is undefined")))
    }

    /// Returns the same; None if the tensor is undefined.
    pub fn optional(&self, tensor: usize) -> Result<Option<Tensor>> {
        let Some(given) = self.call.tensor(tensor) else { return Ok(None) };
        let to = self.choice.inputs[tensor].clone();
        let (local, from) = match self.call.spec(tensor) {
            Some(spec) => {
                let local = local_of(&given);
                (local.unwrap_or(given), spec.sbp().to_vec())
            }
            None => (given, vec![B; self.placement.axes()]),
        };
        Ok(Some(self.boxed(&local, &self.shape(tensor), &from, &to)?))
    }

    /// Writes an input: `value` has the SBP that the signature wants of it.
    pub fn overwrite(&self, tensor: usize, value: &Tensor) -> Result<()> {
        let Some(given) = self.call.tensor(tensor) else { return Ok(()) };
        let (mut own, sbp) = match self.call.spec(tensor) {
            Some(spec) => {
                let local = local_of(&given);
                (local.unwrap_or(given), spec.sbp().to_vec())
            }
            None => (given, vec![B; self.placement.axes()]),
        };
        let wanted = &self.choice.inputs[tensor];
        own.f_copy_(&self.boxed(value, &self.shape(tensor), wanted, &sbp)?)?;
        Ok(())
    }

    /// Boxes this rank's local of a tensor of this shape from one SBP to another.
    pub fn boxed(
        &self,
        local: &Tensor,
        shape: &[usize],
        from: &[Sbp],
        to: &[Sbp],
    ) -> Result<Tensor> {
        if from == to {
            return Ok(local.shallow_clone());
        }
        let placement = self.placement;
        let from = TensorLayout { placement, sbp: from };
        let to = TensorLayout { placement, sbp: to };
        let runtime = self.runtime()?;
        let options = (local.kind(), local.device());
        let boxed =
            Boxing::between(runtime, shape, from, to).run(&runtime.groups, options, Some(local))?;
        boxed.ok_or_else(|| self.fail("this rank is not in the placement"))
    }

    /// Reduces terms of the first result, a tensor of this shape, on the axes where the signature makes B
    /// of a first input that is not.
    pub fn reduced(&self, terms: &Tensor, shape: &[usize], by: ReduceOp) -> Result<Tensor> {
        let to = &self.choice.outputs[0];
        let mut from = to.clone();
        for (from, &input) in from.iter_mut().zip(&self.choice.inputs[0]) {
            if *from == B && input != B {
                *from = Sbp::Partial(by);
            }
        }
        self.boxed(terms, shape, &from, to)
    }

    /// Adds up, on all ranks, values that are partial on the axes where an SBP is a split.
    pub fn summed(&self, local: &Tensor, split: &[Sbp]) -> Result<Tensor> {
        let shape = shape(&local.size());
        let from: NdSbp = split.iter().map(|sbp| if sbp.dim().is_some() { P } else { B }).collect();
        self.boxed(local, &shape, &from, &vec![B; split.len()])
    }

    /// Returns the logical shape of a tensor.
    pub fn shape(&self, tensor: usize) -> Vec<usize> {
        shape(self.call.sizes(tensor))
    }

    /// Returns the part of a tensor that this rank has, as the signature wants it.
    pub fn region(&self, tensor: usize) -> Region {
        let all = regions(self.placement, &self.choice.inputs[tensor], &self.shape(tensor));
        all.into_iter().nth(self.position).unwrap_or_else(|| Region::all(&[]))
    }

    /// Returns an argument; None beyond the last.
    pub fn argument(&self, index: usize) -> Argument<'_> {
        self.call.arguments().get(index).copied().unwrap_or(Argument::Other)
    }

    /// Returns a number that is an argument.
    pub fn number(&self, index: usize) -> Option<f64> {
        match self.argument(index) {
            Argument::Int(value) => Some(value as f64),
            Argument::Float(value) => Some(value),
            _ => None,
        }
    }

    /// Returns a whole number that is an argument.
    pub fn int(&self, index: usize) -> Option<i64> {
        match self.argument(index) {
            Argument::Int(value) => Some(value),
            _ => None,
        }
    }

    /// Returns whether an argument is true.
    pub fn flag(&self, index: usize) -> bool {
        self.argument(index) == Argument::Bool(true)
    }

    /// Returns a list that is an argument; empty if there is none.
    pub fn ints(&self, index: usize) -> Vec<i64> {
        match self.argument(index) {
            Argument::Ints(values) => values.to_vec(),
            _ => Vec::new(),
        }
    }

    /// Returns a local as part of a tensor of this shape, with the SBP that the signature says for
    /// this return.
    pub fn give(&mut self, index: usize, local: &Tensor, shape: &[usize]) -> Result<()> {
        let sbp = self.choice.outputs[index].clone();
        self.give_as(local, shape, &sbp)
    }

    /// Returns a local as part of a tensor of this shape, with this SBP.
    pub fn give_as(&mut self, local: &Tensor, shape: &[usize], sbp: &[Sbp]) -> Result<()> {
        let sizes: Vec<i64> = shape.iter().map(|&size| size as i64).collect();
        let spec = Spec::of(self.placement, sbp)?;
        let tensor = wrap(Some(local), local, spec, &sizes)?;
        Ok(self.call.output_tensor(Some(&tensor))?)
    }

    /// Returns the argument that the operation writes.
    pub fn give_written(&mut self, index: usize) -> Result<()> {
        Ok(self.call.output_written(index)?)
    }

    /// Returns a number to the caller.
    pub fn give_scalar(&mut self, scalar: Scalar) -> Result<()> {
        Ok(self.call.output_scalar(scalar)?)
    }

    /// Makes the error of this operation, with a reason.
    pub fn fail(&self, reason: &str) -> Error {
        Error::Unsupported { operation: self.call.name.to_owned(), reason: reason.to_owned() }
    }
}
