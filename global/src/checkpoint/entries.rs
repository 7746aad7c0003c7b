//! The variables of a `VarStore`, and an optimizer's state, as entries of a checkpoint.

use std::sync::PoisonError;

use flow_ddp::checkpoint::{CheckpointError, Result};
use flow_tensor::ProcessGroup;
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

use super::contents::{MODEL, OPTIMIZER};
use super::index::Index;
use super::shards::Entry;
use crate::handle::{find_spec, local_of, wrap};
use crate::placement::Placement;
use crate::sbp::B;
use flow_ddp::checkpoint::safetensors::dtype;

/// Returns the variables, by name: the same order on all ranks.
pub fn variables(vs: &VarStore) -> Vec<(String, Tensor)> {
    let variables = vs.variables().into_iter();
    let mut variables: Vec<_> =
        variables.map(|(name, tensor)| (format!("{MODEL}{name}"), tensor)).collect();
    variables.sort_by(|(one, _), (other, _)| one.cmp(other));
    variables
}

/// Returns the optimizer's state as a checkpoint names it.
pub fn named(state: impl IntoIterator<Item = (String, Tensor)>) -> Vec<(String, Tensor)> {
    state.into_iter().map(|(name, tensor)| (format!("{OPTIMIZER}{name}"), tensor)).collect()
}

/// Returns tensors as entries. A plain one is the same on all ranks.
pub fn entries(tensors: &[(String, Tensor)], group: &ProcessGroup) -> Result<Vec<Entry>> {
    tensors.iter().map(|(name, tensor)| entry(name, tensor, group)).collect()
}

fn entry(name: &str, tensor: &Tensor, group: &ProcessGroup) -> Result<Entry> {
    let kind = tensor.kind();
    let shape = shape(tensor);
    let spec = find_spec(tensor);
    let is_plain = spec.is_none();
    let (placement, sbp, local) = match spec {
        Some(spec) => (spec.placement().clone(), spec.sbp().to_vec(), local_of(tensor)),
        None => (Placement::all(group)?, vec![B], Some(tensor.shallow_clone())),
    };
    if placement.runtime()?.world() != group {
        let reason = format!(
            "its placement {placement} is of another process group; open ShardedCheckpoints with that one"
        );
        return Err(CheckpointError::unfit("save or load", name, reason));
    }
    if sbp.iter().any(|sbp| sbp.is_partial()) {
        let reason = format!("it is {sbp:?}, partial; make it S or B by to_global");
        return Err(CheckpointError::unfit("save or load", name, reason));
    }
    Ok(Entry { name: name.to_owned(), kind, shape, placement, sbp, is_plain, local })
}

/// Returns tensors for the state of an optimizer that a checkpoint has: each has the SBP of its
/// parameter. The error says what this model does not have.
pub fn blank_state(index: &Index, vs: &VarStore) -> Result<Vec<(String, Tensor)>, String> {
    let variables = vs.variables_.lock().unwrap_or_else(PoisonError::into_inner);
    let mut parameters: Vec<_> = variables.trainable_variables.iter().collect();
    // As an optimizer counts them.
    parameters.sort_by_key(|parameter| parameter.group);
    let mut state = Vec::new();
    for (name, saved) in &index.tensors {
        let Some(name) = name.strip_prefix(OPTIMIZER) else { continue };
        let number = name.split('.').next().and_then(|number| number.parse::<usize>().ok());
        let Some(parameter) = number.and_then(|number| parameters.get(number)) else {
            let count = parameters.len();
            return Err(format!("it has {name}, and this model has {count} parameters"));
        };
        // Numbers of steps are plain.
        let tensor = if saved.shape.is_empty() && saved.dtype == "I64" {
            Tensor::zeros([0i64; 0], (Kind::Int64, Device::Cpu))
        } else {
            zeros_like(&parameter.tensor).map_err(|error| error.to_string())?
        };
        let wanted = dtype(tensor.kind()).unwrap_or("no type that files have");
        if (wanted, shape(&tensor)) != (&saved.dtype, saved.shape.clone()) {
            let found = format!("{} {:?}", saved.dtype, saved.shape);
            return Err(format!("its {name} is {found}, not {wanted} {:?}", shape(&tensor)));
        }
        state.push((name.to_owned(), tensor));
    }
    Ok(state)
}

/// Returns zeros with the SBP of the tensor.
fn zeros_like(tensor: &Tensor) -> crate::Result<Tensor> {
    let tensor = tensor.detach();
    match find_spec(&tensor) {
        Some(spec) => {
            let local = local_of(&tensor).map(|local| local.zeros_like());
            wrap(local.as_ref(), &tensor, spec, &tensor.size())
        }
        None => Ok(tensor.zeros_like()),
    }
}

fn shape(tensor: &Tensor) -> Vec<usize> {
    tensor.size().iter().map(|&size| size as usize).collect()
}
