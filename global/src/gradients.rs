//! Gradients of tensors that are global or plain, as optimizers change them.

use flow_autograd::global::local_are_finite;
use flow_comm::ReduceOp;
use flow_tensor::TensorCollectives;
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

/// Returns whether all elements of these gradients are finite, on all ranks of their placements' groups.
/// At least one of them is global.
pub fn are_finite(gradients: &[Tensor]) -> Result<bool> {
    let mut world = None;
    let mut locals = Vec::new();
    for gradient in gradients {
        if let Some(spec) = find_spec(gradient) {
            let group = spec.placement().runtime()?.world();
            world.get_or_insert_with(|| group.clone());
        }
        // A sum may overflow where what is added does not.
        locals.extend(own(&reduced(gradient)?));
    }
    let are_finite = local_are_finite(&locals)?;
    let Some(world) = world else { return Ok(are_finite) };
    let mut lowest = Tensor::from(i64::from(are_finite)).to_device(world.device());
    world.all_reduce_tensor(&mut lowest, ReduceOp::Min)?;
    Ok(lowest.f_int64_value(&[])? > 0)
}
