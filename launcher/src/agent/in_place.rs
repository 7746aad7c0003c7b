//! `--elastic in-place`: a worker that fails is started again alone, and the others go on.

use crate::agent::Agent;
use crate::agent::stop_policy::Ended;
use crate::agent::worker::Console;
use crate::control::assignment::RankAssignment;
use crate::plan;
use crate::report::events::JobEvent;
use crate::report::failure::{self, Outcome};

impl Agent {
    /// Starts workers in place of those that have failed, as often as `--max-restarts` says, or goes
    /// on without them. Returns the others that have ended.
    pub fn replace_failed(&mut self, ended: Vec<Ended>) -> Vec<Ended> {
        let Some(assignment) = self.assignment.clone().filter(|_| self.job.is_in_place) else {
            return ended;
        };
        let mut others = Vec::new();
        for (index, end, error_time) in ended {
            if !end.is_failure() || !self.outlives(index, &assignment) {
                others.push((index, end, error_time));
            }
        }
        others
    }

    /// Whether the job goes on after the failure of a worker, by another in its place or without.
    fn outlives(&mut self, index: usize, assignment: &RankAssignment) -> bool {
        let Some(group) = &self.group else { return false };
        // With no other that runs there is nobody who goes on.
        if group.policy.cause().is_some() || self.signalled.is_some() || group.running() == 0 {
            return false;
        }
        let what = failure::summary(&group.outcome(index), &self.host);
        let max = self.job.max_restarts;
        let count = group.replacements() + 1;
        if count > max {
            let left = group.sound();
            let goes_on = self.job.min_workers.is_some_and(|min| left >= min as usize);
            if goes_on {
                let workers = if left == 1 { "worker" } else { "workers" };
                self.sinks.note(&format!("{what}; the job goes on with {left} {workers}"));
            }
            return goes_on;
        }
        let Outcome { rank, local_rank, .. } = group.outcome(index);
        let replacement = group.replacement(index) + 1;
        let mut own = assignment.clone();
        own.restart_count += replacement;
        let mut spec = self.worker_specs(&own).swap_remove(local_rank as usize);
        spec.environment.retain(|(name, _)| *name != plan::REPLACEMENT);
        spec.environment.push((plan::REPLACEMENT, replacement.to_string().into()));
        let console = Console { sinks: &self.sinks, logs: &self.logs, has_input: self.has_input };
        let Some(group) = &mut self.group else { return false };
        if let Err(error) =
            group.replace(index, spec, own.restart_count, &console, &mut self.reaper)
        {
            self.sinks.say(&error);
            return false;
        }
        (0..2)
            .filter(|which| self.sinks.of(*which).is_closed())
            .for_each(|which| group.leave_console(which));
        let pid = group.outcome(index).pid;
        self.sinks.note(&format!("{what}; it is started again alone ({count} of {max})"));
        self.events.record(&JobEvent::Start { rank, local_rank, pid }, &mut self.sinks);
        true
    }
}
