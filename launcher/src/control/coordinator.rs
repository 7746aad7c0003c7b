//! Decides about the job as a whole: who takes part, when a round starts and stops, how the job
//! ends. Pure: takes events and the time, returns commands. It runs in the leading node's agent;
//! the other agents are connected to that one.
//!
//! A *round* is one start of all workers. It succeeds when every node has finished. At the first
//! failure all workers are stopped; if restarts are left, another round begins. With
//! `--nnodes MIN:MAX`, a round also ends when a node is lost or joins. The next round then starts
//! with the nodes that are present and does not count as a restart.

mod in_place;
mod leaving;
mod resuming;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::agent::exit_status::ExitStatus;
use crate::control::assignment;
use crate::control::job_phase::{AgentRecord, AgentState, JobPhase, StopReason};
use crate::control::job_record::{JobResult, Progress};
use crate::control::node::{Node, range};
use crate::control::protocol::{AgentEvent, AgentId, Command, Failure, KeptWorkers, LEADER};
use crate::control::worker_table::WorkerTable;
use crate::job::{Job, Rendezvous, RendezvousTimeouts};

/// Failures within this time count as simultaneous. A crash among them is the root cause rather
/// than an exit code, as a worker that misses its peer ends with an exit code.
const COALESCE_WINDOW: Duration = Duration::from_millis(200);

/// The time to wait for nodes before the first notice.
const FIRST_NOTICE: Duration = Duration::from_secs(10);

/// The time to wait for the nodes of the last round, once another node leads.
const REJOINING: Duration = Duration::from_secs(5);

/// The time that an agent may take to stop its workers, in addition to their grace period.
const STOPPING: Duration = Duration::from_secs(30);

/// Decides who takes part in the job, when a round starts and stops, and how the job ends.
pub struct Coordinator {
    min: usize,
    max: usize,
    is_static: bool,
    timeouts: RendezvousTimeouts,
    grace: Duration,
    max_restarts: u32,
    in_place: Option<WorkerTable>,
    /// Workers that were lost with their nodes, until [`Coordinator::take_lost_workers`].
    lost_workers: Vec<(u32, u32)>,
    /// In place, the last failure of a worker that had joined the job.
    last_failure: Option<(AgentId, Failure)>,
    agents: BTreeMap<AgentId, AgentRecord>,
    phase: JobPhase,
    /// After a change of the leader: the number of nodes that are expected again.
    awaited: Option<usize>,
    /// In place, until when their workers count as running.
    awaited_until: Option<Instant>,
    /// Agents that must stop the workers of another round, or of a lost place, before they have joined.
    stopping: BTreeMap<AgentId, Node>,
    /// The end of the job, once it is over.
    result: Option<JobResult>,
    round: u32,
    /// The number of nodes in the present round.
    nodes: usize,
    failures: u32,
    commands: Vec<(AgentId, Command)>,
    /// Who has joined and left since these were taken, and whether that interrupts the job.
    changes: Vec<(String, bool)>,
}

impl Coordinator {
    /// Makes the coordinator of a job.
    pub fn new(job: &Job, now: Instant) -> Coordinator {
        Coordinator {
            min: job.nodes.min as usize,
            max: job.nodes.max as usize,
            is_static: matches!(job.nodes.rendezvous, Rendezvous::Static { .. }),
            timeouts: job.nodes.timeouts,
            grace: job.grace,
            // In place, workers are started again one by one as often as that.
            max_restarts: if job.is_in_place { 0 } else { job.max_restarts },
            in_place: WorkerTable::new(job),
            lost_workers: Vec::new(),
            last_failure: None,
            agents: BTreeMap::new(),
            phase: JobPhase::Gathering { since: now, enough: None, notice: now + FIRST_NOTICE },
            awaited: None,
            awaited_until: None,
            stopping: BTreeMap::new(),
            result: None,
            round: 0,
            nodes: 0,
            failures: 0,
            commands: Vec::new(),
            changes: Vec::new(),
        }
    }

    /// Returns what another agent must know to go on in this one's place.
    pub fn progress(&self) -> Progress {
        let coming = match &self.phase {
            JobPhase::Stopping { why, .. } => self.end_after(why),
            _ => None,
        };
        Progress {
            round: self.round,
            restarts: self.in_place.as_ref().map_or(self.failures, WorkerTable::restarts),
            nodes: self.nodes,
            replica: None,
            result: self.result.clone().or(coming),
        }
    }

