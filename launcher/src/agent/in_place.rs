//! `--elastic in-place`: a worker that fails is started again alone, and the others go on.

use crate::agent::Agent;
use crate::agent::worker::Console;
use crate::control::protocol::Verdict;
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
