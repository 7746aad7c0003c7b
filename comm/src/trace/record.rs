//! What is recorded of an operation.

use std::time::Duration;

/// One operation of a group on this rank. Times are those of the machine's monotonic clock.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    /// The group's name, alike on all its ranks.
    pub group: String,
    /// The operation's number in its group. Collectives have one count, on the host and on GPUs
    /// alike. This rank's messages have a count of their own.
    pub sequence: u64,
    /// Its name, such as `all_reduce`.
    pub operation: &'static str,
    /// How many bytes this rank contributes.
    pub bytes: u64,
    /// The bucket that is reduced, if it is one.
    pub bucket: Option<u32>,
    /// What moves the data: `shm` on one node, the transport between nodes (`tcp`, `mpi`), or `nccl`.
    pub backend: &'static str,
    /// When the program asked for it.
    pub queued: Duration,
    /// When it began.
    pub started: Duration,
    /// When it was over, or failed; None while it is under way.
    pub done: Option<Duration>,
    /// Whether it failed.
    pub has_failed: bool,
}