    /// Returns the end of the job that follows once all workers are stopped; None if they start again.
    fn end_after(&self, why: &StopReason) -> Option<JobResult> {
        let has_restarts = self.failures < self.max_restarts;
        let (code, cause) = match why {
            StopReason::Change => return None,
            StopReason::Done => (0, None),
            StopReason::Signal { signal, cause } => {
                (ExitStatus::Signal(*signal).code(), cause.clone())
            }
            StopReason::Failure { .. } | StopReason::Lost { .. } if has_restarts => return None,
            StopReason::Failure { agent, failure, .. } => {
                let report = self.agents.get(agent).and_then(|agent| agent.cause.clone());
                (failure.end.code(), Some(report.unwrap_or(failure.summary.clone())))
            }
            StopReason::Lost { summary } => (1, Some(summary.clone())),
        };
        Some(JobResult { code, cause })
    }

    /// Returns the agents but the leader's.
    pub fn followers(&self) -> impl Iterator<Item = AgentId> {
        self.agents.keys().copied().filter(|agent| *agent != LEADER)
    }

    /// Handles an event of an agent; returns commands for agents.
    pub fn handle(
        &mut self,
        agent: AgentId,
        event: AgentEvent,
        now: Instant,
    ) -> Vec<(AgentId, Command)> {
        match event {
            AgentEvent::Joined { node, kept } => self.joined(agent, node, kept, now),
            AgentEvent::Gone { why } => self.gone(agent, &format!("was lost: {why}"), now),
            AgentEvent::Stopped { .. } if self.stopping.contains_key(&agent) => {
                if let Some(node) = self.stopping.remove(&agent) {
                    self.joined(agent, node, None, now);
                }
            }
            AgentEvent::Leaving { signal } if self.stopping.contains_key(&agent) => {
                self.stopping.remove(&agent);
                if agent == LEADER {
                    self.signalled(signal, None, now);
                }
            }
            _ if !self.agents.contains_key(&agent) => {}
            AgentEvent::Failed { round, failure } if round == self.round => {
                self.failed(agent, failure, now)
            }
            AgentEvent::Finished { round } if round == self.round => {
                self.set(agent, AgentState::Finished)
            }
            AgentEvent::Stopped { round, cause } if round == self.round => {
                // An agent that stopped before it was commanded to sends this twice; only the first
                // has the cause.
                if let Some(agent) =
                    self.agents.get_mut(&agent).filter(|agent| agent.state != AgentState::Idle)
                {
                    (agent.state, agent.cause) = (AgentState::Idle, cause);
                }
            }
            AgentEvent::Leaving { signal } => self.leaving(agent, signal, now),
            AgentEvent::Exited { round, rank, failure, .. } if round == self.round => {
                self.exited(agent, rank, failure, now)
            }
            AgentEvent::Exited { .. }
            | AgentEvent::Candidate { .. }
            | AgentEvent::Has { .. }
            | AgentEvent::Trace { .. }
            | AgentEvent::Status { .. }
            | AgentEvent::Watch { .. }
            | AgentEvent::Failed { .. }
            | AgentEvent::Finished { .. }
            | AgentEvent::Stopped { .. } => {}
        }
        self.take_commands(now)
    }

    /// Acts on deadlines that have passed.
    pub fn elapsed(&mut self, now: Instant) -> Vec<(AgentId, Command)> {
        self.end_rejoining(now);
        match &mut self.phase {
            JobPhase::Stopping { deadline, .. } if *deadline <= now => *deadline = now + STOPPING,
            _ => return self.take_commands(now),
        }
        // There is no limit for the leader's own workers: the job cannot continue without it.
        let late: Vec<AgentId> =
            self.members().into_iter().filter(|agent| *agent != LEADER).collect();
        for agent in late {
            self.end(agent, 1, Some("the workers of this node did not stop in time".into()));
            self.gone(agent, "was lost: it did not stop its workers in time", now);
        }
        self.take_commands(now)
    }

    fn take_commands(&mut self, now: Instant) -> Vec<(AgentId, Command)> {
        self.advance(now);
        std::mem::take(&mut self.commands)
    }

    /// Prints a notice on every node.
    pub fn notify(&mut self, text: &str) -> Vec<(AgentId, Command)> {
        self.print(text);
        std::mem::take(&mut self.commands)
    }

    fn print(&mut self, text: &str) {
        for agent in self.members() {
            self.commands.push((agent, Command::Print(text.into())));
        }
    }

