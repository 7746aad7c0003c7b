//! The variables that a rank has, and its parts of those that ranks share.

use std::collections::HashMap;

use flow_autograd::{StatePart, identity};
use flow_comm::ProcessGroup;
use tch::nn::VarStore;

use super::error::{CheckpointError, Result};
use super::model::CheckpointModel;
use super::parts::Whole;
use crate::fsdp::shared_parameters::is_fully_sharded;
use crate::fully_shard::parts::{self as sharded_parts, OwnElements};

/// Returns the variables that ranks have whole, by name: the same order on all ranks. And this rank's parts
/// of the others, unless rank 0 is to write all.
pub fn variables(
    group: &ProcessGroup,
    model: &impl CheckpointModel,
    vs: &VarStore,
    all_write: bool,
) -> Result<(Vec<Whole>, Vec<StatePart>)> {
    let are_of_group = model.group().ranks() == group.ranks();
    let mut variables = Vec::new();
    let mut parts = Vec::new();
    let all = vs.variables();
    let mut gathered = if all_write || !are_of_group {
        HashMap::new()
    } else {
        sharded_parts::gathered(all.values())?
    };
    for (name, tensor) in all {
        if let Some(own) = sharded_parts::saved_elements(&tensor) {
            if !are_of_group {
                let reason = "its model is sharded over other ranks than save this checkpoint: open the \
                              checkpoints with the model's group";
                return Err(CheckpointError::unfit("save", name, reason));
            }
            if let Some(tensor) = gathered.remove(&identity(&tensor)) {
                variables.push(Whole { name, tensor, is_common: false });
            } else if let Some(OwnElements { start, elements }) = own {
                let shape = tensor.size();
                parts.push(StatePart { name, shape, start, tensor: elements });
            }
            continue;
        }
        let is_common = are_of_group && is_fully_sharded(&tensor);
        variables.push(Whole { name, tensor, is_common });
    }
    variables.sort_by(|one, other| one.name.cmp(&other.name));
    Ok((variables, parts))
}
