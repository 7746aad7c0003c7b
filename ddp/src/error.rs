//! What can go wrong in data-parallel training.

use flow_comm::ProcessGroup;

/// Errors of [`Ddp`](crate::Ddp) and of collectives on tensors. Ranks are those in the job.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] flow_comm::Error),
    /// Backward failed, in libtorch or in reducing gradients.
    #[error("backward: {reason}")]
    Backward {
        /// libtorch's text, or this rank's error.
        reason: String,
    },
    /// libtorch, or the hooks into it, failed.
    #[error("rank {rank}: {operation}: {reason}")]
    Torch {
        /// This rank.
        rank: usize,
        /// What was being done.
        operation: &'static str,
        /// The cause.
        reason: String,
    },
    /// The device that was asked for cannot be used.
    #[error("rank {rank}: choosing a device: {reason}")]
    Device {
        /// This rank.
        rank: usize,
        /// What is missing and what to do.
        reason: String,
    },
    /// A model or an option that data-parallel training cannot work with.
    #[error("rank {rank}: Ddp: {reason}")]
    Model {
        /// This rank.
        rank: usize,
        /// What is wrong and what would be right.
        reason: String,
    },
    /// Ranks wrapped different models; every rank gets this.
    #[error("rank {rank}: Ddp: the model differs between ranks: {difference}")]
    Mismatch {
        /// This rank.
        rank: usize,
        /// The first difference: the parameter and both ranks.
        difference: String,
    },
    /// Some parameters got no gradient in this backward, on some ranks; every rank gets this.
    #[error(
        "rank {rank}: Ddp: some parameters got no gradient in this backward: {missing}; use every parameter in \
         computing the loss, or freeze those parameters before wrapping, or build with find_unused_parameters(true)"
    )]
    MissingGradients {
        /// This rank.
        rank: usize,
        /// Ranks and the names of their parameters.
        missing: String,
    },
}

/// Result of data-parallel training.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// This rank in the job, by which errors call it also in smaller groups.
pub(crate) fn job_rank(group: &ProcessGroup) -> usize {
    group.ranks()[group.rank()]
}
