//! The leading agent's side of the control plane: the coordinator, and the stores through which
//! agents and workers reach it.
//!
//! All stores are served at one address. An agent sends its events to the agents' store and reads
//! its commands there, under numbered keys. Each round has a store of its own for the workers, and
//! one that speaks PyTorch's protocol.
//!
//! In place, a member keeps a copy of the workers' store. If it leads next, the workers go on.
//!
//! The leader's own agent uses no connection: `send` hands the event to the coordinator, and the
//! commands wait in a queue for the next `poll`.
//!
//! An elected leader does nothing before a majority follows it: events wait until then.

mod replication;
mod round;
mod stores;
mod watching;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use anyhow::Context;
use flow_store::net::secret;
use flow_store::{Address, Server};
use rustix::process::Signal;

use crate::control::candidate::{Candidate, LeaderPlace, PeerMessage};
use crate::control::claim::Claim;
use crate::control::coordinator::Coordinator;
use crate::control::job_record::MemberId;
use crate::control::local_store::LocalStore;
use crate::control::node::Node;
use crate::control::protocol::{
    AgentEvent, AgentId, ClusterEvent, Command, ControlMessage, KeptWorkers, LEADER, OVER_KEY,
    command_key,
};
use crate::control::stall::StallAction;
use crate::control::token::token;
use crate::control::watchers::{self, Watchers};
use crate::control::worker_report::WorkerReport;
use crate::job::{Job, Rendezvous};
use crate::net;
use crate::report::text::excerpt;

use round::{ReplicaState, Round, table_in};

/// The time that the leader stays for others to receive the result.
const LINGER: Duration = Duration::from_secs(10);

/// How the workers of a node that is lost have ended.
const LOST: &str = "the loss of its node";

/// The control plane of the agent that leads: the coordinator, and the store that serves the others.
pub struct Leader {
    coordinator: Coordinator,
    /// The agents' store, and this agent's part in elections.
    candidate: Candidate,
    /// The followers that may be members.
    members: HashMap<AgentId, MemberId>,
    /// Events that came before this agent might act as the leader.
    early: Vec<(AgentId, AgentEvent)>,
    /// It leads no more.
    has_stepped_down: bool,
    /// When `poll` was last called: another may lead if that is too long ago.
    polled: Instant,
    lease: Duration,
    /// An elected leader's claim of the endpoint ends with it.
    claim: Option<Claim>,
    /// The number of commands sent to each agent.
    commands_sent: HashMap<AgentId, u64>,
    /// The stores of the present round.
    round: Option<Round>,
    /// Of a job that goes on in place: the member that keeps a copy of the round's store.
    replica: ReplicaState,
    /// The number of replicas that were asked for, and the member that was asked last.
    replicas_asked: u64,
    last_asked: Option<MemberId>,
    /// The address at which all reach this node.
    address: String,
    port: u16,
    /// PyTorch's store is served here. If not, `master_port` is the user's choice of MASTER_PORT.
    has_agent_store: bool,
    master_port: Option<u16>,
    messages: VecDeque<ControlMessage>,
    cluster_events: Vec<ClusterEvent>,
    hang_timeout: Option<Duration>,
    watchers: Watchers,
    /// Once the job is over: when to leave at the latest.
    linger_until: Option<Instant>,
}

impl Leader {
    /// Serves all agents and workers at `port` of this host, which others know as `host`. Port 0
    /// means any free one.
    ///
    /// # Errors
    /// An `io::Error`, `AddrInUse` if the port is taken.
    pub fn serving(job: &Job, node: Node, host: &str, port: u16) -> anyhow::Result<Leader> {
        let (token, bind, master_port) = match job.nodes.rendezvous {
            Rendezvous::Alone { master_port, .. } => {
                let own = net::own(host);
                if own.is_none() {
                    log::warn!(
                        "{host} is no address of this host: workers cannot reach the stores \
                         there; leave out --master-addr for one node"
                    );
                }
                (secret()?, own.unwrap_or_else(net::any), master_port)
            }
            _ => (token(&job.nodes.id)?, net::interface(&[host, &node.address]), None),
        };
        let server = Server::start(&Address::Tcp(net::join(&bind.to_string(), port)), &token)?;
        let timeouts = job.nodes.timeouts;
        let mut candidate = Candidate::new(server, &token, timeouts.heartbeat, job.grace)?;
        let port = candidate.port().context("its store has no port")?;
        candidate.election.found(net::join(&node.address, port), Instant::now());
        let mut leader =
            Leader::new(job, &node, port, candidate, Coordinator::new(job, Instant::now()));
        leader.master_port = master_port;
        leader.send(AgentEvent::Joined { node, kept: None });
        Ok(leader)
    }

