//! Decides about the job as a whole: who takes part, when a round starts and stops, how the job
//! ends. Pure: events and the time come in, commands go out. It runs in the agent of the leading
//! node; the others are connected to it.
//!
//! A *round* is one start of all workers. It ends well when every node has finished; at the first
//! failure all are stopped, and, if restarts are left, another round begins. With
//! `--nnodes MIN:MAX` a round also ends for a node that is lost or has come, and goes on with those
//! that are there, without using up a restart.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::agent::exit_status::ExitStatus;
use crate::control::assignment::{RankAssignment, RendezvousStoreInfo};
use crate::control::protocol::{AgentEvent, AgentId, Command, Failure, JobResult, Node, LEADER};
use crate::job::{Job, Rendezvous, RendezvousTimeouts};

/// Failures that come together: a crash is to blame before an exit code, which is how a worker that
/// misses its peer ends.
const COALESCE_WINDOW: Duration = Duration::from_millis(200);

/// When to say for the first time that nodes are missing.
const FIRST_NOTICE: Duration = Duration::from_secs(10);

/// Exit code of a job that hung, as that of `timeout`.
const HUNG: i32 = 124;

/// How long an agent may take to stop its workers beyond their grace period.
const STOPPING: Duration = Duration::from_secs(30);

struct Agent {
    node: Node,
    state: State,
    cause: Option<String>,
    /// It knows that there is no place for it at present.
    is_spare: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum State {
    /// Waits for a round.
    Idle,
    Running,
    Finished,
}

#[derive(Clone, Debug, PartialEq)]
enum Phase {
    /// Since when agents are awaited, since when there are enough, and when to say that some are
    /// missing.
    Gathering {
        since: Instant,
        enough: Option<Instant>,
        notice: Instant,
    },
    Running,
    Stopping {
        why: StopReason,
        deadline: Instant,
    },
    Over,
}

#[derive(Clone, Debug, PartialEq)]
enum StopReason {
    Failure {
        agent: AgentId,
        failure: Failure,
        at: Instant,
    },
    /// A node without which the job cannot go on is gone.
    Lost {
        summary: String,
    },
    /// Nodes have come or gone.
    Change,
    Signal {
        signal: i32,
        cause: Option<String>,
    },
}

/// See the head of this file.
pub struct Coordinator {
    min: usize,
    max: usize,
    is_static: bool,
    timeouts: RendezvousTimeouts,
    grace: Duration,
    max_restarts: u32,
    agents: BTreeMap<AgentId, Agent>,
    phase: Phase,
    round: u32,
    failures: u32,
    commands: Vec<(AgentId, Command)>,
}

impl Coordinator {
    pub fn new(job: &Job, now: Instant) -> Coordinator {
        Coordinator {
            min: job.nodes.min as usize,
            max: job.nodes.max as usize,
            is_static: matches!(job.nodes.rendezvous, Rendezvous::Static { .. }),
            timeouts: job.nodes.timeouts,
            grace: job.grace,
            max_restarts: job.max_restarts,
            agents: BTreeMap::new(),
            phase: Phase::Gathering { since: now, enough: None, notice: now + FIRST_NOTICE },
            round: 0,
            failures: 0,
            commands: Vec::new(),
        }
    }

    /// An agent has told something; what is to be done about it, by whom.
    pub fn handle(
        &mut self,
        agent: AgentId,
        event: AgentEvent,
        now: Instant,
    ) -> Vec<(AgentId, Command)> {
        match event {
            AgentEvent::Joined { node } => self.joined(agent, node, now),
            AgentEvent::Gone { why } => self.gone(agent, &format!("was lost: {why}"), now),
            _ if !self.agents.contains_key(&agent) => {}
            AgentEvent::Failed { round, failure } if round == self.round => {
                self.failed(agent, failure, now)
            }
            AgentEvent::Finished { round } if round == self.round => {
                self.set(agent, State::Finished)
            }
            AgentEvent::Stopped { round, cause } if round == self.round => {
                // One that had stopped before it was ordered to says so twice; the first time it
                // knows the cause.
                if let Some(agent) =
                    self.agents.get_mut(&agent).filter(|agent| agent.state != State::Idle)
                {
                    (agent.state, agent.cause) = (State::Idle, cause);
                }
            }
            AgentEvent::Leaving { signal } => self.leaving(agent, signal, now),
            AgentEvent::Exited { .. }
            | AgentEvent::Failed { .. }
            | AgentEvent::Finished { .. }
            | AgentEvent::Stopped { .. } => {}
        }
        self.go_on(now)
    }

