//! Decides about the job as a whole: who takes part, when a round starts and stops, how the job ends. Pure: events and
//! the time come in, orders go out. It runs in the agent of the leading node; the others are connected to it.
//!
//! A *round* is one start of all workers. It ends well when every node has finished; at the first failure all are
//! stopped, and, if restarts are left, another round begins. With `--nnodes MIN:MAX` a round also ends for a node that
//! is lost or has come, and goes on with those that are there, without using up a restart.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::job::{Job, Meeting, Patience};
use crate::round::Placement;
use crate::worker::End;

/// An agent: flow-launch on one node.
pub type AgentId = u64;

/// The agent of the leading node, in which the coordinator runs.
pub const LEADER: AgentId = 0;

/// A node, as its agent describes it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Node {
    pub host: String,
    /// Where the others reach it.
    pub address: String,
    /// Its place where it was given one.
    pub node_rank: Option<u32>,
    pub local_world_size: u32,
    pub role: String,
    /// `--nnodes`, by which all must go.
    pub nodes: (u32, u32),
}

/// What an agent tells.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Event {
    /// It is there and can start workers. `port` is free on its node.
    Joined { node: Node, port: u16 },
    /// A worker has failed; the agent stops its others.
    Failed { round: u32, failure: Failure },
    /// A worker has ended, in these words: its peers may ask.
    Exited { round: u32, rank: u32, end: String },
    /// All its workers have ended well.
    Finished { round: u32 },
    /// All its workers are gone, after a failure or an order. `cause` tells of its first failure in full.
    Stopped { round: u32, cause: Option<String>, port: u16 },
    /// It was sent a signal and will end.
    Leaving { signal: i32 },
    /// It has ended. Told in its name if it could not.
    Gone { why: String },
}

/// The first failure on a node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Failure {
    /// In a line.
    pub summary: String,
    pub end: End,
}

/// What an agent is to do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Order {
    Start {
        round: u32,
        placement: Placement,
    },
    /// Stop the workers; `why` is for the user.
    Stop {
        round: u32,
        why: Option<String>,
    },
    /// Tell the user.
    Say(String),
    /// The job is over.
    End(Verdict),
}

/// How the job ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    pub code: u8,
    /// What to say about it.
    pub cause: Option<String>,
}

/// Failures that come together: a crash is to blame before an exit code, which is how a worker that misses its peer
/// ends.
const TOGETHER: Duration = Duration::from_millis(200);

/// When to say for the first time that nodes are missing.
const FIRST_NOTICE: Duration = Duration::from_secs(10);

/// Exit code of a job that hung, as that of `timeout`.
const HUNG: i32 = 124;

/// How long an agent may take to stop its workers beyond their grace period.
const STOPPING: Duration = Duration::from_secs(30);

struct Agent {
    node: Node,
    port: u16,
    state: State,
    cause: Option<String>,
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
    /// Since when agents are awaited, since when there are enough, and when to say that some are missing.
    Gathering {
        since: Instant,
        enough: Option<Instant>,
        notice: Instant,
    },
    Running,
    Stopping {
        why: Why,
        deadline: Instant,
    },
    Over,
}

#[derive(Clone, Debug, PartialEq)]
enum Why {
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
    patience: Patience,
    grace: Duration,
    max_restarts: u32,
    agents: BTreeMap<AgentId, Agent>,
    phase: Phase,
    round: u32,
    failures: u32,
    orders: Vec<(AgentId, Order)>,
}

impl Coordinator {
    pub fn new(job: &Job, now: Instant) -> Coordinator {
        Coordinator {
            min: job.nodes.min as usize,
            max: job.nodes.max as usize,
            is_static: matches!(job.nodes.meeting, Meeting::Static { .. }),
            patience: job.nodes.patience,
            grace: job.grace,
            max_restarts: job.max_restarts,
            agents: BTreeMap::new(),
            phase: Phase::Gathering { since: now, enough: None, notice: now + FIRST_NOTICE },
            round: 0,
            failures: 0,
            orders: Vec::new(),
        }
    }

