//! What the leader does for those who watch the job.

use std::collections::BTreeMap;
use std::time::Instant;

use super::Leader;
use crate::control::protocol::{AgentId, Command, status_key};
use crate::control::watchers;

impl Leader {
    /// Asks all agents what their workers do, as one who watches wants to know.
    pub(super) fn ask_all(&mut self, watcher: AgentId, number: u64) {
        let mut awaited = BTreeMap::new();
        let mut silent = Vec::new();
        for (agent, node) in self.coordinator.nodes() {
            if node.can_report {
                awaited.insert(agent, node.host.clone());
            } else {
                silent.push(node.host.clone());
            }
        }
        let agents: Vec<AgentId> = awaited.keys().copied().collect();
        let number = self.watchers.ask(watcher, number, awaited, silent, Instant::now());
        for agent in agents {
            self.command(agent, Command::Report { number });
        }
    }

    /// Answers those who have waited long enough.
    pub(super) fn answer_watchers(&mut self) {
        for (watcher, mut status) in self.watchers.take_due(Instant::now()) {
            let members = &self.candidate.election.record().members;
            status.members = members.iter().map(|member| member.address.clone()).collect();
            // Plain data: it cannot fail.
            let text = serde_json::to_vec(&status).unwrap_or_default();
            self.candidate.server.set(&status_key(watcher), &text);
        }
    }

    /// Forgets one who has gone, if that is one who has watched.
    pub(super) fn forget_watcher(&mut self, agent: AgentId) -> bool {
        let has_watched = self.watchers.left(agent);
        if has_watched {
            self.candidate.server.delete(&status_key(agent));
        }
        has_watched
    }

    /// Notes for those who watch which worker has failed, who has joined and left, and what follows.
    pub(super) fn note_changes(
        &mut self,
        failure: Option<(String, bool)>,
        commands: &[(AgentId, Command)],
    ) {
        let changes = self.coordinator.take_changes().into_iter().chain(failure);
        // All join again at a new leader.
        let gathers = self.claim.is_some() && self.round.is_none();
        if self.linger_until.is_some() || gathers {
            return;
        }
        let stops = commands.iter().any(|(_, command)| matches!(command, Command::Stop { .. }));
        for (what, interrupts) in changes {
            let what = format!("{what}{}", watchers::consequence(commands));
            self.watchers.note(what, interrupts || stops, Instant::now());
        }
    }
}