    /// Ends the job for this reason.
    pub fn give_up(&mut self, cause: String) -> Vec<(AgentId, Command)> {
        self.end_all(1, Some(cause));
        std::mem::take(&mut self.commands)
    }

    /// Returns when to call [`Coordinator::elapsed`].
    pub fn deadline(&self) -> Option<Instant> {
        let phase = match &self.phase {
            JobPhase::Gathering { since, enough, notice } => match enough {
                Some(_) if self.stopping.contains_key(&LEADER) => None,
                Some(enough) => Some(*enough + self.last_call()),
                None => Some((*since + self.timeouts.join).min(*notice)),
            },
            JobPhase::Stopping { deadline, .. } => Some(*deadline),
            JobPhase::Running | JobPhase::Over => None,
        };
        [phase, self.awaited_until].into_iter().flatten().min()
    }

    /// Returns the host name of an agent that has joined.
    pub fn host(&self, agent: AgentId) -> Option<&str> {
        self.agents.get(&agent).map(|agent| agent.node.host.as_str())
    }

    /// Returns the nodes of all agents.
    pub fn nodes(&self) -> impl Iterator<Item = (AgentId, &Node)> {
        self.agents.iter().map(|(id, agent)| (*id, &agent.node))
    }

    /// Returns who has joined and left since the last call, and whether that interrupts the job.
    pub fn take_changes(&mut self) -> Vec<(String, bool)> {
        std::mem::take(&mut self.changes)
    }

    /// Whether the job runs, and workers of this agent.
    pub fn has_workers(&self, agent: AgentId) -> bool {
        let agent = self.agents.get(&agent).filter(|_| self.phase == JobPhase::Running);
        agent.is_some_and(|agent| agent.state == AgentState::Running)
    }

    /// Whether all agents but the leader's have gone, and none may come to hear of the end.
    pub fn is_alone(&self) -> bool {
        let mut agents = self.agents.keys().chain(self.stopping.keys());
        self.awaited.is_none() && agents.all(|agent| *agent == LEADER)
    }

    fn joined(&mut self, agent: AgentId, node: Node, kept: Option<KeptWorkers>, now: Instant) {
        if agent == LEADER && self.awaited_until.is_some() {
            // From now on this agent acts as the leader.
            self.awaited_until = Some(now + REJOINING);
        }
        let is_over = self.phase == JobPhase::Over;
        // One that has done its part hears of the end.
        if let Some(kept) = kept.filter(|kept| !(kept.is_finished && is_over)) {
            return self.rejoined(agent, node, kept, now);
        }
        let own = (self.min as u32, self.max as u32);
        if node.nodes != own {
            let cause = format!(
                "--nnodes is {} here, but {} on the leading node",
                range(node.nodes),
                range(own)
            );
            return self.end(agent, 1, Some(cause));
        }
        if node.is_in_place != self.in_place.is_some() {
            let cause = "--elastic is another than on the leading node".to_string();
            return self.end(agent, 1, Some(cause));
        }
        let workers =
            self.agents.values().map(|other| u64::from(other.node.local_world_size)).sum::<u64>();
        if workers + u64::from(node.local_world_size) > u32::MAX.into() {
            return self.end(agent, 1, Some("all nodes together have too many workers".into()));
        }
        if self.phase == JobPhase::Over {
            // Who took part may not have heard of the end from the last leader.
            let result = self.result.clone().filter(|_| self.awaited.is_some());
            let over = JobResult { code: 1, cause: Some("the job is over".into()) };
            return self.commands.push((agent, Command::Finish(result.unwrap_or(over))));
        }
        let taken = self
            .agents
            .iter()
            .find(|(_, other)| self.is_static && other.node.node_rank == node.node_rank);
        let mut displaced = None;
        if let Some((&other, AgentRecord { node: Node { host, .. }, .. })) = taken {
            let has_restarts = match &self.in_place {
                Some(in_place) => in_place.can_replace(other, &node),
                None => self.failures < self.max_restarts,
            };
            if !has_restarts || *host != node.host || other == LEADER {
                let rank = node.node_rank.unwrap_or_default();
                let cause =
                    format!("node rank {rank} is taken by host {host}: give each node its own");
                return self.end(agent, 1, Some(cause));
            }
            displaced = Some(other);
        }
        self.agents.insert(
            agent,
            AgentRecord { node, state: AgentState::Idle, cause: None, is_spare: false },
        );
        if let Some(displaced) = displaced {
            self.displace(displaced, now);
        }
        let finishing = self.agents.values().any(|agent| agent.state == AgentState::Finished);
        let why = format!("{} has joined", self.describe(agent));
        self.changes.push((why.clone(), false));
        if self.phase == JobPhase::Running && self.in_place.is_some() {
            if self.agents[&agent].state == AgentState::Idle {
                self.fill_vacancy(agent, &why);
            }
        } else if self.phase == JobPhase::Running && self.members().len() < self.max && !finishing {
            self.stop(StopReason::Change, Some(why), now);
        }
        self.turn_away();
    }

