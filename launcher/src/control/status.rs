//! What a job does, as its agents and its leader tell those who watch it.

use serde::{Deserialize, Serialize};

/// What a job does.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobStatus {
    /// The number of the question.
    pub number: u64,
    /// The job's id.
    pub job: String,
    /// In the order of their ranks.
    pub nodes: Vec<NodeStatus>,
    /// The hosts that have not answered in time.
    pub silent: Vec<String>,
    /// Who has joined and left, the oldest first.
    pub changes: Vec<Change>,
}

/// Somebody has joined or left.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Change {
    /// How many seconds ago that was.
    pub seconds_ago: f64,
    pub what: String,
}

/// What the workers of a node do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NodeStatus {
    pub host: String,
    /// How often all workers were started again.
    pub restarts: u32,
    pub workers: Vec<WorkerStatus>,
    /// How many seconds ago workers have done a first step: after their start, and after each change of
    /// the job's ranks.
    pub resumed: Vec<f64>,
}

/// What a worker does.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkerStatus {
    pub rank: u32,
    pub pid: i32,
    /// How often it was started again alone.
    pub replacement: u32,
    pub uptime_seconds: f64,
    /// How it has ended, if it has.
    pub end: Option<String>,
    /// Its resident memory.
    pub memory_bytes: Option<u64>,
    /// The processors' time that it has used.
    pub cpu_seconds: Option<f64>,
    /// None of a program that does not use Flow.
    pub activity: Option<Activity>,
}

/// What a program that uses Flow does.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Activity {
    /// The process that uses it.
    pub pid: i32,
    /// Backwards that have reduced gradients.
    pub steps: u64,
    /// The length of the last step.
    pub step_seconds: Option<f64>,
    /// The time since its end.
    pub since_step: Option<f64>,
    /// The share of the time in which an operation was under way, while the last ones were done.
    pub communication: Option<f64>,
    /// The last operation of each group.
    pub operations: Vec<Operation>,
    /// As [`NodeStatus::resumed`] has it.
    pub resumed: Vec<f64>,
}

/// An operation of a group, as a rank has begun it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Operation {
    pub group: String,
    pub name: String,
    pub sequence: u64,
    pub bucket: Option<u32>,
    /// It is none between two ranks.
    pub is_collective: bool,
    pub is_under_way: bool,
    /// The time since its begin or, if it is over, since its end.
    pub seconds: f64,
}
