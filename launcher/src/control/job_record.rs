//! What all agents keep of a job, so that each can lead it.

use serde::{Deserialize, Serialize};

/// Identifies the process of an agent that may lead.
pub type MemberId = u64;

/// An agent whose vote counts, and that may lead.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Member {
    pub id: MemberId,
    /// The address of the store that it serves.
    pub address: String,
}

/// What an agent must know to lead the job. The leader sends each change to all agents.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct JobRecord {
    /// Who founded the job. The agent of the endpoint may found another one when it is started again.
    pub job: MemberId,
    /// Each elected leader has a term of its own.
    pub term: u64,
    /// Each change in a term has a version of its own.
    pub version: u64,
    /// Those that elect the next leader; the present one is the first.
    pub members: Vec<Member>,
    pub progress: Progress,
}

/// How far the job has come.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    pub round: u32,
    /// The restarts that are used up.
    pub restarts: u32,
    /// The number of nodes in the round.
    pub nodes: usize,
    /// The member that has a copy of the round's store: all that any client knows to be there.
    #[serde(default)]
    pub replica: Option<MemberId>,
    /// How the job has ended.
    pub result: Option<JobResult>,
}

impl JobRecord {
    /// Orders the records of a job by age.
    pub fn age(&self) -> (u64, u64) {
        (self.term, self.version)
    }

    pub fn has(&self, id: MemberId) -> bool {
        self.members.iter().any(|member| member.id == id)
    }

    /// Whether more than half of the members are among these.
    pub fn has_majority(&self, among: impl Fn(MemberId) -> bool) -> bool {
        2 * self.members.iter().filter(|member| among(member.id)).count() > self.members.len()
    }
}

/// The end of the job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobResult {
    pub code: u8,
    /// The report to print.
    pub cause: Option<String>,
}
