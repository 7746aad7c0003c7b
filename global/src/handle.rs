//! Global tensors as this rank has them: the spec and the local.

use std::sync::Arc;

use flow_autograd::global::Globals;
use tch::Tensor;

use crate::boxing::execute::Boxing;
use crate::boxing::memory::in_memory;
use crate::boxing::plan::TensorLayout;
use crate::error::{Error, Result};
use crate::region::shape;
use crate::sbp::B;
use crate::sequence;
use crate::spec::Spec;

/// Global tensors of this process.
///
/// # Errors
/// There are none: a placement on a process group comes before them.
pub fn globals() -> Result<Globals<Spec>> {
    Globals::registered().ok_or(Error::Plain)
}

/// Returns the spec of a tensor, if it is global.
pub fn find_spec(tensor: &Tensor) -> Option<Arc<Spec>> {
    globals().ok().filter(|_| tensor.defined())?.spec(tensor)
}

/// Returns the spec of a global tensor.
pub fn spec_of(tensor: &Tensor) -> Result<Arc<Spec>> {
    find_spec(tensor).ok_or(Error::Plain)
}

/// Returns the local of a global tensor; None outside its placement.
pub fn local_of(tensor: &Tensor) -> Option<Tensor> {
    globals().ok()?.local(tensor)
}

/// Returns a global tensor of a local; `like` has its kind and device. It has no conj or neg bit,
/// as ranks might give locals whose bits differ.
pub fn wrap(
    local: Option<&Tensor>,
    like: &Tensor,
    spec: Arc<Spec>,
    sizes: &[i64],
) -> Result<Tensor> {
    let shares = spec.sbp().iter().all(|&sbp| sbp == B);
    let local = local.map(in_memory);
    Ok(globals()?.wrap(local.as_ref(), &in_memory(like), spec, sizes, shares)?)
}

/// Returns a plain tensor of the kind of a global one, without elements.
pub fn empty_like(tensor: &Tensor) -> Tensor {
    Tensor::empty([0], (tensor.kind(), tensor.device()))
}

/// Returns a global tensor that has this spec, outside autograd.
pub fn boxed(tensor: &Tensor, to: &Arc<Spec>) -> Result<Tensor> {
    let from = spec_of(tensor)?;
    if from.id() == to.id() {
        return Ok(tensor.shallow_clone());
    }
    let sizes = tensor.size();
    let shape = shape(&sizes);
    let old = TensorLayout { placement: from.placement(), sbp: from.sbp() };
    let new = TensorLayout { placement: to.placement(), sbp: to.sbp() };
    let runtime = to.placement().runtime()?;
    let boxing = Boxing::between(runtime, &shape, old, new);
    sequence::note(&runtime.groups, boxing.operation());
    let local = local_of(tensor);
    let options = (tensor.kind(), tensor.device());
    let result = boxing.run(&runtime.groups, options, local.as_ref())?;
    // A view is still the old tensor's memory.
    let result = result.map(|result| {
        if boxing.is_view() && result.is_contiguous() {
            result.alias_copy()
        } else {
            // All ranks' strides are alike.
            result.contiguous()
        }
    });
    let like = empty_like(tensor);
    wrap(result.as_ref(), &like, to.clone(), &sizes)
}