    /// Time has passed.
    pub fn elapsed(&mut self, now: Instant) -> Vec<(AgentId, Command)> {
        match &mut self.phase {
            Phase::Stopping { deadline, .. } if *deadline <= now => *deadline = now + STOPPING,
            _ => return self.go_on(now),
        }
        // The leader's own workers are waited for: there is nobody to go on without it.
        let late: Vec<AgentId> =
            self.members().into_iter().filter(|agent| *agent != LEADER).collect();
        for agent in late {
            self.end(agent, 1, Some("the workers of this node did not stop in time".into()));
            self.gone(agent, "was lost: it did not stop its workers in time", now);
        }
        self.go_on(now)
    }

    fn go_on(&mut self, now: Instant) -> Vec<(AgentId, Command)> {
        self.advance(now);
        std::mem::take(&mut self.commands)
    }

    /// Something that the user should know, on every node.
    pub fn say(&mut self, text: &str) -> Vec<(AgentId, Command)> {
        self.members().into_iter().map(|agent| (agent, Command::Print(text.to_string()))).collect()
    }

    /// The workers hang: that is a failure.
    pub fn hung(&mut self, summary: String, now: Instant) -> Vec<(AgentId, Command)> {
        self.failed(LEADER, Failure { summary, end: ExitStatus::Exit(HUNG) }, now);
        std::mem::take(&mut self.commands)
    }

    /// The job cannot go on, for this reason.
    pub fn give_up(&mut self, cause: String) -> Vec<(AgentId, Command)> {
        self.end_all(1, Some(cause));
        std::mem::take(&mut self.commands)
    }

    /// When [`Coordinator::elapsed`] is to be called.
    pub fn deadline(&self) -> Option<Instant> {
        match &self.phase {
            Phase::Gathering { since, enough, notice } => Some(match enough {
                Some(enough) => *enough + self.timeouts.last_call,
                None => (*since + self.timeouts.join).min(*notice),
            }),
            Phase::Stopping { deadline, .. } => Some(*deadline),
            Phase::Running | Phase::Over => None,
        }
    }

    /// The host name of an agent that is there.
    pub fn host(&self, agent: AgentId) -> Option<&str> {
        self.agents.get(&agent).map(|agent| agent.node.host.as_str())
    }

    /// Every agent that was there has gone, but for the leader's.
    pub fn is_alone(&self) -> bool {
        self.agents.keys().all(|agent| *agent == LEADER)
    }

    fn joined(&mut self, agent: AgentId, node: Node, now: Instant) {
        let own = (self.min as u32, self.max as u32);
        if node.nodes != own {
            let cause = format!(
                "--nnodes is {} here, but {} on the leading node",
                range(node.nodes),
                range(own)
            );
            return self.end(agent, 1, Some(cause));
        }
        let workers =
            self.agents.values().map(|other| u64::from(other.node.local_world_size)).sum::<u64>();
        if workers + u64::from(node.local_world_size) > u32::MAX.into() {
            return self.end(agent, 1, Some("all nodes together have too many workers".into()));
        }
        let taken = self
            .agents
            .iter()
            .find(|(_, other)| self.is_static && other.node.node_rank == node.node_rank);
        if let Some((&other, Agent { node: Node { host, .. }, .. })) = taken {
            if self.failures >= self.max_restarts || *host != node.host || other == LEADER {
                let rank = node.node_rank.unwrap_or_default();
                let cause =
                    format!("node rank {rank} is taken by host {host}: give each node its own");
                return self.end(agent, 1, Some(cause));
            }
            // A machine that was started again before its silence was noticed.
            self.end(other, 1, Some("another flow-launch has taken its place".into()));
            self.gone(other, "was lost: it was started again", now);
        }
        if self.phase == Phase::Over {
            return self.end(agent, 1, Some("the job is over".into()));
        }
        self.agents.insert(agent, Agent { node, state: State::Idle, cause: None, is_spare: false });
        let finishing = self.agents.values().any(|agent| agent.state == State::Finished);
        if self.phase == Phase::Running && self.members().len() < self.max && !finishing {
            let why = format!("{} has joined", self.describe(agent));
            self.stop(StopReason::Change, Some(why), now);
        }
        self.turn_away();
    }

    fn failed(&mut self, agent: AgentId, failure: Failure, now: Instant) {
        match &mut self.phase {
            Phase::Running => {
                let told = self.restart(&failure.summary);
                self.stop(StopReason::Failure { agent, failure, at: now }, told, now);
            }
            Phase::Stopping {
                why: StopReason::Failure { agent: first, failure: known, at },
                ..
            } if now - *at < COALESCE_WINDOW && failure.end.is_crash() && !known.end.is_crash() => {
                (*first, *known) = (agent, failure);
            }
            _ => {}
        }
    }

