//! Gradients of tensors that are global or plain, as optimizers change them.

use tch::Tensor;

use crate::convert::convert;
use crate::error::Result;
use crate::handle::{find_spec, local_of};
use crate::sbp;

/// Returns the gradients of these tensors; tensors without one are left out.
pub fn gradients(tensors: &[Tensor]) -> impl Iterator<Item = Tensor> + '_ {
    tensors.iter().map(Tensor::grad).filter(Tensor::defined)
}

/// Returns this rank's part of a gradient; None outside its placement.
pub fn own(gradient: &Tensor) -> Option<Tensor> {
    match find_spec(gradient) {
        Some(_) => local_of(gradient),
        None => Some(gradient.shallow_clone()),
    }
}

/// Returns whether the gradient is partial on an axis.
pub fn is_partial(gradient: &Tensor) -> bool {
    let spec = find_spec(gradient);
    spec.is_some_and(|spec| spec.sbp().iter().any(|sbp| sbp.is_partial()))
}

/// Returns the gradient, with partial axes reduced to B.
pub fn reduced(gradient: &Tensor) -> Result<Tensor> {
    let Some(spec) = find_spec(gradient).filter(|_| is_partial(gradient)) else {
        return Ok(gradient.shallow_clone());
    };
    convert(gradient, spec.placement(), &sbp::reduced(spec.sbp()))
}
