//! Global tensors that get another placement or SBP, as autograd sees it.

use std::sync::Arc;

use flow_autograd::{BoxError, Forward, custom_function};
use tch::Tensor;

use crate::error::Result;
use crate::handle::{boxed, spec_of};
use crate::placement::Placement;
use crate::record;
use crate::region::{check, shape};
use crate::sbp::{Sbp, reduced};
use crate::spec::Spec;

/// Returns a global tensor with this placement and SBP. Differentiable.
pub fn convert(tensor: &Tensor, placement: &Placement, sbp: &[Sbp]) -> Result<Tensor> {
    check(placement, sbp, &shape(&tensor.size()))?;
    let now = spec_of(tensor)?;
    let spec = Spec::of(placement, sbp)?;
    if spec.id() == now.id() {
        return Ok(tensor.shallow_clone());
    }
    if !tensor.requires_grad() {
        return tch::no_grad(|| asked(tensor, &spec));
    }
    one(custom_function(
        &[tensor],
        move |inputs| outputs(asked(&inputs[0], &spec)),
        // The gradient goes to the old placement, as what it has become.
        move |_, gradients| Ok(vec![moved(gradients[0].as_ref(), &now)?]),
    ))
}

/// Boxes as [`asked`] does; differentiable if the tensor is part of a graph, as a gradient in a backward
/// that is itself differentiated.
pub fn converted(tensor: &Tensor, to: &Arc<Spec>) -> Result<Tensor> {
    if tensor.requires_grad() {
        convert(tensor, to.placement(), to.sbp())
    } else {
        asked(tensor, to)
    }
}

/// Boxes as [`boxed`] does, and records that the program asks for it.
pub fn asked(tensor: &Tensor, to: &Arc<Spec>) -> Result<Tensor> {
    let result = boxed(tensor, to)?;
    record::conversion(tensor, &result)?;
    Ok(result)
}

/// Returns a gradient on the placement of `to`: with its own SBP if it is there already.
pub fn moved(gradient: Option<&Tensor>, to: &Arc<Spec>) -> Result<Option<Tensor>> {
    let Some(gradient) = gradient else { return Ok(None) };
    let now = spec_of(gradient)?;
    if now.placement() == to.placement() {
        return Ok(Some(gradient.shallow_clone()));
    }
    // Partial values are not made of a gradient: its tensor may be partial, the gradient need not.
    let sbp = reduced(to.sbp());
    Ok(Some(converted(gradient, &Spec::of(to.placement(), &sbp)?)?))
}

/// Returns the outputs of a forward that saves nothing.
pub fn outputs(output: Result<Tensor>) -> std::result::Result<Forward, BoxError> {
    Ok(Forward { outputs: vec![output?], saved: Vec::new() })
}

/// Returns the only output.
pub fn one(outputs: std::result::Result<Vec<Tensor>, flow_autograd::Error>) -> Result<Tensor> {
    Ok(outputs?.pop().unwrap_or_default())
}
