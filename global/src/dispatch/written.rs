//! An operation may write more than global tensors of the right size: `out` tensors of another size
//! than the result, and plain tensors.

use flow_autograd::global::{Call, LocalResult};
use flow_tensor::TensorCollectives;
use tch::Tensor;

use super::plan::{ExecutionPlan, OutputLayout};
use crate::boxing::execute::Boxing;
use crate::boxing::plan::TensorLayout;
use crate::error::Result;
use crate::handle::globals;
use crate::placement::Placement;
use crate::region::shape;
use crate::runtime::Runtime;
use crate::sbp::B;
use crate::spec::Spec;

/// Gives `out` tensors of another size the size, the spec and the values of the result. Returns which
/// tensors they are.
pub fn resize_outs(
    call: &Call<'_, Spec>,
    plan: &ExecutionPlan,
    placement: &Placement,
    runtime: &Runtime,
) -> Result<Vec<usize>> {
    let mut resized = Vec::new();
    for &(tensor, index) in &plan.outs {
        let LocalResult::Tensor(Some(local)) = call.result(index)? else { continue };
        let output = &plan.outputs[index];
        let sizes = output.logical(&local);
        let Some(mut out) = call.tensor(tensor).filter(|out| out.size() != sizes) else { continue };
        if call.spec(tensor).is_some() {
            resize(&out, Some(&local), &local, &sizes, output, placement)?;
        } else {
            let broadcast = vec![B; placement.axes()];
            let [from, to] = [&output.sbp, &broadcast].map(|sbp| TensorLayout { placement, sbp });
            let boxing = Boxing::between(runtime, &shape(&sizes), from, to);
            let options = (local.kind(), local.device());
            if let Some(all) = boxing.run(&runtime.groups, options, Some(&local))? {
                out.f_resize_(&sizes[..])?.f_copy_(&all)?;
            }
        }
        resized.push(tensor);
    }
    Ok(resized)
}

/// Resizes the `out` tensor of result `index` on ranks outside the placement, to these sizes.
pub fn resize_out(
    call: &Call<'_, Spec>,
    plan: &ExecutionPlan,
    placement: &Placement,
    index: usize,
    (sizes, like): (&[i64], &Tensor),
) -> Result<()> {
    let found = plan.outs.iter().find(|(_, of)| *of == index).map(|&(tensor, _)| tensor);
    let out = found.and_then(|tensor| Some((tensor, call.tensor(tensor)?)));
    let Some((tensor, mut out)) = out.filter(|(_, out)| out.size() != sizes) else { return Ok(()) };
    match call.spec(tensor) {
        Some(_) => resize(&out, None, like, sizes, &plan.outputs[index], placement),
        None => {
            let _ = out.f_resize_(sizes)?;
            Ok(())
        }
    }
}

fn resize(
    out: &Tensor,
    local: Option<&Tensor>,
    like: &Tensor,
    sizes: &[i64],
    output: &OutputLayout,
    placement: &Placement,
) -> Result<()> {
    let shares = output.shares && local.is_some();
    let now = globals()?.wrap(local, like, output.spec(placement), sizes, shares)?;
    Ok(globals()?.assign(out, &now)?)
}

/// Gives ranks outside the placement what the operation has written to plain tensors.
pub fn share_plain(
    call: &Call<'_, Spec>,
    plan: &ExecutionPlan,
    placement: &Placement,
    runtime: &Runtime,
) -> Result<()> {
    for &tensor in &plan.plain_written {
        let Some(mut plain) = call.tensor(tensor) else { continue };
        let mut values = plain.contiguous();
        runtime.world().broadcast_tensor(&mut values, placement.ranks()[0])?;
        if !plain.is_contiguous() {
            plain.f_copy_(&values)?;
        }
    }
    Ok(())
}
