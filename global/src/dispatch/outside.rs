//! Ranks outside a placement: they have nothing of the tensors on it, know their shapes, and may call
//! everything.
//!
//! What an operation gives, such a rank finds out once, by running it on zeros of the sizes that the
//! first rank of the placement has.

use std::sync::Arc;

use flow_autograd::global::{Call, LocalResult, Scalar};
use flow_tensor::TensorCollectives;
use tch::{Device, Kind, Tensor};

use super::plan::{Input, Output, Plan};
use super::{scalar_bits, scalar_of, shape};
use crate::code;
use crate::error::{Error, Result};
use crate::placement::Placement;
use crate::region::regions;
use crate::runtime::Runtime;
use crate::spec::Spec;

/// What is known of a result.
#[derive(Clone, Debug)]
pub enum Outside {
    /// Its logical sizes, and its kind.
    Tensor(Vec<i64>, Kind),
    /// Of each tensor of a list.
    Tensors(Vec<(Vec<i64>, Kind)>),
    /// An undefined tensor.
    Undefined,
    /// A number: the ranks of the placement tell which.
    Scalar,
}

/// Operations whose results' shapes depend on values.
const DYNAMIC: &[&str] = &[
    "_unique2",
    "bincount",
    "masked_select",
    "nonzero",
    "repeat_interleave",
    "unique_consecutive",
    "unique_dim",
];

/// Returns what the operation would, without a local.
pub fn run(
    call: &mut Call<'_, Spec>,
    plan: &Plan,
    placement: &Placement,
    runtime: &Arc<Runtime>,
) -> Result<()> {
    if code::draws(plan.name.trim_end_matches('_')) {
        // All ranks draw the same tensors.
        runtime.generator().draw();
    }
    let known = match plan.outside.get() {
        Some(known) => known,
        None => {
            let known = find_out(call, plan, placement)?;
            plan.outside.get_or_init(|| known)
        }
    };
    for (index, (known, output)) in known.iter().zip(&plan.outputs).enumerate() {
        if output.is_written {
            if let (true, Some(argument), Outside::Tensor(sizes, kind)) =
                (call.reshapes(), call.written(index), known)
            {
                let now = wrap(runtime, placement, output, sizes, *kind)?;
                if let Some(tensor) = call.tensor(argument) {
                    runtime.globals.assign(&tensor, &now)?;
                }
            }
            call.output_written(index)?;
            continue;
        }
        match known {
            Outside::Tensor(sizes, kind) => {
                let tensor = wrap(runtime, placement, output, sizes, *kind)?;
                call.output_tensor(Some(&tensor))?;
            }
            Outside::Tensors(all) => {
                let wrap = |(sizes, kind): &(Vec<i64>, Kind)| {
                    wrap(runtime, placement, output, sizes, *kind)
                };
                call.output_tensors(&all.iter().map(wrap).collect::<Result<Vec<_>>>()?)?;
            }
            Outside::Undefined => call.output_tensor(None)?,
            Outside::Scalar => {
                call.output_scalar(share_scalar(placement, runtime, None)?)?;
            }
        }
    }
    Ok(())
}

fn wrap(
    runtime: &Runtime,
    placement: &Placement,
    output: &Output,
    sizes: &[i64],
    kind: Kind,
) -> Result<Tensor> {
    let like = Tensor::empty([0], (kind, Device::Cpu));
    let spec = output.spec(placement, runtime);
    Ok(runtime.globals.wrap(None, &like, spec, sizes, false)?)
}

fn find_out(call: &mut Call<'_, Spec>, plan: &Plan, placement: &Placement) -> Result<Vec<Outside>> {
    if DYNAMIC.contains(&plan.name.as_str()) {
        return Err(Error::Unsupported {
            operation: plan.name.clone(),
            reason: format!(
                "the shape of the result depends on values, which ranks outside the placement \
                 {placement} do not have: give the input a placement of all ranks by to_global"
            ),
        });
    }
    for index in 0..call.tensors() {
        let Some(kind) = call.kind(index) else { continue };
        let sizes = match plan.inputs[index] {
            Input::Empty => vec![0],
            _ => {
                let all = regions(placement, &plan.wanted[index], &shape(call.sizes(index)));
                all[0].shape().iter().map(|&size| size as i64).collect()
            }
        };
        call.set_local(index, Some(&Tensor::zeros(&sizes[..], (kind, Device::Cpu))))?;
    }
    for (argument, values) in &plan.ints {
        call.set_ints(*argument, values)?;
    }
    call.run()?;
    let known = |(index, output): (usize, &Output)| {
        let logical = |tensor: &Tensor| {
            let mut sizes = tensor.size();
            for (&dim, &size) in output.split_dims.iter().zip(&output.split_sizes) {
                sizes[dim as usize] = size;
            }
            (sizes, tensor.kind())
        };
        Ok(match call.result(index)? {
            LocalResult::Tensor(Some(tensor)) => {
                let (sizes, kind) = logical(&tensor);
                Outside::Tensor(sizes, kind)
            }
            LocalResult::Tensor(None) => Outside::Undefined,
            LocalResult::Tensors(all) => Outside::Tensors(all.iter().map(logical).collect()),
            LocalResult::Scalar(_) => Outside::Scalar,
        })
    };
    plan.outputs.iter().enumerate().map(known).collect()
}

/// The number that the ranks of a placement have, on all ranks of the job.
pub fn share_scalar(
    placement: &Placement,
    runtime: &Runtime,
    own: Option<Scalar>,
) -> Result<Scalar> {
    let bits = own.map_or([0, 0], scalar_bits);
    let mut shared = Tensor::from_slice(&bits);
    runtime.world().broadcast_tensor(&mut shared, placement.ranks()[0])?;
    Ok(scalar_of([shared.int64_value(&[0]), shared.int64_value(&[1])]))
}
