//! All ranks take the weights and the state of the rank that has done most steps.

use flow_autograd::{OptimizerState, StateDict};
use flow_comm::ProcessGroup;
use flow_tensor::CoalescedBroadcast;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use super::Elastic;
use crate::checkpoint::safetensors;
use crate::error::{Error, Result, job_rank};
use crate::model_check::{agree, describe, first_mismatch};

/// The bytes of tensors that are broadcast at once.
const AT_ONCE: usize = 64 << 20;

/// What the tensors of an optimizer's state are, and the program's state.
#[derive(Serialize, Deserialize)]
struct Header {
    /// [`StateDict::parameters`].
    parameters: Vec<String>,
    tensors: Vec<StateTensor>,
    /// The program's state, as JSON.
    state: String,
}

#[derive(Serialize, Deserialize)]
struct StateTensor {
    name: String,
    /// As safetensors calls it.
    dtype: String,
    shape: Vec<i64>,
    is_on_cpu: bool,
}

impl<M, S: Serialize + DeserializeOwned> Elastic<'_, M, S> {
    /// Takes over what the rank has that is farthest. If that fails, this rank has what it had before: the
    /// next ranks may need it.
    pub(super) fn catch_up(&mut self) -> Result<()> {
        let group = self.group.clone();
        let own = self.steps.map_or(-1, |steps| steps as i64);
        let mut steps = vec![0; group.world_size()];
        group.all_gather(&[own], &mut steps)?;
        let most = steps.iter().copied().max().unwrap_or(own);
        let source = steps.iter().position(|&steps| steps == most).unwrap_or(0);
        if most < 0 {
            let reason = "no rank has weights: start the job again, from a checkpoint";
            return Err(self.error(reason.into()));
        }
        if steps.len() == 1 {
            return Ok(());
        }
        let is_behind = own < most;
        let mut variables: Vec<(String, Tensor)> = self.vs.variables().into_iter().collect();
        variables.sort_by(|one, other| one.0.cmp(&other.0));
        if let Some(difference) = first_mismatch(&group, &describe(&variables, &[]))? {
            return Err(Error::Mismatch { rank: job_rank(&group), difference });
        }
        let given = if group.rank() == source { self.given().map(Some) } else { Ok(None) };
        let mut given = agree(&group, given)?;
        let header = given.as_mut().map(|(header, _)| std::mem::take(header));
        let header = broadcast_bytes(&group, source, header.unwrap_or_default())?;
        let header: Header = serde_json::from_slice(&header)
            .map_err(|error| self.error(format!("the state of rank {source}: {error}")))?;
        let program: S = serde_json::from_str(&header.state)
            .map_err(|error| self.error(format!("the program's state: {error}")))?;
        let optimizer = match given {
            Some((_, optimizer)) => optimizer,
            None => header.optimizer_to_fill(self.vs.device()),
        };
        let mut received = Vec::with_capacity(variables.len());
        for (name, tensor) in &variables {
            // A rank that is behind may have to go on from what it has, if this fails.
            let target = if is_behind { tensor.detach().copy() } else { tensor.detach() };
            received.push((name.clone(), target));
        }
        broadcast_tensors(&group, source, &received)?;
        broadcast_tensors(&group, source, &optimizer.tensors)?;
        if is_behind {
            let loaded = self.optimizer.load_state(&optimizer);
            loaded.map_err(|error| self.error(error.to_string()))?;
            for ((_, variable), (_, target)) in variables.iter().zip(&received) {
                variable.data().copy_(target);
            }
        }
        self.state = program;
        self.steps = Some(most as u64);
        Ok(())
    }

    /// Returns what the others take from this rank: the header, as JSON, and the optimizer's state.
    fn given(&self) -> Result<(Vec<u8>, StateDict)> {
        let optimizer = self.optimizer.state().map_err(|error| self.error(error.to_string()))?;
        let mut tensors = Vec::with_capacity(optimizer.tensors.len());
        for (name, tensor) in &optimizer.tensors {
            let kind = tensor.kind();
            let dtype = safetensors::dtype(kind).ok_or_else(|| {
                self.error(format!("the optimizer's {name} is of {kind:?}, which cannot be sent"))
            })?;
            tensors.push(StateTensor {
                name: name.clone(),
                dtype: dtype.into(),
                shape: tensor.size(),
                is_on_cpu: tensor.device() == Device::Cpu,
            });
        }
        let unfit = |error| self.error(format!("the program's state cannot be sent: {error}"));
        let state = serde_json::to_string(&self.state).map_err(unfit)?;
        let header = Header { parameters: optimizer.parameters.clone(), tensors, state };
        Ok((serde_json::to_vec(&header).map_err(unfit)?, optimizer))
    }

    fn error(&self, reason: String) -> Error {
        Error::Elastic { rank: job_rank(&self.group), reason }
    }
}

impl Header {
    /// Returns a state of such tensors, whose values are still to come.
    fn optimizer_to_fill(&self, device: Device) -> StateDict {
        let mut tensors = Vec::with_capacity(self.tensors.len());
        for tensor in &self.tensors {
            let kind = safetensors::kind(&tensor.dtype).unwrap_or(Kind::Float);
            let device = if tensor.is_on_cpu { Device::Cpu } else { device };
            tensors.push((tensor.name.clone(), Tensor::zeros(&tensor.shape[..], (kind, device))));
        }
        StateDict { parameters: self.parameters.clone(), tensors }
    }
}

/// Returns the bytes of rank `source`, which are `own` there.
fn broadcast_bytes(group: &ProcessGroup, source: usize, own: Vec<u8>) -> Result<Vec<u8>> {
    let mut length = [own.len() as i64];
    group.broadcast(&mut length, source)?;
    let mut bytes = own;
    bytes.resize(length[0] as usize, 0);
    group.broadcast(&mut bytes, source)?;
    Ok(bytes)
}

/// Gives the tensors the values that they have on rank `source`.
fn broadcast_tensors(
    group: &ProcessGroup,
    source: usize,
    tensors: &[(String, Tensor)],
) -> Result<()> {
    let (on_cpu, on_gpu): (Vec<_>, Vec<_>) =
        tensors.iter().partition(|(_, tensor)| tensor.device() == Device::Cpu);
    for tensors in [on_cpu, on_gpu] {
        let mut pieces: Vec<Vec<(String, Tensor)>> = Vec::new();
        let mut bytes = AT_ONCE;
        for (name, tensor) in tensors {
            let size = tensor.numel() * tensor.kind().elt_size_in_bytes();
            if bytes + size > AT_ONCE {
                pieces.push(Vec::new());
                bytes = 0;
            }
            bytes += size;
            if let Some(piece) = pieces.last_mut() {
                piece.push((name.clone(), tensor.shallow_clone()));
            }
        }
        for piece in pieces {
            CoalescedBroadcast::new(group, piece)?.run(group, source)?;
        }
    }
    Ok(())
}
