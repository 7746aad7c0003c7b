//! What agents and the coordinator tell each other.

use serde::{Deserialize, Serialize};

use crate::agent::exit_status::ExitStatus;
use crate::control::assignment::RankAssignment;

/// An agent: flow-launch on one node.
pub type AgentId = u64;

/// The agent of the leading node, in which the coordinator runs.
pub const LEADER: AgentId = 0;

/// A node, as its agent describes it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Node {
    pub host: String,
    /// Where the others reach it.
    pub address: String,
    /// Its place where it was given one.
    pub node_rank: Option<u32>,
    pub local_world_size: u32,
    pub role: String,
    /// `--nnodes`, by which all must go.
    pub nodes: (u32, u32),
}

/// What an agent tells.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum AgentEvent {
    /// It is there and can start workers.
    Joined { node: Node },
    /// A worker has failed; the agent stops its others.
    Failed { round: u32, failure: Failure },
    /// A worker has ended, in these words: its peers may ask.
    Exited { round: u32, rank: u32, end: String },
    /// All its workers have ended well.
    Finished { round: u32 },
    /// All its workers are gone, after a failure or an order. `cause` tells of its first failure in
    /// full.
    Stopped { round: u32, cause: Option<String> },
    /// It was sent a signal and will end.
    Leaving { signal: i32 },
    /// It has ended. Told in its name if it could not.
    Gone { why: String },
}

/// The first failure on a node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Failure {
    /// In a line.
    pub summary: String,
    pub end: ExitStatus,
}

/// What an agent is to do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Command {
    Start {
        round: u32,
        assignment: RankAssignment,
    },
    /// Stop the workers; `why` is for the user.
    Stop {
        round: u32,
        why: Option<String>,
    },
    /// Tell the user.
    Print(String),
    /// The job is over.
    Finish(JobResult),
}

/// How the job ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobResult {
    pub code: u8,
    /// What to say about it.
    pub cause: Option<String>,
}

/// What an agent hears.
#[derive(Debug)]
pub enum ControlMessage {
    Command(Command),
    /// It takes long to join; for the user.
    Notice(String),
    /// The coordinator cannot be reached any more, or refuses this node.
    Disconnected(String),
}

/// What is worth an event.
#[derive(Debug)]
pub enum ClusterEvent {
    Joined { host: String },
    Lost { host: String, reason: String },
    Hang { report: String },
}

/// Where an agent finds its command of this number.
pub fn command_key(agent: AgentId, number: u64) -> String {
    format!("commands/{agent}/{number}")
}
