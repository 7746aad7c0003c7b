//! The variables of a `VarStore`, and an optimizer's state, as entries of a checkpoint.

use flow_autograd::StateDict;
use flow_tensor::ProcessGroup;
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

use super::error::CheckpointError;
use super::index::Index;
use super::shards::Entry;
use super::{MODEL, OPTIMIZER};
use crate::placement::Placement;
use crate::sbp::B;

type Result<T, E = CheckpointError> = std::result::Result<T, E>;

/// The variables, by name.
pub fn model_entries(vs: &VarStore, group: &ProcessGroup) -> Result<Vec<Entry>> {
    let mut variables: Vec<_> = vs.variables().into_iter().collect();
    variables.sort_by(|(one, _), (other, _)| one.cmp(other));
    variables.iter().map(|(name, tensor)| entry(format!("{MODEL}{name}"), tensor, group)).collect()
}

/// The tensors of an optimizer's state.
pub fn optimizer_entries(state: &StateDict, group: &ProcessGroup) -> Result<Vec<Entry>> {
    let tensors = state.tensors.iter();
    tensors.map(|(name, tensor)| entry(format!("{OPTIMIZER}{name}"), tensor, group)).collect()
}

/// A plain tensor is the same on all ranks.
fn entry(name: String, tensor: &Tensor, group: &ProcessGroup) -> Result<Entry> {
    let (kind, shape) = (tensor.kind(), tensor.size().iter().map(|&size| size as usize).collect());
    let all = Placement::of((0..group.world_size()).collect::<Vec<_>>())?;
    let local = Some(tensor.shallow_clone());
    Ok(Entry { name, kind, shape, placement: all, sbp: vec![B], local })
}

/// Tensors for the state of an optimizer that a checkpoint has: each lies as its parameter does.
/// The error says what this model does not have.
pub fn blank_state(index: &Index, vs: &VarStore) -> Result<Vec<(String, Tensor)>, String> {
    let variables = vs.variables_.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let mut parameters: Vec<_> = variables.trainable_variables.iter().collect();
    // As an optimizer counts them.
    parameters.sort_by_key(|parameter| parameter.group);
    let names = index.tensors.keys().filter_map(|name| name.strip_prefix(OPTIMIZER));
    let blank = |name: &str| {
        let number = name.split('.').next().and_then(|number| number.parse::<usize>().ok());
        let Some(parameter) = number.and_then(|number| parameters.get(number)) else {
            return Err(format!(
                "it has {name}, and this model has {} parameters",
                parameters.len()
            ));
        };
        let saved = &index.tensors[&format!("{OPTIMIZER}{name}")];
        // Numbers of steps are no global tensors.
        let is_count = saved.shape.is_empty() && saved.dtype == "I64";
        let tensor = match is_count {
            true => Tensor::zeros([0i64; 0], (Kind::Int64, Device::Cpu)),
            false => parameter.tensor.detach().zeros_like(),
        };
        let shape: Vec<usize> = tensor.size().iter().map(|&size| size as usize).collect();
        match shape == saved.shape {
            true => Ok((name.to_owned(), tensor)),
            false => Err(format!("its {name} has the shape {:?}, not {shape:?}", saved.shape)),
        }
    };
    names.map(blank).collect()
}
