//! The methods that a global tensor has beyond those of any tensor.

use flow_autograd::custom_function;
use tch::Tensor;

use crate::convert::{asked, convert, converted, one, outputs};
use crate::error::Result;
use crate::handle::{empty_like, find_spec, local_of, spec_of};
use crate::local::{from_locals, to_local};
use crate::placement::Placement;
use crate::region::{check, shape};
use crate::sbp::{B, NdSbp, Sbp};
use crate::spec::Spec;

/// Global tensors, which are ordinary `tch` tensors: their layout, and how they get another placement
/// or SBP. All ranks of the group call the same functions in the same order.
pub trait GlobalTensor {
    /// Returns whether this is a global tensor.
    fn is_global(&self) -> bool;

    /// Returns the ranks that it is placed on.
    ///
    /// # Errors
    /// The tensor is plain.
    fn placement(&self) -> Result<Placement>;

    /// Its layout on them: one SBP for each axis of the placement.
    ///
    /// # Errors
    /// The tensor is plain.
    fn sbp(&self) -> Result<NdSbp>;

    /// Returns the tensor with this placement and SBP. Of a plain tensor, which is this rank's
    /// local: ranks that are not in the placement may pass any tensor of that kind. Differentiable.
    ///
    /// A global tensor that has this placement and SBP already is returned as it is, with its memory:
    /// `copy()` makes one of its own. The global tensor of a local never has the local's memory.
    ///
    /// # Errors
    /// SBPs that do not fit the placement or the shape, locals that do not fit each other, or a
    /// collective that fails.
    fn to_global(&self, placement: &Placement, sbp: impl AsRef<[Sbp]>) -> Result<Tensor>;

    /// Returns the global tensor with this SBP, on its own placement. Differentiable.
    ///
    /// # Errors
    /// The tensor is plain, the SBP does not fit, or a collective fails.
    fn to_sbp(&self, sbp: impl AsRef<[Sbp]>) -> Result<Tensor>;

    /// Returns the global tensor on another placement that has as many axes, with its own SBP.
    /// Differentiable.
    ///
    /// # Errors
    /// The tensor is plain, the placement has more or fewer axes, or a collective fails.
    fn to_placement(&self, placement: &Placement) -> Result<Tensor>;

    /// Returns the same tensor. The gradient that comes back to it gets this SBP.
    ///
    /// # Errors
    /// The tensor is plain, or the SBP does not fit.
    fn grad_sbp(&self, sbp: impl AsRef<[Sbp]>) -> Result<Tensor>;

    /// Returns this rank's part of it, with the memory that it has; an empty tensor on ranks
    /// outside the placement. Differentiable: gradients of all ranks' locals are the gradient of
    /// the tensor.
    ///
    /// # Errors
    /// The tensor is plain.
    fn to_local(&self) -> Result<Tensor>;

    /// Returns all of it, as a plain tensor, on every rank of the job. Not differentiable: for a
    /// gradient use `to_sbp` with B, then `to_local`. Returns a plain tensor as it is.
    ///
    /// # Errors
    /// A collective fails.
    fn full(&self) -> Result<Tensor>;
}

impl GlobalTensor for Tensor {
    fn is_global(&self) -> bool {
        find_spec(self).is_some()
    }

    fn placement(&self) -> Result<Placement> {
        Ok(spec_of(self)?.placement().clone())
    }

    fn sbp(&self) -> Result<NdSbp> {
        Ok(spec_of(self)?.sbp().to_vec())
    }

    fn to_global(&self, placement: &Placement, sbp: impl AsRef<[Sbp]>) -> Result<Tensor> {
        let sbp = sbp.as_ref();
        match find_spec(self) {
            Some(_) => convert(self, placement, sbp),
            None => from_locals(self, &Spec::of(placement, sbp)?),
        }
    }

    fn to_sbp(&self, sbp: impl AsRef<[Sbp]>) -> Result<Tensor> {
        convert(self, spec_of(self)?.placement(), sbp.as_ref())
    }

    fn to_placement(&self, placement: &Placement) -> Result<Tensor> {
        convert(self, placement, spec_of(self)?.sbp())
    }

    fn grad_sbp(&self, sbp: impl AsRef<[Sbp]>) -> Result<Tensor> {
        let sbp = sbp.as_ref();
        let now = spec_of(self)?;
        check(now.placement(), sbp, &shape(&self.size()))?;
        let spec = Spec::of(now.placement(), sbp)?;
        one(custom_function(
            &[self],
            |inputs| outputs(Ok(inputs[0].alias())),
            move |_, gradients| {
                let boxed = gradients[0].as_ref().map(|gradient| converted(gradient, &spec));
                Ok(vec![boxed.transpose()?])
            },
        ))
    }

    fn to_local(&self) -> Result<Tensor> {
        to_local(self)
    }

    fn full(&self) -> Result<Tensor> {
        let Some(spec) = find_spec(self) else { return Ok(self.shallow_clone()) };
        tch::no_grad(|| {
            let runtime = spec.placement().runtime()?;
            let all = Placement::all(runtime.world())?;
            let full = asked(self, &Spec::of(&all, &[B])?)?;
            let local = local_of(&full).unwrap_or_else(|| empty_like(&full));
            // What is B already is the tensor's own memory.
            Ok(if spec.id() == spec_of(&full)?.id() { local.copy() } else { local })
        })
    }
}
