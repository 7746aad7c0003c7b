//! The errors that a change of the ranks causes.

use std::error::Error as StdError;

use flow_comm::Error as CommError;
use tch::TchError;

use crate::checkpoint::CheckpointError;
use crate::error::Error;

/// Whether the ranks have to change: one was lost, here or before, or others wait to join.
pub fn is_change_of_ranks(error: &(dyn StdError + Send + Sync + 'static)) -> bool {
    for error in causes(error) {
        if matches!(error.downcast_ref(), Some(Error::Newcomers { .. } | Error::RanksChange { .. }))
        {
            return true;
        }
        if let Some(error) = comm_error(error) {
            return is_of_others(error);
        }
        if let Some(TchError::Torch(text)) = error.downcast_ref() {
            return Error::ends_backward(
                text,
                |error| matches!(error, Error::Comm(error) if is_of_others(error)),
            );
        }
    }
    false
}

/// Whether ranks that were lost had parts of the checkpoint.
pub fn are_parts_missing(error: &(dyn StdError + Send + Sync + 'static)) -> bool {
    causes(error)
        .any(|cause| matches!(cause.downcast_ref(), Some(CheckpointError::PartsMissing { .. })))
}

/// Returns an error, its source, the source of that, and so on.
fn causes<'a>(
    error: &'a (dyn StdError + Send + Sync + 'static),
) -> impl Iterator<Item = &'a (dyn StdError + 'static)> {
    let first: &(dyn StdError + 'static) = error;
    std::iter::successors(Some(first), |&error| error.source())
}

/// Whether another rank may be the cause, and this one can go on without it.
fn is_of_others(error: &CommError) -> bool {
    matches!(
        error,
        CommError::PeerLost { .. }
            | CommError::Timeout { .. }
            | CommError::Poisoned { is_mismatch: false, .. }
    )
}

fn comm_error<'a>(error: &'a (dyn StdError + 'static)) -> Option<&'a CommError> {
    if let Some(Error::Comm(error)) = error.downcast_ref() {
        return Some(error);
    }
    if let Some(flow_tensor::Error::Comm(error)) = error.downcast_ref() {
        return Some(error);
    }
    if let Some(CheckpointError::Training(error)) = error.downcast_ref() {
        return comm_error(error);
    }
    error.downcast_ref()
}
