//! The coordinator's knowledge of agents, and the phases of a job.

use std::time::Instant;

use crate::control::node::Node;
use crate::control::protocol::{AgentId, Failure};

/// An agent that has joined.
pub struct AgentRecord {
    pub node: Node,
    pub state: AgentState,
    /// Why its workers stopped, in its words: the root cause of a failure.
    pub cause: Option<String>,
    /// The round has no place for it, and it was informed of that.
    pub is_spare: bool,
}

/// An agent in the present round.
#[derive(Clone, Copy, PartialEq)]
pub enum AgentState {
    /// Waits for a round.
    Idle,
    Running,
    Finished,
}

/// The phase of the job as a whole.
#[derive(Clone, Debug, PartialEq)]
pub enum JobPhase {
    /// Waiting for agents. `enough` is when the least number was reached, `notice` when to report
    /// that some are missing.
    Gathering {
        since: Instant,
        enough: Option<Instant>,
        notice: Instant,
    },
    Running,
    Stopping {
        why: StopReason,
        deadline: Instant,
    },
    Over,
}

/// The reason for which all workers of a round are stopped.
#[derive(Clone, Debug, PartialEq)]
pub enum StopReason {
    Failure {
        agent: AgentId,
        failure: Failure,
        at: Instant,
    },
    /// A node that the job needs is lost.
    Lost {
        summary: String,
    },
    /// Nodes have joined or left.
    Change,
    /// The others have ended well: workers that wait to join have nothing to do.
    Done,
    Signal {
        signal: i32,
        cause: Option<String>,
    },
}