    /// Leads a job whose last leader is lost. New agents come to `endpoint`. The workers go on if this
    /// agent has a copy of their store; `kept` are its own.
    pub fn elected(
        job: &Job,
        node: Node,
        mut candidate: Candidate,
        kept: Option<KeptWorkers>,
        endpoint: String,
    ) -> anyhow::Result<Leader> {
        let port = candidate.port().context("this agent's store has no port")?;
        let record = candidate.election.record().clone();
        let local = candidate.take_replica()?;
        let table = match &local {
            Some(local) => table_in(&local.server)?,
            None => None,
        };
        let coordinator = Coordinator::resuming(job, &record.progress, table, Instant::now());
        let round = record.progress.round;
        let claim = Claim::start(token(&job.nodes.id)?, endpoint, record)?;
        let mut leader = Leader::new(job, &node, port, candidate, coordinator);
        leader.claim = Some(claim);
        let change = "the leading node is lost: another one leads";
        leader.watchers.note(change.into(), true, Instant::now());
        leader.messages.push_back(ControlMessage::Notice(
            "the leading node is lost: this one leads the job from now on".into(),
        ));
        if let Some(LocalStore { server, stores, .. }) = local {
            leader.serve_round(round, server, stores.token)?;
        }
        leader.send(AgentEvent::Joined { node, kept });
        Ok(leader)
    }

    fn new(
        job: &Job,
        node: &Node,
        port: u16,
        candidate: Candidate,
        coordinator: Coordinator,
    ) -> Leader {
        candidate.announce(&LeaderPlace::Here);
        Leader {
            coordinator,
            candidate,
            members: HashMap::new(),
            early: Vec::new(),
            has_stepped_down: false,
            polled: Instant::now(),
            lease: job.nodes.timeouts.heartbeat,
            claim: None,
            commands_sent: HashMap::new(),
            round: None,
            replica: ReplicaState::None,
            replicas_asked: 0,
            last_asked: None,
            address: node.address.clone(),
            port,
            has_agent_store: job.nodes.has_agent_store,
            master_port: None,
            messages: VecDeque::new(),
            cluster_events: Vec::new(),
            hang_timeout: job.hang_timeout,
            watchers: Watchers::new(&job.nodes.id),
            linger_until: None,
        }
    }

    /// Ends the leadership.
    pub fn into_candidate(self) -> Candidate {
        self.candidate
    }

    /// Returns a store that says who leads the job, and the token that it asks for.
    pub fn store(&self) -> (&str, &str) {
        self.candidate.store()
    }

    /// Handles an event of this node's agent.
    pub fn send(&mut self, event: AgentEvent) {
        self.notice_pause();
        if let AgentEvent::Leaving { signal } = event
            && (!self.may_act() || self.can_leave(signal))
        {
            return self.step_down("this node, which led the job, is stopped by a signal");
        }
        self.handle(LEADER, event);
    }

    /// Whether the others elect another leader, and the job goes on, when this one leaves. Ctrl-C is
    /// the wish to end the job.
    fn can_leave(&self, signal: i32) -> bool {
        let ends_job = signal == Signal::INT.as_raw();
        !ends_job && self.candidate.election.can_leave() && self.coordinator.can_leave()
    }

    /// Takes the next message for this node's agent. Handles what other agents and workers have sent.
    pub fn poll(&mut self) -> Option<ControlMessage> {
        self.notice_pause();
        self.take_messages();
        if !self.has_stepped_down {
            self.keep_leading();
        }
        if self.may_act() {
            self.coordinate();
        }
        self.messages.pop_front()
    }

