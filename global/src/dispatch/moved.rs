//! Operations whose inputs are on different placements: the inputs are moved to one.

use std::sync::Arc;

use flow_autograd::global::Call;
use flow_autograd::map_gradient;

use super::op::Written;
use crate::convert::{asked, moved};
use crate::error::{Error, Result};
use crate::handle::find_spec;
use crate::placement::Placement;
use crate::policy;
use crate::sbp::{B, reduced};
use crate::spec::Spec;

/// Returns whether the inputs of this operation may be moved. `copy_` is a move by nature.
pub fn may_move(call: &Call<'_, Spec>) -> bool {
    policy::moves_inputs() || is_copy(call)
}

/// Makes the error of two inputs that are on these placements, and are not moved.
pub fn placements_differ(call: &Call<'_, Spec>, one: &Placement, other: &Placement) -> Error {
    Error::Placements {
        operation: call.name.to_owned(),
        one: one.to_string(),
        other: other.to_string(),
    }
}

fn is_copy(call: &Call<'_, Spec>) -> bool {
    call.name == "aten::copy_"
}

/// Moves the inputs to one placement, and carries out the operation there. The gradients of moved
/// inputs come back to the inputs' own placements.
pub fn run(call: &mut Call<'_, Spec>) -> Result<()> {
    let written = Written::of(call, &call.arguments()).tensors;
    let target = target(call, &written)?;
    let placement = target.placement();
    let mut tensors = Vec::new();
    for index in 0..call.tensors() {
        let mut tensor = call.tensor(index);
        let own = tensor.as_ref().and_then(find_spec).filter(|own| own.placement() != placement);
        if let (Some(tensor), Some(own)) = (&mut tensor, own) {
            if written.contains(&index) {
                return Err(placements_differ(call, placement, own.placement()));
            }
            // What is copied gets the layout of the tensor that it is copied to.
            let is_alike = is_copy(call) && call.sizes(index) == call.sizes(0);
            let to = if is_alike { Arc::clone(&target) } else { alike(&own, placement)? };
            let here = asked(tensor, &to)?;
            if tensor.requires_grad() && !tensor.is_leaf() {
                // A leaf has a hook that does the same.
                map_gradient(tensor, move |gradient| Ok(moved(Some(gradient), &own)?))?;
            }
            *tensor = here;
        }
        tensors.push(tensor);
    }
    Ok(call.run_with(&tensors)?)
}

/// Returns the spec of the tensor to whose placement the others are moved. It is that of a tensor
/// that is written, else of the largest; of equal ones, of the first.
fn target(call: &Call<'_, Spec>, written: &[usize]) -> Result<Arc<Spec>> {
    let globals = (0..call.tensors()).filter(|&tensor| call.spec(tensor).is_some());
    let first = globals.max_by_key(|&tensor| {
        let size = call.kind(tensor).map_or(0, |kind| kind.elt_size_in_bytes());
        let bytes = call.sizes(tensor).iter().product::<i64>() * size as i64;
        (written.contains(&tensor), bytes, std::cmp::Reverse(tensor))
    });
    first.and_then(|tensor| find_spec(&call.tensor(tensor)?)).ok_or(Error::Plain)
}

/// Returns the same SBP on another placement, where that has as many axes; else B. Partial sums become B.
fn alike(own: &Spec, placement: &Placement) -> Result<Arc<Spec>> {
    let sbp = if own.placement().axes() == placement.axes() {
        reduced(own.sbp())
    } else {
        vec![B; placement.axes()]
    };
    Spec::of(placement, &sbp)
}
