//! The messages between agents and the coordinator.

use serde::{Deserialize, Serialize};

use crate::agent::exit_status::ExitStatus;
use crate::control::assignment::{RankAssignment, RendezvousStoreInfo};
use crate::control::job_record::{JobRecord, JobResult, Member};
use crate::control::node::Node;
use crate::control::status::NodeStatus;
use crate::trace::folder::Piece;

/// An agent: flow-launch on one node.
pub type AgentId = u64;

/// The agent of the leading node, in which the coordinator runs.
pub const LEADER: AgentId = 0;

/// An event that an agent sends to the coordinator.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum AgentEvent {
    /// The agent can start workers. `kept`: those of the round that it has from another leader; it
    /// can start others once it has said that these are stopped.
    Joined {
        node: Node,
        #[serde(default)]
        kept: Option<KeptWorkers>,
    },
    /// The agent may be made a member of those that elect the next leader. It says so before it joins.
    /// `term`: the latest that it knows. `record`: what it had from the last leader.
    Candidate { member: Member, term: u64, record: JobRecord },
    /// It has the record of this age.
    Has { age: (u64, u64) },
    /// A worker has failed; the agent stops its others.
    Failed { round: u32, failure: Failure },
    /// A worker has ended; `end` is the text that its peers can read in their store. `replacement`:
    /// the number of workers that had this rank before in the round. `failure`: how it failed, if
    /// the job may go on in place; the agent waits for the coordinator's verdict.
    Exited { round: u32, rank: u32, replacement: u32, end: String, failure: Option<Failure> },
    /// All its workers have succeeded.
    Finished { round: u32 },
    /// All its workers are gone, after a failure or a command. `cause` is the full report on its
    /// first failure.
    Stopped { round: u32, cause: Option<String> },
    /// A part of the timeline of one of its ranks, for `--trace`.
    Trace { round: u32, piece: Piece },
    /// What the workers of its node do, as [`Command::Report`] has asked.
    Status { number: u64, status: NodeStatus },
    /// Somebody who watches the job, and is no agent, asks what it does. The answer is at
    /// [`status_key`], with the same number.
    Watch { number: u64 },
    /// It received a signal and will end.
    Leaving { signal: i32 },
    /// It has ended. The store sends this on its behalf (its last will) if it could not.
    Gone { why: String },
}

/// The workers that an agent keeps when it loses the leader, as it tells the next one.
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
    Lost(ExitStatus),
}

impl WorkerEnd {
    /// Returns how the process has ended.
    pub fn status(&self) -> ExitStatus {
        match self {
            WorkerEnd::Succeeded => ExitStatus::Exit(0),
            WorkerEnd::Failed(failure) => failure.end,
            WorkerEnd::Lost(end) => *end,
        }
    }
}

/// The failure of a worker, or the first one on a node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Failure {
    /// One line.
    pub summary: String,
    pub end: ExitStatus,
}

/// What follows the failure of a worker of a job that goes on in place.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Verdict {
    /// Another one is started in its place.
    Replace,
    /// The others go on without it.
    GoOn,
    /// The job fails.
    Fail,
}

/// A command of the coordinator to an agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Command {
    Start {
        round: u32,
        assignment: RankAssignment,
    },
    /// Keep the workers that another leader has had started; these are the stores now.
    Keep {
        round: u32,
        stores: RendezvousStoreInfo,
    },
    /// Keep a copy of the store of the round, with this number.
    Replicate {
        round: u32,
        number: u64,
    },
    /// Stop the workers; `why` is for the user.
    Stop {
        round: u32,
        why: Option<String>,
    },
    /// Do this about the worker with this rank, which has failed.
    Decide {
        round: u32,
        rank: u32,
        verdict: Verdict,
    },
    /// Kill the worker with this rank, unless another one has it by now.
    Kill {
        round: u32,
        rank: u32,
        replacement: u32,
    },
    /// Say what the workers do, with this number.
    Report {
        number: u64,
    },
    /// Print a notice.
    Print(String),
    /// Keep this, in case the leader is lost.
    Record(JobRecord),
    /// This agent does not lead, or no longer: look for the one that does.
    Rejoin,
    /// The job is over.
    Finish(JobResult),
}

/// A message that an agent receives.
#[derive(Debug)]
pub enum ControlMessage {
    Command(Command),
    /// Joining takes long; for the user.
    Notice(String),
    /// The coordinator cannot be reached, or refuses this node.
    Disconnected(Loss),
    /// The node led the job, and may do so no more.
    SteppedDown(String),
}

/// The loss of the leader.
#[derive(Debug)]
pub struct Loss {
    pub why: String,
    /// Nothing was heard of it for long; else the connection has ended.
    pub is_silent: bool,
    /// The agent had found it, and may look for another one.
    pub was_found: bool,
}

/// Something that the leader has learnt, for `--events`.
#[derive(Debug)]
pub enum ClusterEvent {
    Joined {
        host: String,
    },
    Lost {
        host: String,
        reason: String,
    },
    Hang {
        report: String,
    },
    /// A part of another node's timeline.
    Trace(Piece),
}

/// Returns the key of an agent's command of this number.
pub fn command_key(agent: AgentId, number: u64) -> String {
    format!("commands/{agent}/{number}")
}

/// The key that is set once the job is over, for those who watch it.
pub const OVER_KEY: &str = "over";

/// Returns the key of the answer to one who watches the job.
pub fn status_key(watcher: AgentId) -> String {
    format!("status/{watcher}")
}
