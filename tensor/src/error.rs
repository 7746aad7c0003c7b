//! Errors of collectives on tensors.

use flow_comm::ProcessGroup;
use tch::TchError;

/// Errors of collectives on tensors. Ranks are those in the job.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] flow_comm::Error),
    /// A tensor does not fit the operation, or libtorch failed.
    #[error("rank {rank}: {operation}: {reason}")]
    Tensor {
        /// This rank.
        rank: usize,
        /// The operation.
        operation: &'static str,
        /// The cause, and what would be right.
        reason: String,
    },
    /// The device that was asked for cannot be used.
    #[error("rank {rank}: choosing a device: {reason}")]
    Device {
        /// This rank.
        rank: usize,
        /// The lack, and what to do.
        reason: String,
    },
}

/// Result of collectives on tensors.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Returns this rank's number in the job, which errors of sub-groups use too.
pub(crate) fn job_rank(group: &ProcessGroup) -> usize {
    group.ranks()[group.rank()]
}

/// Makes errors of this rank's `operation`.
pub(crate) fn failed(group: &ProcessGroup, operation: &'static str) -> impl Fn(String) -> Error {
    let rank = job_rank(group);
    move |reason| Error::Tensor { rank, operation, reason }
}

/// Makes errors of libtorch errors of this rank's `operation`.
pub(crate) fn torch_failed(
    group: &ProcessGroup,
    operation: &'static str,
) -> impl Fn(TchError) -> Error {
    let failed = failed(group, operation);
    move |error| failed(error.to_string())
}
