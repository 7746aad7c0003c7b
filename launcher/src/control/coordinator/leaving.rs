//! What follows when an agent is stopped by a signal, or lost.

use std::time::Instant;

use crate::control::coordinator::Coordinator;
use crate::control::job_phase::{AgentState, JobPhase, StopReason};
use crate::control::protocol::{AgentId, Command, LEADER};

impl Coordinator {
    /// Notes that an agent was stopped by a signal.
    pub(super) fn leaving(&mut self, agent: AgentId, signal: i32, now: Instant) {
        let is_idle = self.agents[&agent].state != AgentState::Running;
        if agent != LEADER && !self.is_static && (is_idle || self.has_enough_without(agent)) {
            return self.gone(agent, "has left, as it was stopped by a signal", now);
        }
        let cause =
            (agent != LEADER).then(|| format!("{} was stopped by a signal", self.describe(agent)));
        self.signalled(signal, cause, now);
    }

    /// Ends the job as a node was stopped by a signal.
    pub(super) fn signalled(&mut self, signal: i32, cause: Option<String>, now: Instant) {
        let signalled = StopReason::Signal { signal, cause };
        let restarts = self.failures < self.max_restarts;
        match &mut self.phase {
            JobPhase::Running => self.stop(signalled, None, now),
            JobPhase::Gathering { .. } => {
                self.phase = JobPhase::Stopping { why: signalled, deadline: now }
            }
            JobPhase::Stopping {
                why: StopReason::Failure { .. } | StopReason::Lost { .. },
                ..
            } if !restarts => {}
            JobPhase::Stopping { why, .. } => *why = signalled,
            JobPhase::Over => {}
        }
    }

    /// Whether the round has enough nodes without this agent's.
    fn has_enough_without(&self, agent: AgentId) -> bool {
        self.members().iter().filter(|other| **other != agent).count() >= self.min
    }

    /// Whether the job goes on under another leader when this one leaves.
    pub fn can_leave(&self) -> bool {
        self.phase == JobPhase::Running && !self.is_static && self.has_enough_without(LEADER)
    }

    /// Notes that an agent is gone; `how` follows its description in messages.
    pub(super) fn gone(&mut self, agent: AgentId, how: &str, now: Instant) {
        self.stopping.remove(&agent);
        let description = self.describe(agent);
        let Some(lost) = self.agents.remove(&agent) else { return };
        let interrupts = self.phase == JobPhase::Running && lost.state == AgentState::Running;
        if self.phase != JobPhase::Over {
            self.changes.push((format!("{description} {how}"), interrupts));
        }
        if !interrupts {
            return;
        }
        let summary = format!("{description} {how}");
        if self.in_place.is_some() {
            self.lost(agent, summary, now);
        } else if self.is_elastic() && self.members().len() >= self.min {
            self.stop(StopReason::Change, Some(format!("{summary}; going on without it")), now);
        } else {
            let notice = self.restart(&summary);
            self.stop(StopReason::Lost { summary }, notice, now);
        }
    }

    /// Ends an agent whose host has started another before the loss of this one was noticed. It may
    /// still be there, with its workers.
    pub(super) fn displace(&mut self, agent: AgentId, now: Instant) {
        let why = "another flow-launch has taken its place";
        if self.members().contains(&agent) {
            let stop = Command::Stop { round: self.round, why: Some(why.into()) };
            self.commands.push((agent, stop));
        }
        self.end(agent, 1, Some(why.into()));
        self.gone(agent, "was lost: it was started again", now);
    }
}
