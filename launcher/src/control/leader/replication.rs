//! The copy of the workers' store that a member keeps, so that the workers go on if it leads next.
//!
//! In the record is the member that has all that any client knows to be in the store. When it is
//! lost, a majority must know so before clients get replies again: else it could be elected with less.

use std::time::Instant;

use super::Leader;
use super::round::{ReplicaState, WORKERS_KEY};
use crate::control::job_record::{MemberId, Progress};
use crate::control::protocol::{AgentId, Command};

impl Leader {
    /// Returns what another agent must know to go on in this one's place.
    pub(super) fn progress(&self) -> Progress {
        let mut progress = self.coordinator.progress();
        if let ReplicaState::Complete(_, member) = self.replica {
            progress.replica = Some(member);
        }
        progress
    }

    /// Sees to it that a member has a copy of the store, with the table of workers.
    pub(super) fn replicate(&mut self) {
        let Some(table) = self.coordinator.worker_table() else { return };
        let Some(round) = self.round.as_mut().filter(|_| self.linger_until.is_none()) else {
            return;
        };
        // Plain data: it cannot fail.
        let table = serde_json::to_vec(table).unwrap_or_default();
        if round.table != table {
            round.store.set(WORKERS_KEY, &table);
            round.table = table;
        }
        if let ReplicaState::Asked(_, _, since) = self.replica
            && since.elapsed() >= self.lease
        {
            self.replica = ReplicaState::Lost;
        }
        self.update_record();
        let election = &self.candidate.election;
        let Some(round) = self.round.as_ref().filter(|_| election.is_known()) else { return };
        if let ReplicaState::Lost = self.replica {
            round.store.go_alone();
            self.replica = ReplicaState::None;
        }
        if let ReplicaState::None = self.replica {
            let number = round.number;
            let members = &election.record().members;
            // In the order in which they stand for election.
            let connected = members.iter().find_map(|member| {
                let (agent, _) = self.members.iter().find(|(_, id)| **id == member.id)?;
                Some((*agent, member.id))
            });
            if let Some((agent, member)) = connected {
                self.replica = ReplicaState::Asked(agent, member, Instant::now());
                self.command(agent, Command::Replicate { round: number });
            }
        }
    }

    /// Notes that the replica of a member has everything, or is lost.
    pub(super) fn note_replica(&mut self, of: MemberId, is_complete: bool) {
        match self.replica {
            ReplicaState::Asked(agent, member, _) if member == of && is_complete => {
                self.replica = ReplicaState::Complete(agent, member);
            }
            ReplicaState::Asked(_, member, _) | ReplicaState::Complete(_, member)
                if member == of && !is_complete =>
            {
                self.replica = ReplicaState::Lost;
            }
            _ => {}
        }
    }

    /// Notes that an agent is gone, with its replica if it had one.
    pub(super) fn lose_replica(&mut self, of: AgentId) {
        if let ReplicaState::Asked(agent, ..) | ReplicaState::Complete(agent, _) = self.replica
            && agent == of
        {
            self.replica = ReplicaState::Lost;
        }
    }
}