    fn failed(&mut self, agent: AgentId, failure: Failure, now: Instant) {
        match &mut self.phase {
            JobPhase::Running => {
                let notice = self.restart(&failure.summary);
                self.stop(StopReason::Failure { agent, failure, at: now }, notice, now);
            }
            JobPhase::Stopping {
                why: StopReason::Failure { agent: first, failure: known, at },
                ..
            } if now - *at < COALESCE_WINDOW && failure.end.is_crash() && !known.end.is_crash() => {
                (*first, *known) = (agent, failure);
            }
            _ => {}
        }
    }

    /// Returns the notice for a failure, if a restart follows.
    fn restart(&self, summary: &str) -> Option<String> {
        let next = self.failures + 1;
        let max = self.max_restarts;
        (next <= max).then(|| format!("{summary}; restart {next} of {max}"))
    }

    fn is_elastic(&self) -> bool {
        self.min < self.max
    }

    /// Enters the next phase if the present one is complete.
    fn advance(&mut self, now: Instant) {
        if self.phase == JobPhase::Running {
            let members = self.members();
            let mut states = members.iter().map(|agent| self.agents[agent].state);
            let are_finished = states.all(|state| state == AgentState::Finished);
            if !members.is_empty() && are_finished && !self.is_incomplete() {
                self.end_all(0, None);
            }
        }
        if let JobPhase::Stopping { why, .. } = &self.phase
            && self.agents.values().all(|agent| agent.state == AgentState::Idle)
        {
            let why = why.clone();
            self.stopped(why, now);
        }
        if let JobPhase::Gathering { since, enough, mut notice } = self.phase {
            let present = self.agents.len();
            let enough =
                enough.or((present >= self.min).then_some(now)).filter(|_| present >= self.min);
            if now >= notice && enough.is_none() {
                notice = now + 2 * (now - since);
                let text = self.missing(now - since);
                self.commands
                    .extend(self.agents.keys().map(|agent| (*agent, Command::Print(text.clone()))));
            }
            self.phase = JobPhase::Gathering { since, enough, notice };
            let is_complete = self.awaited.is_some_and(|awaited| present >= awaited.max(self.min));
            let last_call = self.last_call();
            let is_time = present >= self.max
                || is_complete
                || enough.is_some_and(|enough| now >= enough + last_call);
            // The leader has rank 0.
            if is_time && !self.stopping.contains_key(&LEADER) {
                self.start();
            } else if enough.is_none() && now >= since + self.timeouts.join {
                self.end_all(1, Some(self.missing(self.timeouts.join)));
            }
        }
    }

    /// Returns the time to wait for more nodes, once there are enough.
    fn last_call(&self) -> Duration {
        match self.awaited {
            Some(_) => self.timeouts.last_call.min(REJOINING),
            None if self.round == 0 => self.timeouts.last_call,
            // Later rounds start with the nodes that are present: another may join at any time.
            None => Duration::ZERO,
        }
    }

    /// Notes that all workers of a round are gone.
    fn stopped(&mut self, why: StopReason, now: Instant) {
        if let Some(JobResult { code, cause }) = self.end_after(&why) {
            return self.end_all(code, cause);
        }
        if why != StopReason::Change {
            self.failures += 1;
        }
        self.gather(now);
    }

    fn gather(&mut self, now: Instant) {
        self.phase = JobPhase::Gathering { since: now, enough: None, notice: now + FIRST_NOTICE };
    }

