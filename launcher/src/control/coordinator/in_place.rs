//! `--elastic in-place`: what follows when a worker fails or hangs.

use std::time::Instant;

use crate::agent::exit_status::ExitStatus;
use crate::control::coordinator::Coordinator;
use crate::control::job_phase::JobPhase;
use crate::control::protocol::{AgentId, Command, Failure, LEADER};
use crate::control::stall::Hang;

/// Exit code of a job that hung; `timeout` uses the same.
const HUNG: i32 = 124;

impl Coordinator {
    /// Notes that the workers hang. In place, the one that all others wait for is killed, if the job
    /// can lose it. Else this counts as a failure.
    pub fn hung(&mut self, hang: Hang, now: Instant) -> Vec<(AgentId, Command)> {
        let Hang { mut report, culprit } = hang;
        let in_place = self.in_place.as_ref().filter(|_| self.phase == JobPhase::Running);
        if let Some(in_place) = in_place
            && let Some(rank) = culprit
            && let Some((agent, replacement)) = in_place.expendable(rank)
        {
            let round = self.round;
            self.commands.push((agent, Command::Kill { round, rank, replacement }));
            let why = "the others have waited for it as long as --hang-timeout";
            return self.notify(&format!("rank {rank} is killed: {why}"));
        }
        if in_place.is_some() && culprit.is_none() {
            report += "; as there is no one rank that all others wait for, the job ends";
        }
        let failure = Failure { summary: report, end: ExitStatus::Exit(HUNG) };
        self.failed(LEADER, failure, now);
        std::mem::take(&mut self.commands)
    }

    /// Returns the ranks of an agent's workers that run in place, each with the number of those before
    /// it.
    pub fn running_in_place(&self, agent: AgentId) -> Vec<(u32, u32)> {
        self.in_place.as_ref().map(|in_place| in_place.running_at(agent)).unwrap_or_default()
    }

    /// Notes that a worker has ended, which the job may outlive.
    pub(super) fn exited(&mut self, agent: AgentId, rank: u32, failure: Option<String>) {
        let Some(in_place) = self.in_place.as_mut().filter(|_| self.phase == JobPhase::Running)
        else {
            return;
        };
        let Some(failure) = failure else { return in_place.succeeded(rank) };
        let (verdict, notice) = in_place.failed(rank);
        if let Some(notice) = notice {
            self.print(&format!("{failure}; {notice}"));
        }
        self.commands.push((agent, Command::Decide { round: self.round, rank, verdict }));
    }
}
