//! Operations that are more than the same operation on the locals.
//!
//! | file | subject |
//! |---|---|
//! | `reductions` | means and norms over split dimensions |
//! | `losses` | means over split samples |
//! | `indexing` | embeddings of a split vocabulary |
//! | `normalization` | batch norm over a split batch |
//! | `random` | random numbers by logical element |
//! | `checks` | comparisons of shapes, which need no elements |

mod checks;
mod indexing;
mod losses;
mod normalization;
mod random;
mod reductions;

use flow_autograd::global::{Argument, Call, Scalar};
use tch::Tensor;

pub use random::draws;
pub use reductions::{kind_of, number_of};

use crate::boxing::plan::Layout;
use crate::dispatch::{shape, Plan};
use crate::error::{Error, Result};
use crate::placement::Placement;
use crate::region::{regions, Region};
use crate::runtime::Runtime;
use crate::sbp::{NdSbp, Sbp, B, P};
use crate::spec::Spec;
use crate::tensor::wrap;

/// Carries out an operation on a rank of the placement.
pub type Code = fn(&mut Context<'_, '_>) -> Result<()>;

/// The code of an operation whose signature asks for it; its name is without the `_` of in-place ones.
pub fn of(name: &str) -> Option<Code> {
    Some(match name {
        "mean" => reductions::mean,
        "linalg_vector_norm" => reductions::norm,
        "mse_loss" => losses::mse_loss,
        "mse_loss_backward" => losses::mse_loss_backward,
        "nll_loss_forward" | "nll_loss2d_forward" => losses::nll_loss,
        "embedding" => indexing::embedding,
        "native_batch_norm" | "_native_batch_norm_legit" => normalization::batch_norm,
        "native_batch_norm_backward" => normalization::batch_norm_backward,
        "bernoulli" | "cauchy" | "exponential" | "geometric" | "log_normal" | "native_dropout"
        | "normal" | "rand_like" | "randint_like" | "randn_like" | "random" | "uniform" => {
            random::draw
        }
        "new_empty_strided" => random::new_empty_strided,
        _ => return None,
    })
}

/// The code of an operation that never runs on the locals.
pub fn always(name: &str) -> Option<Code> {
    (name == "is_same_size").then_some(checks::is_same_size as Code)
}

/// An operation on its way, on a rank of the placement.
pub struct Context<'a, 'c> {
    /// The operation.
    pub call: &'a mut Call<'c, Spec>,
    /// What its rule has decided.
    pub plan: &'a Plan,
    /// Of all its tensors.
    pub placement: &'a Placement,
    /// Of this rank in the placement.
    pub position: usize,
}

impl Context<'_, '_> {
    fn runtime(&self) -> Result<&std::sync::Arc<Runtime>> {
        self.placement.runtime()
    }

    /// A tensor's local, as the signature wants it.
    fn local(&self, tensor: usize) -> Result<Tensor> {
        self.optional(tensor)?.ok_or_else(|| self.fail(&format!("tensor {tensor} is undefined")))
    }

    /// The same; None if it is undefined.
    fn optional(&self, tensor: usize) -> Result<Option<Tensor>> {
        let Some(given) = self.call.tensor(tensor) else { return Ok(None) };
        let to = self.plan.wanted[tensor].clone();
        let (local, from) = match self.call.spec(tensor) {
            Some(spec) => {
                let local = self.runtime()?.globals.local(&given);
                (local.unwrap_or(given), spec.sbp().to_vec())
            }
            None => (given, vec![B; self.placement.axes()]),
        };
        Ok(Some(self.boxed(&local, &self.shape(tensor), &from, &to)?))
    }

    /// Writes an input: `value` lies as the signature wants the input.
    fn overwrite(&self, tensor: usize, value: &Tensor) -> Result<()> {
        let Some(given) = self.call.tensor(tensor) else { return Ok(()) };
        let (mut own, sbp) = match self.call.spec(tensor) {
            Some(spec) => {
                let local = self.runtime()?.globals.local(&given);
                (local.unwrap_or(given), spec.sbp().to_vec())
            }
            None => (given, vec![B; self.placement.axes()]),
        };
        let wanted = &self.plan.wanted[tensor];
        own.f_copy_(&self.boxed(value, &self.shape(tensor), wanted, &sbp)?)?;
        Ok(())
    }

