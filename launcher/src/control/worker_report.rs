//! What the leader is sent through the store of a round.

use serde::{Deserialize, Serialize};

use crate::control::stall::StallUpdate;

/// A message of a worker, or of a replica of the store.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
pub enum WorkerReport {
    /// Whether the replica that was asked for by this number has everything. If not, it is lost.
    Replica { number: u64, is_complete: bool },
    #[serde(skip_serializing)]
    Stall(StallUpdate),
    /// Whether a worker that was started in place of others waits to join the job.
    Newcomer { rank: u32, replacement: u32, waits: bool },
}
