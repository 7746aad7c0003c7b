//! The models that checkpoints are made of.

use flow_comm::ProcessGroup;
use tch::{Device, Tensor};

use super::agree::agree;
use super::error::CheckpointError;
use crate::ddp::Ddp;
use crate::error::Result;
use crate::fsdp::Fsdp;
use crate::fully_shard::FullySharded;
use crate::model_check::first_mismatch;

/// A model that [`Checkpoints`](crate::Checkpoints) save: a [`Ddp`], an [`Fsdp`] or a [`FullySharded`].
pub trait CheckpointModel {
    /// Returns the ranks that train it.
    fn group(&self) -> &ProcessGroup;

    /// Waits until the last backward is over on all ranks.
    ///
    /// # Errors
    ///
    /// The backward has failed.
    fn synchronize(&self) -> Result<()>;

    /// Returns the parameters that are each rank's own, as [ignored](crate::FsdpBuilder::ignored_parameters)
    /// ones are. Rank 0's are saved, if they are equal on all ranks.
    fn own_parameters(&self) -> &[(String, Tensor)] {
        &[]
    }
}

/// Checks that the ranks of a model have the same in the parameters that are each rank's own. All ranks of
/// the model call this.
pub fn check_own_parameters(model: &impl CheckpointModel) -> super::Result<()> {
    let parameters = model.own_parameters();
    if parameters.is_empty() {
        return Ok(());
    }
    let lines = parameters.iter().map(|(name, tensor)| described(name, tensor));
    let lines = agree(model.group(), lines.collect::<super::Result<Vec<_>>>())?;
    let Some(difference) = first_mismatch(model.group(), &lines)? else { return Ok(()) };
    let reason = format!(
        "{difference}, and one of them is kept: give them the same values, or save them on each rank, in a \
         VarStore of their own"
    );
    Err(CheckpointError::unfit("save", "the ignored parameters", reason))
}

/// Describes a parameter and its elements.
fn described(name: &str, tensor: &Tensor) -> super::Result<String> {
    let memory = tensor.detach().to_device(Device::Cpu).contiguous().view([-1]);
    let bytes = flow_autograd::bytes(&memory);
    let bytes = bytes.map_err(|error| CheckpointError::unfit("save", name, error))?;
    let sum = blake3::hash(bytes).to_hex();
    Ok(format!("{name} {:?} {:?} of the BLAKE3 {sum}", tensor.size(), tensor.kind()))
}

impl<M> CheckpointModel for Ddp<M> {
    fn group(&self) -> &ProcessGroup {
        Ddp::group(self)
    }

    fn synchronize(&self) -> Result<()> {
        Ddp::synchronize(self)
    }

    fn own_parameters(&self) -> &[(String, Tensor)] {
        &self.ignored.parameters
    }
}

impl<M> CheckpointModel for Fsdp<M> {
    fn group(&self) -> &ProcessGroup {
        Ddp::group(self)
    }

    fn synchronize(&self) -> Result<()> {
        Ddp::synchronize(self)
    }

    fn own_parameters(&self) -> &[(String, Tensor)] {
        &self.ignored.parameters
    }
}

impl<M> CheckpointModel for FullySharded<M> {
    fn group(&self) -> &ProcessGroup {
        FullySharded::group(self)
    }

    fn synchronize(&self) -> Result<()> {
        FullySharded::synchronize(self)
    }
}
