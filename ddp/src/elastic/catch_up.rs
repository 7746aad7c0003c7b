//! All ranks take the weights and the state of the rank that has done most steps.

use flow_autograd::{OptimizerState, StateDict};
use flow_comm::{Error as CommError, ProcessGroup, digest};
use flow_tensor::CoalescedBroadcast;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use super::Elastic;
use crate::error::{Error, Result, job_rank};
use crate::model_check::{agree, broadcast_bytes, first_mismatch};

/// The bytes of tensors that are broadcast at once.
const AT_ONCE: usize = 64 << 20;

/// What a rank gives to the others beside the values of tensors.
#[derive(Serialize, Deserialize)]
struct Header<S> {
    /// Whether each variable requires gradients, in the order of their names.
    require_grad: Vec<bool>,
    /// [`StateDict::parameters`].
    parameters: Vec<String>,
    /// The tensors of the optimizer's state.
    tensors: Vec<StateTensor>,
    /// The program's state.
    state: S,
}

#[derive(Serialize, Deserialize)]
struct StateTensor {
    name: String,
    kind: String,
    shape: Vec<i64>,
    is_on_cpu: bool,
}

impl<M, S: Serialize + DeserializeOwned> Elastic<'_, M, S> {
    /// Takes over what the rank has that is farthest. If that fails, this rank has what it had before: the
    /// next ranks may need it.
    pub(super) fn catch_up(&mut self) -> Result<()> {
        let group = self.group.clone();
        let mut variables: Vec<(String, Tensor)> = self.vs.variables().into_iter().collect();
        variables.sort_by(|one, other| one.0.cmp(&other.0));
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
        check_same_model(&group, source, &variables)?;
        let given =
            if group.rank() == source { self.given(&variables).map(Some) } else { Ok(None) };
        let mut given = agree(&group, given)?;
        let header = given.as_mut().map(|(header, _)| std::mem::take(header));
        let mut header = header.unwrap_or_default();
        broadcast_bytes(&group, source, &mut header)?;
        let header: Header<S> = ciborium::from_reader(&header[..])
            .map_err(|error| self.error(format!("the state of rank {source}: {error}")))?;
        if steps.iter().any(|&steps| steps < most) {
            let optimizer = match given {
                Some((_, optimizer)) => optimizer,
                None => self.optimizer_to_fill(&header)?,
            };
            self.take_tensors(source, own < most, &variables, &optimizer)?;
        }
        for ((_, tensor), requires_grad) in variables.iter().zip(header.require_grad) {
            if tensor.requires_grad() != requires_grad {
                let _ = tensor.set_requires_grad(requires_grad);
            }
        }
        self.state = header.state;
        self.steps = Some(most as u64);
        Ok(())
    }

    /// Gives a rank that is behind the values of rank `source`. Others keep their own.
    fn take_tensors(
        &mut self,
        source: usize,
        is_behind: bool,
        variables: &[(String, Tensor)],
        optimizer: &StateDict,
    ) -> Result<()> {
        let group = self.group.clone();
        let mut received = Vec::with_capacity(variables.len());
        for (name, tensor) in variables {
            // A rank that is behind may have to go on from what it has, if this fails.
            let target = if is_behind { tensor.detach().copy() } else { tensor.detach() };
            received.push((name.clone(), target));
        }
        let takes = is_behind || group.rank() == source;
        broadcast_tensors(&group, source, &received, takes)?;
        broadcast_tensors(&group, source, &optimizer.tensors, takes)?;
        if is_behind {
            let loaded = self.optimizer.load_state(optimizer);
            loaded.map_err(|error| self.error(error.to_string()))?;
            for ((_, variable), (_, target)) in variables.iter().zip(&received) {
                variable.data().copy_(target);
            }
        }
        Ok(())
    }

    /// Returns what the others take from this rank: the header, as CBOR, and the optimizer's state.
    fn given(&self, variables: &[(String, Tensor)]) -> Result<(Vec<u8>, StateDict)> {
        let optimizer = self.optimizer.state().map_err(|error| self.error(error.to_string()))?;
        let mut tensors = Vec::with_capacity(optimizer.tensors.len());
        for (name, tensor) in &optimizer.tensors {
            tensors.push(StateTensor {
                name: name.clone(),
                kind: format!("{:?}", tensor.kind()),
                shape: tensor.size(),
                is_on_cpu: tensor.device() == Device::Cpu,
            });
        }
        let header = Header {
            require_grad: variables.iter().map(|(_, tensor)| tensor.requires_grad()).collect(),
            parameters: optimizer.parameters.clone(),
            tensors,
            state: &self.state,
        };
        let mut bytes = Vec::new();
        ciborium::into_writer(&header, &mut bytes)
            .map_err(|error| self.error(format!("the program's state cannot be sent: {error}")))?;
        Ok((bytes, optimizer))
    }

    /// Returns an optimizer's state of such tensors, whose values are still to come.
    fn optimizer_to_fill(&self, header: &Header<S>) -> Result<StateDict> {
        let mut tensors = Vec::with_capacity(header.tensors.len());
        for tensor in &header.tensors {
            let kind = KINDS.into_iter().find(|kind| format!("{kind:?}") == tensor.kind);
            let kind = kind.ok_or_else(|| {
                self.error(format!("the optimizer's {} is of an unknown type", tensor.name))
            })?;
            let device = if tensor.is_on_cpu { Device::Cpu } else { self.vs.device() };
            // Its memory is used first when values come.
            tensors.push((tensor.name.clone(), Tensor::empty(&tensor.shape[..], (kind, device))));
        }
        Ok(StateDict { parameters: header.parameters.clone(), tensors })
    }
}

/// The types that an optimizer's state can have.
const KINDS: [Kind; 8] = [
    Kind::Int64,
    Kind::Half,
    Kind::BFloat16,
    Kind::Float,
    Kind::Double,
    Kind::ComplexFloat,
    Kind::ComplexDouble,
    Kind::Bool,
];

/// Checks that this rank's model is that of rank `source`. Where another rank's is not, this rank goes on when
/// that has ended.
fn check_same_model(
    group: &ProcessGroup,
    source: usize,
    variables: &[(String, Tensor)],
) -> Result<()> {
    let mut lines = Vec::with_capacity(variables.len());
    for (name, tensor) in variables {
        lines.push(format!("{} {:?} {:?}", name.replace('\n', " "), tensor.size(), tensor.kind()));
    }
    let Some(difference) = first_mismatch(group, &lines)? else { return Ok(()) };
    let mut digests = vec![0i64; group.world_size()];
    group.all_gather(&[digest(&lines) as i64], &mut digests)?;
    if digests[group.rank()] != digests[source] {
        return Err(Error::Mismatch { rank: job_rank(group), difference });
    }
    Err(Error::Comm(CommError::PeerLost {
        rank: job_rank(group),
        operation: "taking over the weights".into(),
        peer: difference,
    }))
}

/// Gives the tensors of ranks that take them the values that they have on rank `source`.
fn broadcast_tensors(
    group: &ProcessGroup,
    source: usize,
    tensors: &[(String, Tensor)],
    takes: bool,
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
        for mut piece in pieces {
            if !takes {
                piece.iter_mut().for_each(|(_, tensor)| *tensor = tensor.empty_like());
            }
            CoalescedBroadcast::new(group, piece)?.run(group, source)?;
        }
    }
    Ok(())
}