    /// An agent has told something; what is to be done about it, by whom.
    pub fn handle(&mut self, agent: AgentId, event: Event, now: Instant) -> Vec<(AgentId, Order)> {
        match event {
            Event::Joined { node, port } => self.joined(agent, node, port, now),
            Event::Gone { why } => self.gone(agent, &format!("was lost: {why}"), now),
            _ if !self.agents.contains_key(&agent) => {}
            Event::Failed { round, failure } if round == self.round => self.failed(agent, failure, now),
            Event::Finished { round } if round == self.round => self.set(agent, State::Finished),
            Event::Stopped { round, cause, port } if round == self.round => {
                // One that had stopped before it was ordered to says so twice; the first time it knows the cause.
                if let Some(agent) = self.agents.get_mut(&agent).filter(|agent| agent.state != State::Idle) {
                    (agent.state, agent.cause, agent.port) = (State::Idle, cause, port);
                }
            }
            Event::Leaving { signal } => self.leaving(agent, signal, now),
            Event::Exited { .. } | Event::Failed { .. } | Event::Finished { .. } | Event::Stopped { .. } => {}
        }
        self.go_on(now)
    }

    /// Time has passed.
    pub fn elapsed(&mut self, now: Instant) -> Vec<(AgentId, Order)> {
        match &mut self.phase {
            Phase::Stopping { deadline, .. } if *deadline <= now => *deadline = now + STOPPING,
            _ => return self.go_on(now),
        }
        // The leader's own workers are waited for: there is nobody to go on without it.
        let late: Vec<AgentId> = self.members().into_iter().filter(|agent| *agent != LEADER).collect();
        for agent in late {
            self.end(agent, 1, Some("the workers of this node did not stop in time".into()));
            self.gone(agent, "was lost: it did not stop its workers in time", now);
        }
        self.go_on(now)
    }

    fn go_on(&mut self, now: Instant) -> Vec<(AgentId, Order)> {
        self.advance(now);
        std::mem::take(&mut self.orders)
    }

    /// Something that the user should know, on every node.
    pub fn say(&mut self, text: &str) -> Vec<(AgentId, Order)> {
        self.members().into_iter().map(|agent| (agent, Order::Say(text.to_string()))).collect()
    }

    /// The workers hang: that is a failure.
    pub fn hung(&mut self, summary: String, now: Instant) -> Vec<(AgentId, Order)> {
        self.failed(LEADER, Failure { summary, end: End::Exit(HUNG) }, now);
        std::mem::take(&mut self.orders)
    }

    /// The job cannot go on, for this reason.
    pub fn give_up(&mut self, cause: String) -> Vec<(AgentId, Order)> {
        self.end_all(1, Some(cause));
        std::mem::take(&mut self.orders)
    }

