//! The workers that an agent keeps when it loses the leader, as it tells the next one.

use serde::{Deserialize, Serialize};

use crate::control::protocol::Failure;

/// The workers of an agent in a round.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KeptWorkers {
    pub round: u32,
    /// In the order of their ranks.
    pub workers: Vec<KeptWorker>,
    /// All have ended, and the agent has done with them.
    pub is_finished: bool,
}

/// One of them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KeptWorker {
    pub rank: u32,
    /// The number of workers that had this rank before in the round.
    pub replacement: u32,
    pub end: Option<WorkerEnd>,
}

/// How a worker has ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum WorkerEnd {
    Succeeded,
    /// The coordinator has yet to say what follows.
    Failed(Failure),
    /// The others go on without it.
    Lost,
}