    /// Handles what other agents have sent.
    fn take_messages(&mut self) {
        while let Some(message) = self.candidate.server.inbox().try_next() {
            match serde_json::from_slice(&message) {
                Ok(PeerMessage::Event(agent, event)) if agent != LEADER => {
                    self.handle(agent, event)
                }
                Ok(PeerMessage::Event(agent, event)) => {
                    log::warn!("malformed event: {event:?} in the name of agent {agent}")
                }
                Ok(PeerMessage::Request { request, answer }) => {
                    self.candidate.vote(&request, &answer)
                }
                Ok(PeerMessage::Led { record }) => {
                    self.candidate.election.learn(record, Instant::now());
                    if !self.candidate.election.is_leading() {
                        self.step_down("another node leads this job");
                    }
                }
                Err(error) => log::warn!(
                    "malformed event of another node's agent ({error}): got '{}'; do all nodes \
                     run the same version?",
                    excerpt(&message)
                ),
            }
        }
    }

    /// Gives the leadership up if it cannot be kept. Sends the record to all when it has changed.
    fn keep_leading(&mut self) {
        self.candidate.election.elapsed(Instant::now());
        if !self.candidate.election.is_leading() {
            return self.step_down("too few nodes follow this one");
        }
        self.coordinate_early();
        self.update_record();
    }

    /// Notes that this process did nothing for long: the others may have elected another leader.
    fn notice_pause(&mut self) {
        let now = Instant::now();
        let since = std::mem::replace(&mut self.polled, now);
        if now - since > self.lease / 2 && self.candidate.election.has_followers() {
            self.candidate.election.doubt(now);
            self.send_record();
        }
    }

    /// Brings the record up to date, and sends it to all if it has changed.
    fn update_record(&mut self) {
        if self.candidate.election.update(self.progress()) {
            self.send_record();
        }
    }

    fn send_record(&mut self) {
        let record = self.candidate.election.record().clone();
        for agent in self.members.keys().copied().collect::<Vec<_>>() {
            self.command(agent, Command::Record(record.clone()));
        }
    }

    /// Ends the leadership: the agent looks for another leader, as all others do.
    fn step_down(&mut self, why: &str) {
        let is_over = self.linger_until.is_some();
        if is_over || self.has_stepped_down {
            return;
        }
        self.candidate.announce(&LeaderPlace::Unknown);
        let early = self.early.iter().map(|(agent, _)| *agent);
        let members = self.members.keys().copied();
        let agents: BTreeSet<AgentId> =
            self.coordinator.followers().chain(members).chain(early).collect();
        for agent in agents {
            if agent != LEADER {
                self.command(agent, Command::Rejoin);
            }
        }
        self.has_stepped_down = true;
        // Its workers are stopped, and those of others look for the next leader.
        self.round = None;
        self.messages.clear();
        self.messages.push_back(ControlMessage::SteppedDown(why.into()));
    }

    /// Runs the coordinator.
    fn coordinate(&mut self) {
        self.take_reports();
        let now = Instant::now();
        if let Some(round) = &mut self.round {
            let action = round.stalls.elapsed(now);
            self.cluster_events.extend(
                action.as_ref().map(|action| ClusterEvent::Hang { report: action.report().into() }),
            );
            let commands = match action {
                Some(StallAction::Report(report)) => self.coordinator.notify(&report),
                Some(StallAction::Fail(hang)) => self.coordinator.hung(hang, now),
                None => Vec::new(),
            };
            self.dispatch(commands);
        }
        let commands = self.coordinator.elapsed(now);
        self.note_changes(None, &commands);
        self.dispatch(commands);
        self.answer_watchers();
        self.replicate();
    }

