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
    /// How many seconds ago the agents were asked: no answer says what was before.
    pub asked_seconds_ago: f64,
    /// The addresses of agents that say who leads, should this one lead no more.
    pub members: Vec<String>,
}

/// Somebody has joined or left.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Change {
    /// How many seconds ago that was.
    pub seconds_ago: f64,
    pub what: String,
    /// Ranks that took part had to stop, or to go on without somebody.
    pub interrupts: bool,
}

/// What the workers of a node do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NodeStatus {
    pub host: String,
    /// How often all workers were started again.
    pub restarts: u32,
    pub workers: Vec<WorkerStatus>,
    /// [`Activity::resumed`] of workers that are gone.
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
    /// The groups that it is in.
    pub groups: Vec<GroupActivity>,
    /// How many seconds ago it has done a first step: after its start, and after each change of the job's ranks.
    pub resumed: Vec<f64>,
}

impl NodeStatus {
    /// Adds the time since this was written.
    pub fn age(&mut self, seconds: f64) {
        self.resumed.iter_mut().for_each(|resumed| *resumed += seconds);
        for activity in self.workers.iter_mut().filter_map(|worker| worker.activity.as_mut()) {
            activity.since_step.iter_mut().for_each(|since| *since += seconds);
            activity.resumed.iter_mut().for_each(|resumed| *resumed += seconds);
            for group in &mut activity.groups {
                for operation in [&mut group.collective, &mut group.message].into_iter().flatten() {
                    operation.seconds += seconds;
                }
            }
        }
    }
}

/// What a rank does in a group.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GroupActivity {
    pub name: String,
    /// The collective that it has begun last, if any.
    pub collective: Option<Operation>,
    /// The message to or from another rank that is longest under way, or else has begun last.
    pub message: Option<Operation>,
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
