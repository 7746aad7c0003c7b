//! A model's variables become global, in place.

use tch::{Tensor, nn};

use crate::error::Result;
use crate::placement::Placement;
use crate::region::{regions, shape};
use crate::replicas;
use crate::sbp::{B, Sbp};
use crate::tensor::GlobalTensor;

/// Makes all variables of a `VarStore` global tensors on a placement, with the SBP that `sbp` says
/// for each name and tensor. Everyone who holds them (modules, optimizers made before or after) has
/// them then. Where ranks have made different values, those of the first rank count.
///
/// # Errors
/// An SBP does not fit, or ranks have variables of other shapes.
pub fn distribute<T: AsRef<[Sbp]>>(
    vs: &nn::VarStore,
    placement: &Placement,
    sbp: impl Fn(&str, &Tensor) -> T,
) -> Result<()> {
    // All ranks in the same order.
    let mut variables: Vec<(String, Tensor)> = vs.variables().into_iter().collect();
    variables.sort_by(|(one, _), (other, _)| one.cmp(other));
    let mut leaves = Vec::new();
    for (name, mut variable) in variables {
        let sbp = sbp(&name, &variable);
        to_global_in_place(&mut variable, placement, &sbp)?;
        crate::record::name(&variable, &name)?;
        // All ranks decide alike, also one that has nothing of the leaf.
        let sbp = sbp.as_ref();
        let parts = regions(placement, sbp, &shape(&variable.size()));
        let has_all = parts.iter().all(|part| part.elements() > 0);
        // Buckets do not know complex numbers.
        let is_real = variable.is_floating_point();
        if variable.requires_grad() && sbp.contains(&B) && has_all && is_real {
            leaves.push((name, variable));
        }
    }
    replicas::add(placement.runtime()?, &leaves);
    Ok(())
}

/// Makes all variables of a `VarStore` plain again, and their gradients: each rank has all of each of
/// them, for all who hold them. The reverse of [`distribute`]; a collective.
///
/// # Errors
/// A collective fails.
pub fn undistribute(vs: &nn::VarStore) -> Result<()> {
    let mut variables: Vec<(String, Tensor)> = vs.variables().into_iter().collect();
    variables.sort_by(|(one, _), (other, _)| one.cmp(other));
    for (_, mut variable) in variables {
        if !variable.is_global() {
            continue;
        }
        let gradient = variable.grad();
        let gradient = gradient.defined().then(|| gradient.full()).transpose()?;
        flow_autograd::set_grad(&variable, None)?;
        let full = variable.full()?;
        variable.set_data(&full);
        flow_autograd::set_grad(&variable, gradient.as_ref())?;
    }
    Ok(())
}

/// Makes a tensor global, for all who hold it. Of a plain tensor, the values of the placement's first
/// rank count; a global one gets the placement and the SBP. A collective.
///
/// # Errors
/// The SBP does not fit, or a collective fails.
pub fn to_global_in_place(
    tensor: &mut Tensor,
    placement: &Placement,
    sbp: impl AsRef<[Sbp]>,
) -> Result<()> {
    let global = tch::no_grad(|| {
        let now = tensor.detach();
        if now.is_global() {
            return now.to_global(placement, sbp);
        }
        // The first rank's values, then parts of them.
        let broadcast = vec![B; placement.axes()];
        now.to_global(placement, &broadcast)?.to_global(placement, sbp)
    })?;
    tensor.set_data(&global);
    Ok(())
}
