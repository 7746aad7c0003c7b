//! `--elastic in-place`: a worker that fails is started again alone, and the others go on, under
//! another leader as well.

use crate::agent::Agent;
use crate::agent::worker::Console;
use crate::agent::worker_group::WorkerGroup;
use crate::control::assignment::RendezvousStoreInfo;
use crate::control::protocol::{KeptWorkers, Verdict};
use crate::report::events::JobEvent;
use crate::report::failure::Outcome;

impl Agent {
    /// Does what the coordinator says about a worker that has failed.
    pub fn decide(&mut self, round: u32, rank: u32, verdict: Verdict) {
        let group = self.group.as_mut().filter(|group| group.round == round);
        let Some(group) = group else { return };
        let Some(ended) = group.take_undecided(rank) else { return };
        // Else all workers are being stopped.
        if !group.ended_well() {
            return;
        }
        let goes_on = match verdict {
            Verdict::Replace => self.replace(ended.0),
            Verdict::GoOn => true,
            Verdict::Fail => false,
        };
        if !goes_on {
            self.supervise(&[ended]);
        }
    }

    /// Whether the workers go on while the leader is lost.
    pub(super) fn keeps_workers(&self) -> bool {
        let has_workers = self.present_group().is_some_and(WorkerGroup::ended_well);
        has_workers && self.signalled.is_none() && self.control.outlives_leader()
    }

    /// Returns the workers that the next leader is told of.
    pub(super) fn kept_workers(&self) -> Option<KeptWorkers> {
        let is_finished = self.group.is_none();
        self.present_group().map(|group| group.kept(is_finished, &self.host))
    }

    /// Returns the workers of the round that has not ended, as far as this agent knows.
    fn present_group(&self) -> Option<&WorkerGroup> {
        let is_over = self.result.is_some();
        self.group.as_ref().or(self.finished_group.as_ref().filter(|_| !is_over))
    }

    /// Keeps the workers under another leader, which has these stores.
    pub(super) fn keep(&mut self, round: u32, stores: RendezvousStoreInfo) {
        let group = self.group.as_ref().filter(|group| group.round == round);
        if let (Some(assignment), Some(_)) = (&mut self.assignment, group) {
            assignment.stores = stores;
        }
    }

    /// Starts a worker in place of the one with this index; false if that cannot be.
    fn replace(&mut self, index: usize) -> bool {
        let (Some(group), Some(assignment)) = (&self.group, &self.assignment) else { return false };
        let Outcome { rank, local_rank, .. } = group.outcome(index);
        let replacement = group.replacement(index) + 1;
        let mut own = assignment.clone();
        own.restart_count += replacement - assignment.replacements[local_rank as usize];
        own.replacements = vec![replacement; own.local_world_size as usize];
        let spec = self.worker_specs(&own).swap_remove(local_rank as usize);
        let console = Console { sinks: &self.sinks, logs: &self.logs, has_input: self.has_input };
        let Some(group) = &mut self.group else { return false };
        let replaced = group.replace(index, spec, own.restart_count, &console, &mut self.reaper);
        let resumed = match replaced {
            Ok(resumed) => resumed,
            Err(error) => {
                self.sinks.say(&error);
                return false;
            }
        };
        for which in 0..2 {
            if self.sinks.of(which).is_closed() {
                group.leave_console(which);
            }
        }
        let pid = group.outcome(index).pid;
        self.events.record(&JobEvent::Start { rank, local_rank, pid }, &mut self.sinks);
        self.keep_resumed(resumed);
        true
    }
}
