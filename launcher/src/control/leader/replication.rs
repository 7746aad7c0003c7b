//! The copy of the workers' store that a member keeps, so that the workers go on if it leads next.
//!
//! In the record is the member that has all that any client knows to be in the store. When it is
//! lost, a majority must know so before clients get replies again: else it could be elected with less.

use std::time::Instant;

use super::Leader;
use super::round::{ReplicaRequest, ReplicaState, WORKERS_KEY};
use crate::control::job_record::Progress;
use crate::control::protocol::{AgentId, Command, KeptWorker, KeptWorkers};

impl Leader {
    /// Returns what another agent must know to go on in this one's place.
    pub(super) fn progress(&self) -> Progress {
        let mut progress = self.coordinator.progress();
        if let ReplicaState::Complete(request) = self.replica {
            progress.replica = Some(request.member);
        }
        progress
    }

    /// Sees to it that a member has a copy of the store, with the table of workers.
    pub(super) fn replicate(&mut self) {
        let is_over = self.linger_until.is_some();
        let is_alone = self.replicas_asked == 0 && !self.candidate.election.has_followers();
        if is_over || is_alone || !self.coordinator.is_in_place() {
            return;
        }
        self.keep_table();
        self.drop_replica();
        self.update_record();
        if !self.candidate.election.is_known() {
            return;
        }
        if let ReplicaState::Lost = self.replica {
            self.round.iter().for_each(|round| round.store.go_alone());
            self.replica = ReplicaState::None;
        }
        if let ReplicaState::None = self.replica {
            self.ask_for_replica();
        }
    }

    /// Puts the table of workers into the store.
    fn keep_table(&mut self) {
        let Some(round) = &mut self.round else { return };
        let table = self.coordinator.worker_table();
        if round.table.as_ref() != table {
            // Plain data: it cannot fail.
            round.store.set(WORKERS_KEY, &serde_json::to_vec(&table).unwrap_or_default());
            round.table = table.cloned();
        }
    }

    /// Drops a replica that is late, or whose member cannot be elected any more.
    fn drop_replica(&mut self) {
        let record = self.candidate.election.record();
        let is_lost = match &self.replica {
            ReplicaState::Asked(request) => {
                request.since.elapsed() >= self.lease || !record.has(request.member)
            }
            ReplicaState::Complete(request) => !record.has(request.member),
            ReplicaState::None | ReplicaState::Lost => false,
        };
        if is_lost {
            self.replica = ReplicaState::Lost;
        }
    }

    /// Asks the first member that has workers, in the order in which they stand for election. Another one
    /// than the last time, if there is one.
    fn ask_for_replica(&mut self) {
        let Some(round) = &self.round else { return };
        let mut able = Vec::new();
        for member in &self.candidate.election.record().members {
            let agent = self.members.iter().find(|(_, id)| **id == member.id);
            if let Some((agent, _)) = agent
                && self.coordinator.has_workers(*agent)
            {
                able.push((*agent, member.id));
            }
        }
        let other = able.iter().find(|(_, member)| Some(*member) != self.last_asked);
        let Some((agent, member)) = other.or(able.first()).copied() else { return };
        self.replicas_asked += 1;
        self.last_asked = Some(member);
        let number = self.replicas_asked;
        let request = ReplicaRequest { agent, member, number, since: Instant::now() };
        self.replica = ReplicaState::Asked(request);
        round.store.admit_replica(number);
        let round = round.number;
        self.command(agent, Command::Replicate { round, number });
    }

    /// Notes that the replica with this number has everything, or is lost.
    pub(super) fn note_replica(&mut self, number: u64, is_complete: bool) {
        match self.replica {
            ReplicaState::Asked(request) if request.number == number && is_complete => {
                self.replica = ReplicaState::Complete(request);
                self.last_asked = None;
            }
            ReplicaState::Asked(request) | ReplicaState::Complete(request)
                if request.number == number && !is_complete =>
            {
                self.replica = ReplicaState::Lost;
            }
            _ => {}
        }
    }

    /// Notes that an agent is gone, with its replica if it had one.
    pub(super) fn lose_replica(&mut self, agent: AgentId) {
        if let ReplicaState::Asked(request) | ReplicaState::Complete(request) = self.replica
            && request.agent == agent
        {
            self.replica = ReplicaState::Lost;
        }
    }

    /// Tells the workers how others of a node have ended, which the last leader may not have done. Takes
    /// from the store which of those that run wait to join the job.
    pub(super) fn note_kept(&mut self, kept: &KeptWorkers) {
        let Some(round) = self.round.as_mut().filter(|round| round.number == kept.round) else {
            return;
        };
        let mut newcomers = Vec::new();
        for KeptWorker { rank, replacement, end } in &kept.workers {
            if let Some(end) = end {
                round.exited(*rank, *replacement, &end.status().to_string());
            } else if *replacement > 0 {
                round.was_replaced(*rank, *replacement - 1);
                newcomers.push((*rank, *replacement, round.waits(*rank, *replacement)));
            }
        }
        for (rank, replacement, waits) in newcomers {
            if let Some(waits) = waits {
                let commands = self.coordinator.newcomer(rank, replacement, waits, Instant::now());
                self.dispatch(commands);
            }
        }
    }
}
