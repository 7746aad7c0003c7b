//! Errors of the optimizer, on all ranks.

use flow_comm::ProcessGroup;

use crate::error::{Error, Result};
use crate::model_check;

/// Returns what this rank has made, if all ranks have made theirs.
pub(super) fn agree<T>(group: &ProcessGroup, made: Result<T>) -> Result<T> {
    model_check::agree(group, made).map_err(|error| match error {
        Error::Peer { rank, reason } => failed(rank, format!("another rank failed: {reason}")),
        own => own,
    })
}

/// Returns an error of the optimizer.
pub(super) fn failed(rank: usize, reason: impl ToString) -> Error {
    Error::Torch { rank, operation: "ZeroRedundancyOptimizer", reason: reason.to_string() }
}
