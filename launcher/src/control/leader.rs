//! The leading node's side of the link: the coordinator, and the stores through which agents and
//! workers reach it.
//!
//! All are served at one address. An agent posts its events to the agents' store and finds its
//! commands there, numbered. Each round has a store of its own beside it for the workers, and one of
//! PyTorch's.

use std::collections::{HashMap, VecDeque};
use std::iter;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use anyhow::{bail, Context};
use flow_comm::store::{Address, Server, TcpStore};

use crate::control::assignment::RendezvousStoreInfo;
use crate::control::coordinator::Coordinator;
use crate::control::protocol::{
    command_key, AgentEvent, AgentId, ClusterEvent, Command, Node, LEADER,
};
use crate::control::stall::{StallAction, StallTracker};
use crate::control::token::{secret, token};
use crate::job::{Job, Rendezvous};
use crate::net;

/// How long the leader stays for others to hear how the job ended.
const LINGER: Duration = Duration::from_secs(10);

/// See the head of this file.
pub struct Leader {
    coordinator: Coordinator,
    agents: Server,
    /// How many commands each agent was given.
    commands_sent: HashMap<AgentId, u64>,
    /// The stores of the present round.
    round: Option<Round>,
    /// Where all reach this node.
    address: String,
    port: u16,
    /// Whether PyTorch's store is served here; if not, what is to be MASTER_PORT, if the user has
    /// said so.
    has_agent_store: bool,
    master_port: Option<u16>,
    commands: VecDeque<Command>,
    cluster_events: Vec<ClusterEvent>,
    hang_timeout: Option<Duration>,
    /// When to leave, once the job is over.
    linger_until: Option<Instant>,
}

impl Leader {
    /// Serves all agents and workers at `port` of this machine, which others know as `host`; 0 is
    /// any free one.
    ///
    /// # Errors
    /// An `io::Error`, `AddrInUse` if the port is taken.
    pub fn serving(job: &Job, node: Node, host: &str, port: u16) -> anyhow::Result<Leader> {
        let (token, bind, master_port) = match job.nodes.rendezvous {
            Rendezvous::Alone { master_port, .. } => {
                let own = net::own(host);
                if own.is_none() {
                    log::warn!(
                        "{host} is no address of this machine: workers that go there find neither store; leave out \
                         --master-addr for one node"
                    );
                }
                (secret()?, own.unwrap_or_else(net::any), master_port)
            }
            _ => (token(job)?, net::interface(&[host, &node.address]), None),
        };
        let agents = Server::start(&Address::Tcp(net::join(&bind.to_string(), port)), &token)?;
        let Address::Tcp(bound) = agents.address() else {
            bail!("it is served elsewhere: {}", agents.address())
        };
        let port = bound
            .rsplit_once(':')
            .and_then(|(_, port)| port.parse().ok())
            .context("it has no port")?;
        let mut leader = Leader {
            coordinator: Coordinator::new(job, Instant::now()),
            agents,
            commands_sent: HashMap::new(),
            round: None,
            address: node.address.clone(),
            port,
            has_agent_store: job.nodes.has_agent_store,
            master_port,
            commands: VecDeque::new(),
            cluster_events: Vec::new(),
            hang_timeout: job.hang_timeout,
            linger_until: None,
        };
        leader.send(AgentEvent::Joined { node });
        Ok(leader)
    }

    /// What the agent of this node has to tell.
    pub fn send(&mut self, event: AgentEvent) {
        self.handle(LEADER, event);
    }

    /// The next command for the agent of this node.
    pub fn poll(&mut self) -> Option<Command> {
        while let Some(message) = self.agents.inbox().try_next() {
            match serde_json::from_slice(&message) {
                Ok((agent, event)) if agent != LEADER => self.handle(agent, event),
                _ => log::warn!(
                    "another node's agent has sent what makes no sense: is it of the same version?"
                ),
            }
        }
        let now = Instant::now();
        if let Some(round) = &mut self.round {
            while let Some(message) = round.store.inbox().try_next() {
                match serde_json::from_slice(&message) {
                    Ok(wait) => round.stalls.update(wait, now),
                    Err(error) => log::warn!("a worker has posted what makes no sense: {error}"),
                }
            }
            let action = round.stalls.elapsed(now);
            self.cluster_events.extend(
                action.as_ref().map(|action| ClusterEvent::Hang { report: action.report().into() }),
            );
            let commands = match action {
                Some(StallAction::Report(report)) => self.coordinator.say(&report),
                Some(StallAction::Fail(report)) => self.coordinator.hung(report, now),
                None => Vec::new(),
            };
            self.dispatch(commands);
        }
        let commands = self.coordinator.elapsed(now);
        self.dispatch(commands);
        self.commands.pop_front()
    }

