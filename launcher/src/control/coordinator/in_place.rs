//! `--elastic in-place`: what follows when a worker fails or hangs.

use std::time::Instant;

use crate::agent::exit_status::ExitStatus;
use crate::control::coordinator::Coordinator;
use crate::control::job_phase::{AgentState, JobPhase, StopReason};
use crate::control::protocol::{AgentId, Command, Failure, LEADER, Verdict};
use crate::control::stall::Hang;
use crate::control::worker_table::WorkerTable;
use crate::report::text::ranks;

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

    /// Whether the job goes on in place.
    pub fn is_in_place(&self) -> bool {
        self.in_place.is_some()
    }

    /// Returns the workers of all nodes, if they may go on under another leader.
    pub fn worker_table(&self) -> Option<&WorkerTable> {
        self.in_place.as_ref().filter(|_| self.phase == JobPhase::Running)
    }

    /// Whether a worker runs that was started in place of so many others with its rank.
    pub fn runs(&self, rank: u32, replacement: u32) -> bool {
        self.in_place.as_ref().is_none_or(|in_place| in_place.runs(rank, replacement))
    }

    /// Returns the ranks of workers that were lost with their nodes since the last call, each with the
    /// number of those before it.
    pub fn take_lost_workers(&mut self) -> Vec<(u32, u32)> {
        std::mem::take(&mut self.lost_workers)
    }

    /// Notes that a node is lost with its workers. A spare one takes its place, or the others go on
    /// without it, or the job ends.
    pub(super) fn lost(&mut self, agent: AgentId, summary: String, now: Instant) {
        let Some(in_place) = &mut self.in_place else { return };
        self.lost_workers.extend(in_place.lost(agent));
        if self.spares().into_iter().any(|spare| self.fill_vacancy(spare, &summary)) {
            return;
        }
        match self.in_place.as_ref().and_then(WorkerTable::smaller) {
            Some(notice) => self.print(&format!("{summary}; {notice}")),
            None => self.stop(StopReason::Lost { summary }, None, now),
        }
    }

    /// Returns the agents that take no part in the round.
    pub(super) fn spares(&self) -> Vec<AgentId> {
        let idle = self.agents.iter().filter(|(_, agent)| agent.state == AgentState::Idle);
        idle.map(|(spare, _)| *spare).collect()
    }

    /// Gives a node the ranks of one that is lost, if there is one that it fits, and others run;
    /// `why` is for the user.
    pub(super) fn fill_vacancy(&mut self, agent: AgentId, why: &str) -> bool {
        let description = self.describe(agent);
        let (Some(in_place), Some(record)) = (&mut self.in_place, self.agents.get_mut(&agent))
        else {
            return false;
        };
        if in_place.is_idle() {
            return false;
        }
        let Some(assignment) = in_place.take_vacancy(&record.node) else { return false };
        in_place.start(agent, &record.node.role, &assignment);
        record.state = AgentState::Running;
        let first = assignment.first_rank;
        let lost: Vec<u32> = (first..first + assignment.local_world_size).collect();
        let are = if lost.len() == 1 { "is" } else { "are" };
        let notice = format!(
            "{why}; {} {are} started again on {description} ({})",
            ranks(&lost),
            in_place.budget()
        );
        self.print(&notice);
        self.commands.push((agent, Command::Start { round: self.round, assignment }));
        true
    }

    /// Notes whether a worker that was started in place of others waits to join the job.
    pub fn newcomer(
        &mut self,
        rank: u32,
        replacement: u32,
        waits: bool,
        now: Instant,
    ) -> Vec<(AgentId, Command)> {
        if let Some(in_place) = &mut self.in_place {
            in_place.newcomer(rank, replacement, waits);
            self.check_members(now);
        }
        std::mem::take(&mut self.commands)
    }

    /// Notes that a worker has ended, which the job may outlive.
    pub(super) fn exited(
        &mut self,
        agent: AgentId,
        rank: u32,
        failure: Option<Failure>,
        now: Instant,
    ) {
        let Some(in_place) = self.in_place.as_mut().filter(|_| self.phase == JobPhase::Running)
        else {
            return;
        };
        let Some(failure) = failure else {
            in_place.succeeded(rank);
            return self.check_members(now);
        };
        let waited = in_place.is_waiting(rank);
        let (verdict, notice) = in_place.failed(rank);
        if let Some(notice) = notice {
            self.print(&format!("{}; {notice}", failure.summary));
        }
        if !waited {
            self.last_failure = Some((agent, failure));
        } else if verdict == Verdict::Fail {
            // It gives up when nobody is left to take it in.
            self.end_without_members(vec![rank], now);
        }
        self.commands.push((agent, Command::Decide { round: self.round, rank, verdict }));
    }

    /// Ends the job if all workers that run wait to join it.
    pub(super) fn check_members(&mut self, now: Instant) {
        let waiting = self.in_place.as_ref().map(WorkerTable::waiting).unwrap_or_default();
        if !waiting.is_empty() {
            self.end_without_members(waiting, now);
        }
    }

    /// Ends the job if no worker runs that has joined it: well if some have ended well, and else with
    /// the last failure of one that had joined. `waiting` are those that have not.
    fn end_without_members(&mut self, waiting: Vec<u32>, now: Instant) {
        let Some(in_place) = self.in_place.as_ref().filter(|_| self.phase == JobPhase::Running)
        else {
            return;
        };
        if !in_place.is_idle() || in_place.has_failed() {
            return;
        }
        if in_place.has_succeeded() {
            let why = format!("the others have ended well; {} had not joined", ranks(&waiting));
            self.stop(StopReason::Done, Some(why), now);
        } else if let Some((agent, failure)) = self.last_failure.take() {
            self.failed(agent, failure, now);
        }
    }
}