    fn start(&mut self) {
        self.round += 1;
        let mut members: Vec<AgentId> = self.agents.keys().copied().collect();
        // By node rank if they have one; otherwise in the order of joining, the leader first.
        members.sort_by_key(|agent| (self.agents[agent].node.node_rank, *agent));
        members.truncate(self.max);
        self.awaited = None;
        self.nodes = members.len();
        let nodes: Vec<&Node> = members.iter().map(|agent| &self.agents[agent].node).collect();
        let assignments = assignment::assign(&nodes, self.failures);
        for (agent, assignment) in members.iter().zip(assignments) {
            if let Some(in_place) = &mut self.in_place {
                in_place.start(*agent, &self.agents[agent].node.role, &assignment);
            }
            self.commands.push((*agent, Command::Start { round: self.round, assignment }));
        }
        for agent in members {
            self.set(agent, AgentState::Running);
        }
        self.phase = JobPhase::Running;
        self.turn_away();
    }

    /// Handles agents that the round has no place for: they wait as spares, or end if no later
    /// round can need them.
    fn turn_away(&mut self) {
        let is_full = self.in_place.is_some() || self.members().len() >= self.max;
        if self.phase != JobPhase::Running || !is_full {
            return;
        }
        let has_use = match &self.in_place {
            Some(in_place) => in_place.restarts_left() > 0,
            None => self.is_elastic() || self.failures < self.max_restarts,
        };
        let its_nodes = match &self.in_place {
            Some(_) if !has_use => "no restart is left".to_string(),
            _ => format!("the job has its {} nodes", self.members().len()),
        };
        self.agents.retain(|id, agent| {
            let is_idle = agent.state == AgentState::Idle;
            if is_idle && !has_use {
                let cause = Some(format!("this node is surplus: {its_nodes}"));
                self.commands.push((*id, Command::Finish(JobResult { code: 1, cause })));
            } else if is_idle && !std::mem::replace(&mut agent.is_spare, true) {
                let text = format!(
                    "this node is a spare: {its_nodes}; it takes the place of one that is lost"
                );
                self.commands.push((*id, Command::Print(text)));
            }
            has_use || !is_idle
        });
    }

    fn stop(&mut self, why: StopReason, notice: Option<String>, now: Instant) {
        for agent in self.members() {
            self.set(agent, AgentState::Running); // one that has finished answers too
            self.commands.push((agent, Command::Stop { round: self.round, why: notice.clone() }));
        }
        self.phase = JobPhase::Stopping { why, deadline: now + self.grace + STOPPING };
    }

    fn end(&mut self, agent: AgentId, code: u8, cause: Option<String>) {
        self.commands.push((agent, Command::Finish(JobResult { code, cause })));
    }

    fn end_all(&mut self, code: u8, cause: Option<String>) {
        let agents = self.agents.keys().chain(self.stopping.keys());
        for agent in agents.copied().collect::<Vec<_>>() {
            self.end(agent, code, cause.clone());
        }
        self.result = Some(JobResult { code, cause });
        self.awaited = None;
        self.phase = JobPhase::Over;
    }

    fn set(&mut self, agent: AgentId, state: AgentState) {
        if let Some(agent) = self.agents.get_mut(&agent) {
            agent.state = state;
        }
    }

    /// Returns the agents that take part in the present round.
    fn members(&self) -> Vec<AgentId> {
        self.agents
            .iter()
            .filter(|(_, agent)| agent.state != AgentState::Idle)
            .map(|(id, _)| *id)
            .collect()
    }

    /// "node 1 (host b)".
    fn describe(&self, agent: AgentId) -> String {
        let Some(AgentRecord { node, .. }) = self.agents.get(&agent) else {
            return "a node".into();
        };
        match node.node_rank {
            Some(rank) => format!("node {rank} (host {})", node.host),
            None => format!("the node at {} (host {})", node.address, node.host),
        }
    }

    /// Returns the notice about nodes that have not joined yet.
    fn missing(&self, waited: Duration) -> String {
        let waited = waited.as_secs();
        if self.is_static {
            let present: BTreeSet<_> =
                self.agents.values().filter_map(|agent| agent.node.node_rank).collect();
            let missing = (0..self.max).filter(|rank| !present.contains(&(*rank as u32)));
            let missing: Vec<_> = missing.map(|rank| rank.to_string()).collect();
            let list = missing.join(", ");
            return match missing.len() {
                1 => format!("node {list} has not joined within {waited} s"),
                _ => format!("nodes {list} have not joined within {waited} s"),
            };
        }
        let hosts: Vec<_> = self.agents.values().map(|agent| agent.node.host.as_str()).collect();
        format!(
            "only {} of at least {} nodes have joined within {waited} s: {}",
            self.agents.len(),
            self.min,
            hosts.join(", ")
        )
    }
}

#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;