    /// This rank's local of a tensor of this shape, from one SBP to another.
    fn boxed(&self, local: &Tensor, shape: &[usize], from: &[Sbp], to: &[Sbp]) -> Result<Tensor> {
        if from == to {
            return Ok(local.shallow_clone());
        }
        let placement = self.placement;
        let (from, to) = (Layout { placement, sbp: from }, Layout { placement, sbp: to });
        let runtime = self.runtime()?;
        let options = (local.kind(), local.device());
        let boxed = runtime.boxing(shape, from, to).run(&runtime.groups, options, Some(local))?;
        boxed.ok_or_else(|| self.fail("this rank is not in the placement"))
    }

    /// The sum, on all ranks, of values that are terms on the axes where an SBP is a split.
    fn summed(&self, local: &Tensor, split: &[Sbp]) -> Result<Tensor> {
        let shape = shape(&local.size());
        let term = |sbp: &Sbp| if sbp.dim().is_some() { P } else { B };
        let from: NdSbp = split.iter().map(term).collect();
        self.boxed(local, &shape, &from, &vec![B; split.len()])
    }

    /// The logical shape of a tensor.
    fn shape(&self, tensor: usize) -> Vec<usize> {
        shape(self.call.sizes(tensor))
    }

    /// The part of a tensor that this rank has, as the signature wants it.
    fn region(&self, tensor: usize) -> Region {
        let all = regions(self.placement, &self.plan.wanted[tensor], &self.shape(tensor));
        all.into_iter().nth(self.position).unwrap_or_else(|| Region::all(&[]))
    }

    /// An argument; None beyond the last.
    fn argument(&self, index: usize) -> Argument<'_> {
        self.call.arguments().get(index).copied().unwrap_or(Argument::Other)
    }

    /// A number that is an argument.
    fn number(&self, index: usize) -> Option<f64> {
        match self.argument(index) {
            Argument::Int(value) => Some(value as f64),
            Argument::Float(value) => Some(value),
            _ => None,
        }
    }

    fn int(&self, index: usize) -> Option<i64> {
        match self.argument(index) {
            Argument::Int(value) => Some(value),
            _ => None,
        }
    }

    fn flag(&self, index: usize) -> bool {
        self.argument(index) == Argument::Bool(true)
    }

    fn ints(&self, index: usize) -> Vec<i64> {
        match self.argument(index) {
            Argument::Ints(values) => values.to_vec(),
            _ => Vec::new(),
        }
    }

    /// Returns a local as part of a tensor of this shape, with the SBP that the signature says for
    /// this return.
    fn give(&mut self, index: usize, local: &Tensor, shape: &[usize]) -> Result<()> {
        let sbp = self.plan.outputs[index].sbp.clone();
        self.give_as(local, shape, &sbp)
    }

    /// Returns a local as part of a tensor of this shape, with this SBP.
    fn give_as(&mut self, local: &Tensor, shape: &[usize], sbp: &[Sbp]) -> Result<()> {
        let sizes: Vec<i64> = shape.iter().map(|&size| size as i64).collect();
        let spec = self.runtime()?.spec(self.placement, sbp);
        let tensor = wrap(Some(local), local, spec, &sizes)?;
        Ok(self.call.output_tensor(Some(&tensor))?)
    }

    /// Returns the argument that the operation writes.
    fn give_written(&mut self, index: usize) -> Result<()> {
        Ok(self.call.output_written(index)?)
    }

    fn give_scalar(&mut self, scalar: Scalar) -> Result<()> {
        Ok(self.call.output_scalar(scalar)?)
    }

    fn fail(&self, reason: &str) -> Error {
        Error::Unsupported { operation: self.call.name().to_owned(), reason: reason.to_owned() }
    }
}