    /// Handles what workers have sent.
    fn take_reports(&mut self) {
        let now = Instant::now();
        while let Some(round) = &mut self.round
            && let Some(message) = round.store.inbox().try_next()
        {
            match serde_json::from_slice(&message) {
                // Else a worker has ended, or its node is lost: nobody would say that its wait is over.
                Ok(WorkerReport::Stall(update)) => {
                    if self.coordinator.runs(update.rank, update.replacement) {
                        round.stalls.update(update, now);
                    }
                }
                Ok(WorkerReport::Replica { number, is_complete }) => {
                    self.note_replica(number, is_complete)
                }
                Ok(WorkerReport::Newcomer { rank, replacement, waits }) => {
                    let commands = self.coordinator.newcomer(rank, replacement, waits, now);
                    self.dispatch(commands);
                }
                Err(error) => log::warn!(
                    "malformed report of a worker ({error}): got '{}'",
                    excerpt(&message)
                ),
            }
        }
    }

    /// Takes the events since the last call.
    pub fn events(&mut self) -> Vec<ClusterEvent> {
        std::mem::take(&mut self.cluster_events)
    }

    /// Notes that everything was suspended for this long.
    pub fn paused(&mut self, time: Duration) {
        self.round.iter_mut().for_each(|round| round.stalls.paused(time, Instant::now()));
    }