    fn leaving(&mut self, agent: AgentId, signal: i32, now: Instant) {
        let enough_left =
            self.members().iter().filter(|other| **other != agent).count() >= self.min;
        if agent != LEADER
            && !self.is_static
            && (enough_left || self.agents[&agent].state != State::Running)
        {
            return self.gone(agent, "has left, as it was told to end", now);
        }
        let cause = (agent != LEADER).then(|| format!("{} was told to end", self.describe(agent)));
        let signalled = StopReason::Signal { signal, cause };
        let restarts = self.failures < self.max_restarts;
        match &mut self.phase {
            Phase::Running => self.stop(signalled, None, now),
            Phase::Gathering { .. } => {
                self.phase = Phase::Stopping { why: signalled, deadline: now }
            }
            Phase::Stopping {
                why: StopReason::Failure { .. } | StopReason::Lost { .. }, ..
            } if !restarts => {}
            Phase::Stopping { why, .. } => *why = signalled,
            Phase::Over => {}
        }
    }

    /// An agent is not there any more: `how` follows its description.
    fn gone(&mut self, agent: AgentId, how: &str, now: Instant) {
        let description = self.describe(agent);
        let Some(lost) = self.agents.remove(&agent) else { return };
        if self.phase != Phase::Running || lost.state != State::Running {
            return;
        }
        let summary = format!("{description} {how}");
        if self.is_elastic() && self.members().len() >= self.min {
            self.stop(StopReason::Change, Some(format!("{summary}; going on without it")), now);
        } else {
            let told = self.restart(&summary);
            self.stop(StopReason::Lost { summary }, told, now);
        }
    }

    /// What to say of a failure that is followed by a restart.
    fn restart(&self, summary: &str) -> Option<String> {
        let (next, max) = (self.failures + 1, self.max_restarts);
        (next <= max).then(|| format!("{summary}; restart {next} of {max}"))
    }

    fn is_elastic(&self) -> bool {
        self.min < self.max
    }

    /// Goes on to the next phase as far as nothing is awaited.
    fn advance(&mut self, now: Instant) {
        if self.phase == Phase::Running {
            let states = || {
                self.agents.values().map(|agent| agent.state).filter(|state| *state != State::Idle)
            };
            if states().all(|state| state == State::Finished) {
                self.end_all(0, None);
            }
        }
        if let Phase::Stopping { why, .. } = &self.phase {
            if self.agents.values().all(|agent| agent.state == State::Idle) {
                let why = why.clone();
                self.stopped(why, now);
            }
        }
        if let Phase::Gathering { since, enough, mut notice } = self.phase {
            let present = self.agents.len();
            let enough =
                enough.or((present >= self.min).then_some(now)).filter(|_| present >= self.min);
            if now >= notice && enough.is_none() {
                notice = now + 2 * (now - since);
                let text = self.missing(now - since);
                self.commands
                    .extend(self.agents.keys().map(|agent| (*agent, Command::Print(text.clone()))));
            }
            self.phase = Phase::Gathering { since, enough, notice };
            // Later rounds take who is there: another node is welcome at any time.
            let last_call = if self.round == 0 { self.timeouts.last_call } else { Duration::ZERO };
            if present >= self.max || enough.is_some_and(|enough| now >= enough + last_call) {
                self.start();
            } else if enough.is_none() && now >= since + self.timeouts.join {
                self.end_all(1, Some(self.missing(self.timeouts.join)));
            }
        }
    }

    /// All workers of a round are gone.
    fn stopped(&mut self, why: StopReason, now: Instant) {
        let (code, cause) = match why {
            StopReason::Change => return self.gather(now),
            StopReason::Signal { signal, cause } => {
                return self.end_all(ExitStatus::Signal(signal).code(), cause)
            }
            StopReason::Failure { agent, failure, .. } => {
                let told = self.agents.get(&agent).and_then(|agent| agent.cause.clone());
                (failure.end.code(), told.unwrap_or(failure.summary))
            }
            StopReason::Lost { summary } => (1, summary),
        };
        if self.failures < self.max_restarts {
            self.failures += 1;
            return self.gather(now);
        }
        self.end_all(code, Some(cause));
    }

    fn gather(&mut self, now: Instant) {
        self.phase = Phase::Gathering { since: now, enough: None, notice: now + FIRST_NOTICE };
    }

