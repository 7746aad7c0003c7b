//! The variables of jobs: how they begin, and how they are saved.

use std::collections::HashMap;
use std::io;
use std::path::Path;

use flow_ddp::checkpoint::agree::agree;
use flow_ddp::checkpoint::{CheckpointError, files};
use flow_tensor::{ProcessGroup, TensorCollectives};
use tch::{Tensor, nn};

use super::View;
use crate::distribute::distribute;
use crate::error::{Error, Result};
use crate::local::distribute_tensor;
use crate::placement::Placement;
use crate::sbp::B;
use crate::tensor::GlobalTensor;

/// Returns all variables by name, in the same order on all ranks.
pub fn sorted(vs: &nn::VarStore) -> Vec<(String, Tensor)> {
    let mut variables: Vec<(String, Tensor)> = vs.variables().into_iter().collect();
    variables.sort_by(|(one, _), (other, _)| one.cmp(other));
    variables
}

/// Gives all ranks the first rank's variables: as copies, or as global tensors that are B, except
/// for those that are global already.
pub fn prepare(
    view: View,
    placement: &Placement,
    group: &ProcessGroup,
    vs: &nn::VarStore,
) -> Result<()> {
    let variables = sorted(vs);
    if view == View::Consistent {
        if variables.iter().all(|(_, variable)| variable.is_global()) {
            return Ok(());
        }
        let broadcast = vec![B; placement.axes()];
        return distribute(vs, placement, |_, tensor| {
            tensor.sbp().unwrap_or_else(|_| broadcast.clone())
        });
    }
    for (name, mut variable) in variables {
        if variable.is_global() {
            return Err(Error::Unsupported {
                operation: "a mirrored job".to_owned(),
                reason: format!(
                    "the variable {name} is global; use View::Consistent, or another VarStore"
                ),
            });
        }
        tch::no_grad(|| group.broadcast_tensor(&mut variable, 0))?;
    }
    Ok(())
}

/// Writes all variables, whole, into a safetensors file, as `VarStore::save` does. Rank 0 writes.
/// All ranks call this, and can read the file when it returns. An error is that of all ranks.
pub fn save(vs: &nn::VarStore, group: &ProcessGroup, path: &Path) -> Result<()> {
    let mut whole = Vec::new();
    for (name, variable) in sorted(vs) {
        let tensor = variable.full()?;
        if group.rank() == 0 {
            whole.push((name, tensor.detach().to_device(tch::Device::Cpu)));
        }
    }
    let mut written = Ok(());
    if group.rank() == 0 {
        written = files::write_whole(path, |partial| {
            Tensor::write_safetensors(&whole, partial)
                .map_err(|error| CheckpointError::write(path)(io::Error::other(error)))
        });
    }
    agree(group, written).map_err(|error| Error::Unsupported {
        operation: "save".to_owned(),
        reason: error.to_string(),
    })
}

/// Gives all variables the values in a safetensors file, which each rank reads.
pub fn load(vs: &nn::VarStore, path: &Path) -> Result<()> {
    let mut saved: HashMap<String, Tensor> = Tensor::read_safetensors(path)?.into_iter().collect();
    let mut pairs = Vec::new();
    for (name, variable) in sorted(vs) {
        let value = saved.remove(&name).ok_or_else(|| unfit(path, format!("it has no {name}")))?;
        if value.size() != variable.size() {
            let found = value.size();
            let needed = variable.size();
            let reason = format!("its {name} has the shape {found:?}, not {needed:?}");
            return Err(unfit(path, reason));
        }
        pairs.push((variable, value));
    }
    for (mut variable, value) in pairs {
        let value = value.to_kind(variable.kind()).to_device(variable.device());
        let value = if variable.is_global() {
            distribute_tensor(&value, &variable.placement()?, &variable.sbp()?)?
        } else {
            value
        };
        tch::no_grad(|| variable.f_copy_(&value).map(drop))?;
    }
    Ok(())
}

fn unfit(path: &Path, reason: String) -> Error {
    Error::Unsupported { operation: format!("load {}", path.display()), reason }
}