    /// What has happened since the last call.
    pub fn events(&mut self) -> Vec<ClusterEvent> {
        std::mem::take(&mut self.cluster_events)
    }

    /// For so long everything was stopped.
    pub fn paused(&mut self, time: Duration) {
        self.round.iter_mut().for_each(|round| round.stalls.paused(time, Instant::now()));
    }

    pub fn watch(&self) -> Vec<BorrowedFd<'_>> {
        let round = self.round.as_ref().map(|round| &round.store);
        iter::once(&self.agents).chain(round).map(|store| store.inbox().as_fd()).collect()
    }

    pub fn deadline(&self) -> Option<Instant> {
        let stalls = self.round.as_ref().and_then(|round| round.stalls.deadline());
        [self.linger_until, self.coordinator.deadline(), stalls].into_iter().flatten().min()
    }

    /// All others have received that the job is over, or had time to.
    pub fn is_alone(&self) -> bool {
        self.coordinator.is_alone()
            || self.linger_until.is_some_and(|linger_until| linger_until <= Instant::now())
    }

    fn handle(&mut self, agent: AgentId, event: AgentEvent) {
        if let AgentEvent::Exited { round, rank, end } = &event {
            if let Some(present) = self.round.as_mut().filter(|present| present.number == *round) {
                present.stalls.rank_exited(*rank);
                present.store.set(&format!("exit/{rank}"), end.as_bytes());
            }
            return;
        }
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
        let commands = self.coordinator.handle(agent, event, Instant::now());
        self.dispatch(commands);
    }

    fn dispatch(&mut self, commands: Vec<(AgentId, Command)>) {
        for (agent, mut command) in commands {
            if let Command::Start { round, assignment } = &mut command {
                match self.open_stores(*round) {
                    Ok(stores) => assignment.stores = stores,
                    Err(error) => {
                        // No agent has started yet: they all get the end instead.
                        let end = self
                            .coordinator
                            .give_up(format!("cannot serve the workers' store: {error:#}"));
                        return self.dispatch(end);
                    }
                }
            }
            // Others that are refused are ended before the job is.
            if agent == LEADER && matches!(command, Command::Finish(_)) {
                self.linger_until.get_or_insert_with(|| Instant::now() + LINGER);
            }
            match &command {
                // It holds the store's token, which is not for logs.
                Command::Start { round, .. } => {
                    log::debug!("command for agent {agent}: start round {round}")
                }
                command => log::debug!("command for agent {agent}: {command:?}"),
            }
            if agent == LEADER {
                self.commands.push_back(command);
                continue;
            }
            let number = self.commands_sent.entry(agent).or_default();
            let text = serde_json::to_vec(&command).unwrap_or_default(); // plain data: it cannot fail
            self.agents.set(&command_key(agent, *number), &text);
            *number += 1;
        }
    }

    /// How the workers of a round meet: at new stores, which take the place of the last round's.
    fn open_stores(&mut self, round: u32) -> anyhow::Result<RendezvousStoreInfo> {
        if let Some(present) = self.round.as_ref().filter(|present| present.number == round) {
            return Ok(present.stores.clone());
        }
        self.round = None;
        let token = secret()?;
        let store = self.agents.beside(&token)?;
        let tcp_store = self.has_agent_store.then(|| self.agents.serve_tcp_store()).transpose()?;
        let master_port = match (self.has_agent_store, self.master_port) {
            (true, _) => self.port,
            (false, Some(port)) => port,
            (false, None) => net::free_port().context("cannot find a free port for MASTER_PORT")?,
        };
        let stores = RendezvousStoreInfo {
            master_addr: self.address.clone(),
            master_port,
            has_agent_store: self.has_agent_store,
            store: Address::Tcp(net::join(&self.address, self.port)).to_string(),
            token,
        };
        let stalls = StallTracker::new(self.hang_timeout);
        self.round = Some(Round {
            number: round,
            store,
            _tcp_store: tcp_store,
            stores: stores.clone(),
            stalls,
        });
        Ok(stores)
    }
}

/// The workers' stores in a round, how they find them, and their long stalls.
struct Round {
    number: u32,
    store: Server,
    /// PyTorch's. A restarted program counts on one that is empty.
    _tcp_store: Option<TcpStore>,
    stores: RendezvousStoreInfo,
    stalls: StallTracker,
}