    /// Returns the descriptors that are readable when something has come.
    pub fn watch(&self) -> Vec<BorrowedFd<'_>> {
        let round = self.round.iter().map(|round| round.store.inbox().as_fd());
        self.candidate.watch().into_iter().chain(round).collect()
    }

    /// Returns when something is due.
    pub fn deadline(&self) -> Option<Instant> {
        let election = &self.candidate.election;
        let look = election.has_followers().then(|| self.polled + self.lease / 8);
        let mut deadlines = vec![self.linger_until, look, election.deadline()];
        // What is due otherwise waits until this agent may act.
        if self.may_act() {
            deadlines.push(self.watchers.deadline());
            deadlines.push(self.coordinator.deadline());
            deadlines.push(self.round.as_ref().and_then(|round| round.stalls.deadline()));
        }
        deadlines.into_iter().flatten().min()
    }

    /// Whether all followers have received the result, or had time to.
    pub fn is_alone(&self) -> bool {
        self.coordinator.is_alone()
            || self.linger_until.is_some_and(|linger_until| linger_until <= Instant::now())
    }

    fn handle(&mut self, agent: AgentId, event: AgentEvent) {
        let now = Instant::now();
        if self.has_stepped_down {
            if let AgentEvent::Joined { .. } | AgentEvent::Candidate { .. } = event {
                self.command(agent, Command::Rejoin);
            }
            return;
        }
        match event {
            AgentEvent::Candidate { member, term, record } => {
                let election = &mut self.candidate.election;
                if election.heard_of(term, now) {
                    self.step_down("there has been a later election");
                } else if election.give_way(record, now) {
                    self.step_down("this job has begun before");
                }
                if self.has_stepped_down {
                    return self.command(agent, Command::Rejoin);
                }
                self.members.insert(agent, member.id);
                self.candidate.election.joined(member);
                let record = self.candidate.election.record().clone();
                return self.command(agent, Command::Record(record));
            }
            AgentEvent::Has { age } => {
                if let Some(member) = self.members.get(&agent) {
                    self.candidate.election.acknowledged(*member, age);
                }
                return;
            }
            AgentEvent::Gone { .. } => {
                self.lose_replica(agent);
                if let Some(member) = self.members.remove(&agent)
                    // It may have joined again before the loss of its first connection was noticed.
                    && self.members.values().all(|other| *other != member)
                    && self.candidate.election.left(member, now)
                {
                    self.step_down("this node has lost most of those that elect the leader");
                }
            }
            _ => {}
        }
        self.early.push((agent, event));
        self.coordinate_early();
    }

    fn coordinate_early(&mut self) {
        if self.may_act() {
            for (agent, event) in std::mem::take(&mut self.early) {
                self.coordinate_event(agent, event);
            }
        }
    }

    /// Whether this agent may do what the coordinator decides. Once the job is over it only tells the
    /// others.
    fn may_act(&self) -> bool {
        let is_over = self.linger_until.is_some();
        !self.has_stepped_down && (is_over || self.candidate.election.acts())
    }

    fn coordinate_event(&mut self, agent: AgentId, event: AgentEvent) {
        // What a worker has sent before it, or another, has ended comes first. An agent that joins may
        // end another.
        if let AgentEvent::Exited { .. } | AgentEvent::Gone { .. } | AgentEvent::Joined { .. } =
            &event
        {
            self.take_reports();
        }
        if let AgentEvent::Exited { round, rank, replacement, end, .. } = &event
            && let Some(present) = self.round.as_mut().filter(|present| present.number == *round)
        {
            present.exited(*rank, *replacement, end);
        }
        let kept = match &event {
            AgentEvent::Joined { kept, .. } => kept.clone(),
            _ => None,
        };
        match event {
            AgentEvent::Trace { round, piece } => {
                if self.round.as_ref().is_some_and(|present| present.number == round) {
                    self.cluster_events.push(ClusterEvent::Trace(piece));
                }
            }
            AgentEvent::Watch { number } => self.ask_all(agent, number),
            AgentEvent::Status { number, status } => {
                self.watchers.answer(agent, number, status, Instant::now())
            }
            AgentEvent::Gone { .. } if self.forget_watcher(agent) => {}
            event => self.decide(agent, event),
        }
        if let Some(kept) = kept {
            self.note_kept(&kept);
        }
    }

    /// Lets the coordinator decide what follows an event.
    fn decide(&mut self, agent: AgentId, event: AgentEvent) {
        log::debug!("agent {agent}: {event:?}");
        match (&event, self.coordinator.host(agent)) {
            (AgentEvent::Joined { node, .. }, _) if agent != LEADER => {
                self.cluster_events.push(ClusterEvent::Joined { host: node.host.clone() })
            }
            (AgentEvent::Gone { why }, Some(host)) if self.linger_until.is_none() => self
                .cluster_events
                .push(ClusterEvent::Lost { host: host.into(), reason: why.clone() }),
            _ => {}
        }
        let now = Instant::now();
        let failure = watchers::failure(&event);
        let had_workers = self.coordinator.has_workers(agent);
        let commands = self.coordinator.handle(agent, event, now);
        let failure = failure.map(|what| (what, had_workers));
        self.note_changes(failure, &commands);
        self.dispatch(commands);
    }

    fn dispatch(&mut self, commands: Vec<(AgentId, Command)>) {
        // Their agents cannot say how they have ended.
        for (rank, replacement) in self.coordinator.take_lost_workers() {
            if let Some(round) = &mut self.round {
                round.exited(rank, replacement, LOST);
            }
        }
        for (agent, mut command) in commands {
            if let Command::Start { round, assignment } = &mut command {
                match self.open_stores(*round) {
                    Ok(stores) => assignment.stores = stores,
                    Err(error) => {
                        // No agent has started yet: end all of them instead.
                        let end = self
                            .coordinator
                            .give_up(format!("cannot serve the workers' store: {error:#}"));
                        return self.dispatch(end);
                    }
                }
            }
            if let Command::Keep { stores, .. } = &mut command
                && let Some(round) = &self.round
            {
                *stores = round.stores.clone();
            }
            // Only the leader's own result ends the job; a follower may be refused before that.
            if agent == LEADER && matches!(command, Command::Finish(_)) {
                self.linger_until.get_or_insert_with(|| Instant::now() + LINGER);
                self.candidate.server.set(OVER_KEY, b"");
                // Whoever leads next must know.
                self.update_record();
            }
            match &command {
                // It contains the store's token, which must not be logged.
                Command::Start { round, .. } => {
                    log::debug!("command for agent {agent}: start round {round}")
                }
                Command::Keep { round, .. } => {
                    log::debug!("command for agent {agent}: keep round {round}")
                }
                command => log::debug!("command for agent {agent}: {command:?}"),
            }
            self.command(agent, command);
        }
    }

    /// Sends a command to an agent.
    fn command(&mut self, agent: AgentId, command: Command) {
        if agent == LEADER {
            return self.messages.push_back(ControlMessage::Command(command));
        }
        let number = self.commands_sent.entry(agent).or_default();
        // Plain data: it cannot fail.
        let text = serde_json::to_vec(&command).unwrap_or_default();
        self.candidate.server.set(&command_key(agent, *number), &text);
        *number += 1;
    }
}

#[cfg(test)]
mod tests;