    /// When [`Coordinator::elapsed`] is to be called.
    pub fn deadline(&self) -> Option<Instant> {
        match &self.phase {
            Phase::Gathering { since, enough, notice } => Some(match enough {
                Some(enough) => *enough + self.patience.last_call,
                None => (*since + self.patience.join).min(*notice),
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

    fn joined(&mut self, agent: AgentId, node: Node, port: u16, now: Instant) {
        let own = (self.min as u32, self.max as u32);
        if node.nodes != own {
            let cause = format!("--nnodes is {} here, but {} on the leading node", range(node.nodes), range(own));
            return self.end(agent, 1, Some(cause));
        }
        let workers = self.agents.values().map(|other| u64::from(other.node.local_world_size)).sum::<u64>();
        if workers + u64::from(node.local_world_size) > u32::MAX.into() {
            return self.end(agent, 1, Some("all nodes together have too many workers".into()));
        }
        let taken = self.agents.iter().find(|(_, other)| self.is_static && other.node.node_rank == node.node_rank);
        if let Some((&other, Agent { node: Node { host, .. }, .. })) = taken {
            if self.failures >= self.max_restarts || *host != node.host || other == LEADER {
                let rank = node.node_rank.unwrap_or_default();
                let cause = format!("node rank {rank} is taken by host {host}: give each node its own");
                return self.end(agent, 1, Some(cause));
            }
            // A machine that was started again before its silence was noticed.
            self.end(other, 1, Some("another flow-launch has taken its place".into()));
            self.gone(other, "was lost: it was started again", now);
        }
        if self.phase == Phase::Over {
            return self.end(agent, 1, Some("the job is over".into()));
        }
        self.agents.insert(agent, Agent { node, port, state: State::Idle, cause: None });
        let finishing = self.agents.values().any(|agent| agent.state == State::Finished);
        if self.phase == Phase::Running && self.members().len() < self.max && !finishing {
            let why = format!("{} has joined", self.describe(agent));
            self.stop(Why::Change, Some(why), now);
        }
    }

    fn failed(&mut self, agent: AgentId, failure: Failure, now: Instant) {
        match &mut self.phase {
            Phase::Running => {
                let told = self.restart(&failure.summary);
                self.stop(Why::Failure { agent, failure, at: now }, told, now);
            }
            Phase::Stopping { why: Why::Failure { agent: first, failure: known, at }, .. }
                if now - *at < TOGETHER && failure.end.is_crash() && !known.end.is_crash() =>
            {
                (*first, *known) = (agent, failure);
            }
            _ => {}
        }
    }

    fn leaving(&mut self, agent: AgentId, signal: i32, now: Instant) {
        let enough_left = self.members().iter().filter(|other| **other != agent).count() >= self.min;
        if agent != LEADER && !self.is_static && (enough_left || self.agents[&agent].state != State::Running) {
            return self.gone(agent, "has left, as it was told to end", now);
        }
        let cause = (agent != LEADER).then(|| format!("{} was told to end", self.describe(agent)));
        let signalled = Why::Signal { signal, cause };
        let restarts = self.failures < self.max_restarts;
        match &mut self.phase {
            Phase::Running => self.stop(signalled, None, now),
            Phase::Gathering { .. } => self.phase = Phase::Stopping { why: signalled, deadline: now },
            Phase::Stopping { why: Why::Failure { .. } | Why::Lost { .. }, .. } if !restarts => {}
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
            self.stop(Why::Change, Some(format!("{summary}; going on without it")), now);
        } else {
            let told = self.restart(&summary);
            self.stop(Why::Lost { summary }, told, now);
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
            let states = || self.agents.values().map(|agent| agent.state).filter(|state| *state != State::Idle);
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
            let enough = enough.or((present >= self.min).then_some(now)).filter(|_| present >= self.min);
            if now >= notice && enough.is_none() {
                notice = now + 2 * (now - since);
                let text = self.missing(now - since);
                self.orders.extend(self.agents.keys().map(|agent| (*agent, Order::Say(text.clone()))));
            }
            self.phase = Phase::Gathering { since, enough, notice };
            // Later rounds take who is there: another node is welcome at any time.
            let last_call = if self.round == 0 { self.patience.last_call } else { Duration::ZERO };
            if present >= self.max || enough.is_some_and(|enough| now >= enough + last_call) {
                self.start();
            } else if enough.is_none() && now >= since + self.patience.join {
                self.end_all(1, Some(self.missing(self.patience.join)));
            }
        }
    }

    /// All workers of a round are gone.
    fn stopped(&mut self, why: Why, now: Instant) {
        let (code, cause) = match why {
            Why::Change => return self.gather(now),
            Why::Signal { signal, cause } => return self.end_all(End::Signal(signal).code(), cause),
            Why::Failure { agent, failure, .. } => {
                let told = self.agents.get(&agent).and_then(|agent| agent.cause.clone());
                (failure.end.code(), told.unwrap_or(failure.summary))
            }
            Why::Lost { summary } => (1, summary),
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
        // By node rank where there is one; else in the order in which they came, the leader first.
        members.sort_by_key(|agent| (self.agents[agent].node.node_rank, *agent));
        members.truncate(self.max);
        let nodes: Vec<&Node> = members.iter().map(|agent| &self.agents[agent].node).collect();
        let world_size = nodes.iter().map(|node| node.local_world_size).sum();
        let first = &self.agents[&members[0]];
        let (master_addr, master_port) = (first.node.address.clone(), first.port);
        let mut first_rank = 0;
        for (group_rank, agent) in members.iter().enumerate() {
            let node = nodes[group_rank];
            let same_role = |others: &[&Node]| -> u32 {
                others.iter().filter(|other| other.role == node.role).map(|other| other.local_world_size).sum()
            };
            let placement = Placement {
                restart_count: self.failures,
                group_rank: group_rank as u32,
                group_world_size: members.len() as u32,
                first_rank,
                local_world_size: node.local_world_size,
                world_size,
                first_role_rank: same_role(&nodes[..group_rank]),
                role_world_size: same_role(&nodes),
                master_addr: master_addr.clone(),
                master_port,
                store: Default::default(),
            };
            first_rank += node.local_world_size;
            self.orders.push((*agent, Order::Start { round: self.round, placement }));
        }
        for agent in members {
            self.set(agent, State::Running);
        }
        self.phase = Phase::Running;
    }

    fn stop(&mut self, why: Why, told: Option<String>, now: Instant) {
        for agent in self.members() {
            self.set(agent, State::Running); // one that has finished answers too
            self.orders.push((agent, Order::Stop { round: self.round, why: told.clone() }));
        }
        self.phase = Phase::Stopping { why, deadline: now + self.grace + STOPPING };
    }

    fn end(&mut self, agent: AgentId, code: u8, cause: Option<String>) {
        self.orders.push((agent, Order::End(Verdict { code, cause })));
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
        self.agents.iter().filter(|(_, agent)| agent.state != State::Idle).map(|(id, _)| *id).collect()
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
            let present = |rank: usize| self.agents.values().any(|agent| agent.node.node_rank == Some(rank as u32));
            let missing: Vec<_> = (0..self.max).filter(|rank| !present(*rank)).map(|rank| rank.to_string()).collect();
            let list = missing.join(", ");
            return match missing.len() {
                1 => format!("node {list} has not joined within {waited} s"),
                _ => format!("nodes {list} have not joined within {waited} s"),
            };
        }
        let hosts: Vec<_> = self.agents.values().map(|agent| agent.node.host.as_str()).collect();
        let (present, min) = (self.agents.len(), self.min);
        format!("only {present} of at least {min} nodes have joined within {waited} s: {}", hosts.join(", "))
    }
}

fn range((min, max): (u32, u32)) -> String {
    match min == max {
        true => max.to_string(),
        false => format!("{min}:{max}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsString;

    const SECOND: Duration = Duration::from_secs(1);

    /// A coordinator with its clock, and what the agents were ordered.
    struct Test {
        coordinator: Coordinator,
        now: Instant,
        orders: Vec<(AgentId, Order)>,
    }

    impl Test {
        fn new(flags: &str) -> Test {
            let line = format!("flow-launch {flags} train");
            let job = Job::parse(line.split_whitespace().map(OsString::from), &|_| None).unwrap();
            let now = Instant::now();
            Test { coordinator: Coordinator::new(&job, now), now, orders: Vec::new() }
        }

        fn tell(&mut self, agent: AgentId, event: Event) {
            self.orders.extend(self.coordinator.handle(agent, event, self.now));
        }

        fn join(&mut self, agent: AgentId, workers: u32) {
            let node = Node {
                host: format!("host{agent}"),
                address: format!("10.0.0.{agent}"),
                node_rank: self.coordinator.is_static.then_some(agent as u32),
                local_world_size: workers,
                role: "default".into(),
                nodes: (self.coordinator.min as u32, self.coordinator.max as u32),
            };
            self.tell(agent, Event::Joined { node, port: 100 + agent as u16 });
        }

        fn pass(&mut self, time: Duration) {
            self.now += time;
            self.orders.extend(self.coordinator.elapsed(self.now));
        }

        fn fail(&mut self, agent: AgentId, end: End) {
            let failure = Failure { summary: format!("agent {agent}: {end}"), end };
            self.tell(agent, Event::Failed { round: self.coordinator.round, failure });
        }

        fn stopped(&mut self, agent: AgentId, cause: Option<&str>) {
            let round = self.coordinator.round;
            self.tell(agent, Event::Stopped { round, cause: cause.map(String::from), port: 200 });
        }

        fn finish(&mut self, agent: AgentId) {
            self.tell(agent, Event::Finished { round: self.coordinator.round });
        }

        /// The placements of the round that has just started, by agent.
        fn started(&mut self) -> Vec<(AgentId, Placement)> {
            let placement = |(agent, order)| match order {
                Order::Start { placement, .. } => (agent, placement),
                other => panic!("agent {agent}: {other:?}"),
            };
            std::mem::take(&mut self.orders).into_iter().map(placement).collect()
        }

        /// First ranks and world size of the round that has just started.
        fn ranks(&mut self) -> (Vec<(AgentId, u32)>, u32) {
            let started = self.started();
            let world_size = started[0].1.world_size;
            (started.into_iter().map(|(agent, placement)| (agent, placement.first_rank)).collect(), world_size)
        }

        /// Who was told to stop, and what was said.
        fn stops(&mut self) -> (Vec<AgentId>, Option<String>) {
            let mut said = None;
            let orders = std::mem::take(&mut self.orders);
            let agents = orders.into_iter().map(|(agent, order)| match order {
                Order::Stop { why, .. } => {
                    said = why;
                    agent
                }
                other => panic!("agent {agent}: {other:?}"),
            });
            (agents.collect(), said)
        }

        /// The code that all agents were told to end with, and what was said.
        fn end(&mut self) -> (u8, Option<String>) {
            let orders = std::mem::take(&mut self.orders);
            let verdicts: Vec<_> = orders
                .into_iter()
                .map(|(_, order)| match order {
                    Order::End(verdict) => verdict,
                    other => panic!("{other:?}"),
                })
                .collect();
            assert!(!verdicts.is_empty() && verdicts.iter().all(|verdict| *verdict == verdicts[0]), "{verdicts:?}");
            (verdicts[0].code, verdicts[0].cause.clone())
        }
    }

    const STATIC: &str = "--nnodes 2 --node_rank 0 --master_addr 10.0.0.0 --master_port 7";
    const THREE: &str = "--nnodes 3 --rdzv-endpoint 10.0.0.0:7";
    const ELASTIC: &str = "--nnodes 1:2 --rdzv-endpoint 10.0.0.0:7 --rdzv-conf last_call_timeout=5";

    #[test]
    fn a_job_on_one_node_starts_at_once_and_ends_well() {
        let mut test = Test::new("");
        test.join(LEADER, 2);
        let started = test.started();
        assert_eq!((started[0].1.world_size, started[0].1.master_port), (2, 100));
        assert_eq!(test.coordinator.deadline(), None);
        test.finish(LEADER);
        assert_eq!(test.end(), (0, None));
    }

    #[test]
    fn static_nodes_are_ranked_as_they_were_told() {
        let mut test = Test::new(STATIC);
        test.join(1, 2);
        assert_eq!(test.orders, []);
        test.join(LEADER, 3);
        assert_eq!(test.ranks(), (vec![(0, 0), (1, 3)], 5));
        test.join(1, 1);
        let (code, cause) = test.end();
        assert!(code == 1 && cause.unwrap().contains("node rank 1 is taken by host host1"));
    }

    #[test]
    fn nodes_at_an_endpoint_are_ranked_as_they_come() {
        let mut test = Test::new(THREE);
        for (agent, workers) in [(LEADER, 1), (2, 2), (1, 3)] {
            test.join(agent, workers);
        }
        let started = test.started();
        let ranks: Vec<_> = started.iter().map(|(agent, p)| (*agent, p.group_rank, p.first_rank)).collect();
        assert_eq!(ranks, [(0, 0, 0), (1, 1, 1), (2, 2, 4)]);
        assert!(started.iter().all(|(_, p)| p.master_addr == "10.0.0.0" && p.master_port == 100));
    }

    #[test]
    fn those_who_do_not_come_are_named() {
        let mut test = Test::new(&format!("{STATIC} --rdzv-conf join_timeout=3"));
        test.join(LEADER, 1);
        test.pass(2 * SECOND);
        assert_eq!(test.orders, []);
        test.pass(SECOND);
        assert_eq!(test.end(), (1, Some("node 1 has not joined within 3 s".into())));
        let mut test = Test::new(&format!("{THREE} --rdzv-conf join_timeout=3"));
        test.join(LEADER, 1);
        test.join(1, 1);
        test.pass(3 * SECOND);
        let cause = test.end().1.unwrap();
        assert_eq!(cause, "only 2 of at least 3 nodes have joined within 3 s: host0, host1");
    }

    #[test]
    fn a_long_wait_for_nodes_is_said() {
        let mut test = Test::new(STATIC);
        test.join(LEADER, 1);
        test.pass(FIRST_NOTICE);
        assert_eq!(test.orders, [(LEADER, Order::Say("node 1 has not joined within 10 s".into()))]);
        test.pass(FIRST_NOTICE);
        assert_eq!(test.orders.len(), 1);
        test.pass(FIRST_NOTICE);
        assert_eq!(test.orders.len(), 2);
    }

    #[test]
    fn a_failure_stops_all_and_is_told_to_all() {
        let mut test = Test::new(STATIC);
        test.join(LEADER, 1);
        test.join(1, 1);
        test.started();
        test.fail(1, End::Exit(3));
        assert_eq!(test.stops(), (vec![0, 1], None));
        test.stopped(1, Some("rank 1 ..."));
        test.stopped(1, None); // it had stopped when it was ordered to
        assert_eq!(test.orders, []);
        test.stopped(LEADER, None);
        assert_eq!(test.end(), (3, Some("rank 1 ...".into())));
    }

    #[test]
    fn of_failures_that_come_together_a_crash_is_the_cause() {
        for (wait, code) in [(Duration::ZERO, 137), (SECOND, 1)] {
            let mut test = Test::new(STATIC);
            test.join(LEADER, 1);
            test.join(1, 1);
            test.fail(LEADER, End::Exit(1));
            test.now += wait;
            test.fail(1, End::Signal(9));
            test.orders.clear();
            test.stopped(LEADER, None);
            test.stopped(1, None);
            assert_eq!(test.end().0, code);
        }
    }

    #[test]
    fn restarts_are_counted_and_finished_nodes_take_part() {
        let mut test = Test::new(&format!("{STATIC} --max-restarts 1"));
        test.join(LEADER, 1);
        test.join(1, 1);
        assert_eq!(test.started()[0].1.restart_count, 0);
        test.finish(LEADER);
        test.fail(1, End::Exit(3));
        let (agents, said) = test.stops();
        assert_eq!((agents, said.unwrap().as_str()), (vec![0, 1], "agent 1: exit code 3; restart 1 of 1"));
        test.stopped(1, None);
        test.stopped(LEADER, None);
        let started = test.started();
        assert!(started.len() == 2 && started.iter().all(|(_, p)| p.restart_count == 1 && p.master_port == 200));
        test.fail(1, End::Exit(4));
        test.stops();
        test.stopped(1, None);
        test.stopped(LEADER, None);
        assert_eq!(test.end(), (4, Some("agent 1: exit code 4".into())));
    }

    #[test]
    fn a_lost_node_ends_a_static_job() {
        let mut test = Test::new(STATIC);
        test.join(LEADER, 1);
        test.join(1, 1);
        test.started();
        test.tell(1, Event::Gone { why: "silence".into() });
        assert_eq!(test.stops(), (vec![0], None));
        test.stopped(LEADER, None);
        assert_eq!(test.end(), (1, Some("node 1 (host host1) was lost: silence".into())));
    }

    #[test]
    fn a_lost_node_may_come_back_if_restarts_are_left() {
        let mut test = Test::new(&format!("{STATIC} --max-restarts 1"));
        test.join(LEADER, 1);
        test.join(1, 1);
        test.tell(1, Event::Gone { why: "silence".into() });
        test.stopped(LEADER, None);
        test.orders.clear();
        test.join(1, 1);
        assert_eq!(test.started()[0].1.restart_count, 1);
    }

    #[test]
    fn a_node_that_was_started_again_takes_its_own_place() {
        let mut test = Test::new(&format!("{STATIC} --max-restarts 1"));
        test.join(LEADER, 1);
        test.join(1, 1);
        test.started();
        let node = Node { host: "host1".into(), ..test.coordinator.agents[&1].node.clone() };
        test.tell(2, Event::Joined { node, port: 300 });
        assert!(matches!(&test.orders[..], [(1, Order::End(_)), (LEADER, Order::Stop { .. })]), "{:?}", test.orders);
        test.orders.clear();
        test.stopped(LEADER, None);
        assert_eq!(test.ranks(), (vec![(0, 0), (2, 1)], 2));
    }

    #[test]
    fn nodes_must_agree_on_their_number() {
        let mut test = Test::new(STATIC);
        test.join(LEADER, 1);
        let node = Node { nodes: (1, 3), node_rank: Some(1), ..test.coordinator.agents[&LEADER].node.clone() };
        test.tell(1, Event::Joined { node, port: 1 });
        assert_eq!(test.end(), (1, Some("--nnodes is 1:3 here, but 2 on the leading node".into())));
    }

    #[test]
    fn an_elastic_job_waits_for_a_last_call() {
        let mut test = Test::new(ELASTIC);
        test.join(LEADER, 1);
        test.pass(4 * SECOND);
        assert_eq!(test.orders, []);
        test.pass(SECOND);
        assert_eq!(test.ranks(), (vec![(0, 0)], 1));
    }

    #[test]
    fn an_elastic_job_goes_on_with_who_is_left_and_takes_in_who_comes() {
        let mut test = Test::new(ELASTIC);
        test.join(LEADER, 1);
        test.join(1, 2);
        assert_eq!(test.ranks(), (vec![(0, 0), (1, 1)], 3));
        test.tell(1, Event::Gone { why: "silence".into() });
        assert!(test.stops().1.unwrap().ends_with("was lost: silence; going on without it"));
        test.stopped(LEADER, None);
        let started = test.started();
        assert_eq!((started.len(), started[0].1.world_size, started[0].1.restart_count), (1, 1, 0));
        test.join(2, 4);
        assert!(test.stops().1.unwrap().ends_with("has joined"));
        test.stopped(LEADER, None);
        assert_eq!(test.ranks(), (vec![(0, 0), (2, 1)], 5));
        // A third one waits until there is room.
        test.join(3, 1);
        assert_eq!(test.orders, []);
        test.tell(2, Event::Leaving { signal: 15 });
        test.stops();
        test.stopped(LEADER, None);
        assert_eq!(test.ranks(), (vec![(0, 0), (3, 1)], 2));
        test.finish(3);
        test.finish(LEADER);
        assert_eq!(test.end(), (0, None));
    }

    #[test]
    fn a_signal_to_one_node_ends_a_static_job() {
        let mut test = Test::new(STATIC);
        test.join(LEADER, 1);
        test.join(1, 1);
        test.started();
        test.tell(1, Event::Leaving { signal: 15 });
        test.stops();
        test.tell(1, Event::Gone { why: "it ended".into() });
        test.stopped(LEADER, None);
        assert_eq!(test.end(), (143, Some("node 1 (host host1) was told to end".into())));
        let mut waiting = Test::new(STATIC);
        waiting.join(LEADER, 1);
        waiting.tell(LEADER, Event::Leaving { signal: 2 });
        assert_eq!(waiting.end(), (130, None));
    }

    #[test]
    fn an_agent_that_does_not_stop_its_workers_is_given_up() {
        let mut test = Test::new(STATIC);
        test.join(LEADER, 1);
        test.join(1, 1);
        test.started();
        test.fail(LEADER, End::Exit(3));
        test.stops();
        test.stopped(LEADER, Some("rank 0 ..."));
        test.pass(test.coordinator.grace + STOPPING);
        assert!(matches!(&test.orders[0], (1, Order::End(verdict)) if verdict.code == 1), "{:?}", test.orders);
        test.orders.remove(0);
        assert_eq!(test.end(), (3, Some("rank 0 ...".into())));
    }

    #[test]
    fn the_leaders_own_workers_are_waited_for() {
        let mut test = Test::new("");
        test.join(LEADER, 1);
        test.started();
        test.fail(LEADER, End::Exit(3));
        test.stops();
        test.pass(test.coordinator.grace + STOPPING);
        assert_eq!(test.orders, []);
        assert!(test.coordinator.deadline().unwrap() > test.now);
        test.stopped(LEADER, Some("rank 0 ..."));
        assert_eq!(test.end(), (3, Some("rank 0 ...".into())));
    }
}
