//! Failures of the device and of NCCL, as a process group's errors.

use super::communicator::CommunicatorError;
use crate::error::Error;
use crate::failure::Failure;

/// The reason, in words, for which an operation could not be enqueued.
pub struct EnqueueError(pub String);

impl From<flow_kernels::cuda::Error> for EnqueueError {
    fn from(error: flow_kernels::cuda::Error) -> Self {
        EnqueueError(error.to_string())
    }
}

impl From<CommunicatorError> for EnqueueError {
    fn from(error: CommunicatorError) -> Self {
        EnqueueError(match error {
            CommunicatorError::Nccl(error) => error.to_string(),
            CommunicatorError::Cancelled(error) => error.to_string(),
            CommunicatorError::Aborted => "the communicator has been aborted".into(),
        })
    }
}

/// Returns the error of an operation that the system, the device or NCCL refused.
pub fn system_error(failure: &Failure, operation: &str, reason: String) -> Error {
    Error::System { rank: failure.core.world.rank, operation: operation.into(), reason }
}
