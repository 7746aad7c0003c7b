//! Errors of process groups.

use std::time::Duration;

/// Errors of process groups. Every message names this rank, the operation and, where there is one,
/// the peer.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// The environment does not describe a rank.
    #[error(transparent)]
    Environment(#[from] crate::env::EnvError),
    /// Ranks could not find each other.
    #[error("rank {rank}: joining the process group failed: {reason}")]
    Join {
        /// This rank.
        rank: usize,
        /// The cause, and what to do.
        reason: String,
    },
    /// An argument that cannot work on any rank, found before anything was sent.
    #[error("rank {rank}: {operation}: {reason}")]
    Argument {
        /// This rank.
        rank: usize,
        /// The call.
        operation: String,
        /// The mistake, and what would be right.
        reason: String,
    },
    /// Ranks called different operations, or the same one with different sizes or types.
    #[error(
        "rank {rank}: ranks disagree about the next collective: {detail}; every rank must call the \
         same operations in the same order with the same sizes"
    )]
    Mismatch {
        /// This rank.
        rank: usize,
        /// The operation of each side.
        detail: String,
    },
    /// Some ranks did not arrive in time.
    #[error("rank {rank}: {operation} timed out after {timeout:?}: waited for {missing}")]
    Timeout {
        /// This rank.
        rank: usize,
        /// Name and sequence number of the operation.
        operation: String,
        /// The time that this rank was to wait.
        timeout: Duration,
        /// The ranks that had not arrived, and how far they were.
        missing: String,
    },
    /// A rank died, or left the group, while others needed it.
    #[error("rank {rank}: {operation} failed: {peer}")]
    PeerLost {
        /// This rank.
        rank: usize,
        /// Name and sequence number of the operation.
        operation: String,
        /// The rank that is lost, its process and how it ended.
        peer: String,
    },
    /// The group failed before; it cannot be used any more.
    #[error(
        "rank {rank}: {operation} failed: the process group is unusable since an earlier failure: \
         {cause}"
    )]
    Poisoned {
        /// This rank.
        rank: usize,
        /// Name and sequence number of the operation.
        operation: String,
        /// The first failure, as the rank that saw it described it.
        cause: String,
        /// Whether that failure was a [`Error::Mismatch`].
        is_mismatch: bool,
    },
    /// The program wanted to stop waiting: see [`set_interrupt_check`](crate::set_interrupt_check).
    #[error("rank {rank}: {operation} failed: rank {rank} was interrupted while it waited")]
    Interrupted {
        /// This rank.
        rank: usize,
        /// Name and sequence number of the operation.
        operation: String,
    },
    /// This process was forked from a rank, which alone is the member of its groups.
    #[error(
        "rank {rank}: {operation} failed: this process (pid {pid}) was forked from {parent}, and \
         only that is a member of the group: join in the forked process as a rank of its own, or \
         start it as a program (std::process::Command)"
    )]
    Forked {
        /// The rank that this process was forked from.
        rank: usize,
        /// The operation that was attempted.
        operation: String,
        /// This process.
        pid: u32,
        /// The process of that rank.
        parent: String,
    },
    /// The system refused something.
    #[error("rank {rank}: {operation} failed: {reason}")]
    System {
        /// This rank.
        rank: usize,
        /// The operation that was attempted.
        operation: String,
        /// The system's answer and what to do.
        reason: String,
    },
}

impl Error {
    /// Whether ranks called different operations, as this rank or another one has found out.
    pub fn is_mismatch(&self) -> bool {
        match self {
            Self::Mismatch { .. } => true,
            Self::Poisoned { is_mismatch, .. } => *is_mismatch,
            _ => false,
        }
    }
}

/// Result of process group operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;
