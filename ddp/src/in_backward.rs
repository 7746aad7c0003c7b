//! The optimizers that step in the backward of a [`Ddp`](crate::Ddp).

use flow_comm::ProcessGroup;

use crate::error::Result;
use crate::optimizer_in_backward::{self, OptimizerInBackward};
use crate::parameter::Parameter;
use crate::zero::ZeroInBackward;

/// An optimizer that steps in backward.
pub(crate) enum InBackward {
    /// All of it on each rank.
    Whole(OptimizerInBackward),
    /// A part on each rank.
    Sharded(ZeroInBackward),
}

impl InBackward {
    /// Returns the option of the builder.
    pub fn option(&self) -> &'static str {
        match self {
            Self::Whole(_) => optimizer_in_backward::OPERATION,
            Self::Sharded(_) => "hook_with_zero_step",
        }
    }

    /// Returns the group in which ranks wait for each other's parts.
    pub fn group(&self) -> Option<&ProcessGroup> {
        match self {
            Self::Whole(_) => None,
            Self::Sharded(optimizer) => Some(optimizer.group()),
        }
    }

    /// Waits until the last step is over, on a device too.
    pub fn synchronize(&self) -> Result<()> {
        match self {
            Self::Whole(_) => Ok(()),
            Self::Sharded(optimizer) => optimizer.synchronize(),
        }
    }

    /// Begins the step of a backward.
    pub fn begin(&self) -> Result<()> {
        match self {
            Self::Whole(_) => Ok(()),
            Self::Sharded(optimizer) => optimizer.begin(),
        }
    }

    /// Applies the gradient of a parameter, and frees it.
    pub fn step(&self, parameter: &Parameter) -> Result<()> {
        match self {
            Self::Whole(optimizer) => optimizer.step(parameter.position, &parameter.tensor),
            Self::Sharded(optimizer) => optimizer.step(parameter.position),
        }
    }

    /// Ends the step: all gradients are applied.
    pub fn finish(&self) -> Result<()> {
        match self {
            Self::Whole(_) => Ok(()),
            Self::Sharded(optimizer) => optimizer.finish(),
        }
    }
}