    fn start(&mut self) {
        self.round += 1;
        let mut members: Vec<AgentId> = self.agents.keys().copied().collect();
        // By node rank where there is one; else in the command in which they came, the leader first.
        members.sort_by_key(|agent| (self.agents[agent].node.node_rank, *agent));
        members.truncate(self.max);
        let nodes: Vec<&Node> = members.iter().map(|agent| &self.agents[agent].node).collect();
        let world_size = nodes.iter().map(|node| node.local_world_size).sum();
        let mut first_rank = 0;
        for (group_rank, agent) in members.iter().enumerate() {
            let node = nodes[group_rank];
            let same_role = |others: &[&Node]| -> u32 {
                others
                    .iter()
                    .filter(|other| other.role == node.role)
                    .map(|other| other.local_world_size)
                    .sum()
            };
            let assignment = RankAssignment {
                restart_count: self.failures,
                group_rank: group_rank as u32,
                group_world_size: members.len() as u32,
                first_rank,
                local_world_size: node.local_world_size,
                world_size,
                first_role_rank: same_role(&nodes[..group_rank]),
                role_world_size: same_role(&nodes),
                stores: RendezvousStoreInfo::default(),
            };
            first_rank += node.local_world_size;
            self.commands.push((*agent, Command::Start { round: self.round, assignment }));
        }
        for agent in members {
            self.set(agent, State::Running);
        }
        self.phase = Phase::Running;
        self.turn_away();
    }

    /// Tells agents for which there is no place in the round that they wait for one, or, if there
    /// will be none, to end.
    fn turn_away(&mut self) {
        if self.phase != Phase::Running || self.members().len() < self.max {
            return;
        }
        let has_use = self.is_elastic() || self.failures < self.max_restarts;
        let its_nodes = format!("the job has its {} nodes", self.max);
        self.agents.retain(|id, agent| {
            let is_idle = agent.state == State::Idle;
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

    fn stop(&mut self, why: StopReason, told: Option<String>, now: Instant) {
        for agent in self.members() {
            self.set(agent, State::Running); // one that has finished answers too
            self.commands.push((agent, Command::Stop { round: self.round, why: told.clone() }));
        }
        self.phase = Phase::Stopping { why, deadline: now + self.grace + STOPPING };
    }

    fn end(&mut self, agent: AgentId, code: u8, cause: Option<String>) {
        self.commands.push((agent, Command::Finish(JobResult { code, cause })));
    }

    fn end_all(&mut self, code: u8, cause: Option<String>) {
        for agent in self.agents.keys().copied().collect::<Vec<_>>() {
            self.end(agent, code, cause.clone());
        }
        self.phase = Phase::Over;
    }

    fn set(&mut self, agent: AgentId, state: State) {
        if let Some(agent) = self.agents.get_mut(&agent) {
            agent.state = state;
        }
    }

    /// Those that take part in the present round.
    fn members(&self) -> Vec<AgentId> {
        self.agents
            .iter()
            .filter(|(_, agent)| agent.state != State::Idle)
            .map(|(id, _)| *id)
            .collect()
    }

    /// "node 1 (host b)".
    fn describe(&self, agent: AgentId) -> String {
        let Some(Agent { node, .. }) = self.agents.get(&agent) else { return "a node".into() };
        match node.node_rank {
            Some(rank) => format!("node {rank} (host {})", node.host),
            None => format!("the node at {} (host {})", node.address, node.host),
        }
    }

    /// Who has not come so far.
    fn missing(&self, waited: Duration) -> String {
        let waited = waited.as_secs();
        if self.is_static {
            let present = |rank: usize| {
                self.agents.values().any(|agent| agent.node.node_rank == Some(rank as u32))
            };
            let missing: Vec<_> =
                (0..self.max).filter(|rank| !present(*rank)).map(|rank| rank.to_string()).collect();
            let list = missing.join(", ");
            return match missing.len() {
                1 => format!("node {list} has not joined within {waited} s"),
                _ => format!("nodes {list} have not joined within {waited} s"),
            };
        }
        let hosts: Vec<_> = self.agents.values().map(|agent| agent.node.host.as_str()).collect();
        let (present, min) = (self.agents.len(), self.min);
        format!(
            "only {present} of at least {min} nodes have joined within {waited} s: {}",
            hosts.join(", ")
        )
    }
}

fn range((min, max): (u32, u32)) -> String {
    match min == max {
        true => max.to_string(),
        false => format!("{min}:{max}"),
    }
}

#[cfg(test)]
mod tests;
