//! Failures of the device and of NCCL, as a process group's errors.

use super::communicator::CommunicatorError;
use super::sys::ncclResult_t;
use crate::error::Error;
use crate::failure::Failure;

/// The reason for which an operation could not be enqueued, or does not end.
pub struct EnqueueError {
    /// In words.
    pub reason: String,
    /// Whether NCCL has lost another rank, of which it does not say which.
    pub lost_a_peer: bool,
}

impl From<flow_kernels::cuda::Error> for EnqueueError {
    fn from(error: flow_kernels::cuda::Error) -> Self {
        Self { reason: error.to_string(), lost_a_peer: false }
    }
}

impl From<CommunicatorError> for EnqueueError {
    fn from(error: CommunicatorError) -> Self {
        let lost_a_peer = matches!(&error, CommunicatorError::Nccl(error) if error.code == ncclResult_t::ncclRemoteError);
        let reason = match error {
            CommunicatorError::Nccl(error) => error.to_string(),
            CommunicatorError::Cancelled(error) => error.to_string(),
            CommunicatorError::Aborted => "the communicator has been aborted".into(),
        };
        Self { reason, lost_a_peer }
    }
}

/// Returns the error of an operation that the system, the device or NCCL refused.
pub fn system_error(failure: &Failure, operation: &str, reason: String) -> Error {
    Error::System { rank: failure.core.world.rank, operation: operation.into(), reason }
}
