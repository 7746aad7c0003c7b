//! The record of an operation.

use std::time::Duration;

/// An operation of a group on this rank. Times are those of the machine's monotonic clock.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    /// The group's name, alike on all its ranks.
    pub group: String,
    /// The operation's number in its group. Collectives have one count, on the host and on GPUs
    /// alike. This rank's messages have a count of their own.
    pub sequence: u64,
    /// Its name, such as `all_reduce`.
    pub operation: &'static str,
    /// The number of bytes that this rank contributes.
    pub bytes: u64,
    /// The bucket that is reduced, if it is one; [`JOIN_NOTICE`](crate::JOIN_NOTICE) is none.
    pub bucket: Option<u32>,
    /// The part that moves the data: `shm` on one node, the transport between nodes (`tcp`, `mpi`),
    /// or `nccl`.
    pub backend: &'static str,
    /// The time at which the program asked for it.
    pub queued: Duration,
    /// The time at which it began.
    pub started: Duration,
    /// The time at which it was over, or failed; None while it is under way.
    pub done: Option<Duration>,
    /// Whether it failed.
    pub has_failed: bool,
}
