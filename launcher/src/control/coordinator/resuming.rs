//! What follows when another node leads the job.

use std::time::Instant;

use crate::control::coordinator::{Coordinator, REJOINING};
use crate::control::job_phase::{AgentRecord, AgentState, JobPhase, StopReason};
use crate::control::job_record::{JobResult, Progress};
use crate::control::node::Node;
use crate::control::protocol::{AgentId, Command, KeptWorkers, WorkerEnd};
use crate::control::worker_table::WorkerTable;
use crate::job::Job;
use crate::report::text::ranks;

impl Coordinator {
    /// Makes the coordinator of a job that has come so far, and whose leading node is lost. Its workers
    /// go on if there is the last leader's table of them.
    pub fn resuming(
        job: &Job,
        progress: &Progress,
        table: Option<WorkerTable>,
        now: Instant,
    ) -> Coordinator {
        let mut coordinator = Coordinator::new(job, now);
        if progress.round == 0 && progress.result.is_none() {
            return coordinator;
        }
        coordinator.round = progress.round;
        coordinator.awaited = Some(progress.nodes.saturating_sub(1));
        coordinator.nodes = progress.nodes;
        coordinator.result = progress.result.clone();
        if coordinator.result.is_some() {
            coordinator.phase = JobPhase::Over;
        } else if let Some(mut table) = table {
            coordinator.lost_workers = table.resume();
            coordinator.in_place = Some(table);
            coordinator.phase = JobPhase::Running;
            coordinator.awaited_until = Some(now + REJOINING);
        } else {
            coordinator.use_restart(job, progress.restarts);
        }
        coordinator
    }

    /// All workers start again. As when another node is lost, that uses up a restart.
    fn use_restart(&mut self, job: &Job, before: u32) {
        let is_restart = !self.is_elastic() || job.is_in_place;
        let restarts = before + is_restart as u32;
        match &mut self.in_place {
            Some(in_place) => in_place.start_over(restarts),
            None => self.failures = restarts,
        }
        if restarts > job.max_restarts && is_restart {
            let cause = Some("the leading node was lost, and no restart is left".into());
            self.result = Some(JobResult { code: 1, cause });
            self.phase = JobPhase::Over;
        }
    }

    /// Takes an agent that has kept its workers, if this round is still theirs. Else it must stop them
    /// before it can start others.
    pub(super) fn rejoined(&mut self, agent: AgentId, node: Node, kept: KeptWorkers, now: Instant) {
        let is_present = self.phase == JobPhase::Running && kept.round == self.round;
        let in_place = self.in_place.as_mut().filter(|_| is_present);
        if !in_place.is_some_and(|in_place| in_place.rejoin(agent, &kept)) {
            match &mut self.in_place {
                Some(in_place) if is_present => in_place.note_refused(&kept),
                // The last leader was lost before all knew of its last round.
                _ if self.phase != JobPhase::Running => self.round = self.round.max(kept.round),
                _ => {}
            }
            let why = Some("the job goes on without the workers of this node".into());
            self.commands.push((agent, Command::Stop { round: kept.round, why }));
            self.stopping.insert(agent, node);
            return;
        }
        let state = if kept.is_finished { AgentState::Finished } else { AgentState::Running };
        self.agents.insert(agent, AgentRecord { node, state, cause: None, is_spare: false });
        let stores = Default::default();
        self.commands.push((agent, Command::Keep { round: self.round, stores }));
        for worker in kept.workers {
            if let Some(WorkerEnd::Failed(failure)) = worker.end {
                self.exited(agent, worker.rank, Some(failure), now);
            }
        }
        self.check_members(now);
    }

    /// Whether the last leader's workers, or those of nodes that have yet to come, may start again.
    pub(super) fn is_incomplete(&self) -> bool {
        let in_place = self.in_place.as_ref().filter(|_| self.awaited_until.is_some());
        in_place.is_some_and(|in_place| !in_place.awaited().is_empty() || in_place.has_vacancy())
    }

    /// Gives up waiting for nodes whose agents have not come to this leader.
    pub(super) fn end_rejoining(&mut self, now: Instant) {
        if self.awaited_until.take_if(|until| *until <= now).is_none() {
            return;
        }
        self.awaited = None;
        let Some(in_place) = &mut self.in_place else { return };
        let mut absent = Vec::new();
        for (place, ranks) in in_place.awaited() {
            absent.extend(ranks);
            self.lost_workers.extend(in_place.lost(place));
        }
        if self.phase != JobPhase::Running || !in_place.has_vacancy() {
            return self.check_members(now);
        }
        let mut summary = "the leading node is lost".to_string();
        if !absent.is_empty() {
            summary += &format!(", and {} with nodes that have not come back", ranks(&absent));
        }
        for spare in self.spares() {
            self.fill_vacancy(spare, &summary);
        }
        let Some(in_place) = &mut self.in_place else { return };
        if !in_place.has_vacancy() {
            return;
        }
        match in_place.smaller() {
            Some(notice) => self.print(&format!("{summary}; {notice}")),
            // Another node may come.
            None if in_place.restarts_left() > 0 => {
                in_place.start_over(in_place.restarts() + 1);
                self.stop(StopReason::Change, Some(format!("{summary}; all start again")), now);
            }
            None => self.stop(StopReason::Lost { summary }, None, now),
        }
    }
}
