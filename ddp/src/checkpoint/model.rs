//! The models that checkpoints are made of.

use flow_comm::ProcessGroup;

use crate::ddp::Ddp;
use crate::error::Result;
use crate::fsdp::Fsdp;
use crate::fully_shard::FullySharded;

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
}

impl<M> CheckpointModel for Ddp<M> {
    fn group(&self) -> &ProcessGroup {
        Ddp::group(self)
    }

    fn synchronize(&self) -> Result<()> {
        Ddp::synchronize(self)
    }
}

impl<M> CheckpointModel for Fsdp<M> {
    fn group(&self) -> &ProcessGroup {
        Ddp::group(self)
    }

    fn synchronize(&self) -> Result<()> {
        Ddp::synchronize(self)
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
