//! The leading node's side of the link: the coordinator, and the stores through which agents and
//! workers reach it.
//!
//! All are served at one address. An agent posts its events to the agents' store and finds its
//! orders there, numbered. Each round has a store of its own beside it for the workers, and one of
//! PyTorch's.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io::Read;
use std::iter;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use anyhow::{bail, Context};
use flow_comm::store::{Address, Server, TcpStore};

use crate::address;
use crate::coordinator::{AgentId, Coordinator, Event, Node, Order, LEADER};
use crate::hang::{Finding, Waits};
use crate::job::{Job, Meeting};
use crate::link;
use crate::round::Rendezvous;

/// How long the leader stays for others to hear how the job ended.
const FAREWELL: Duration = Duration::from_secs(10);

/// What is worth an event.
#[derive(Debug)]
pub enum News {
    Joined { host: String },
    Lost { host: String, reason: String },
    Hang { report: String },
}

/// See the head of this file.
pub struct Leader {
    coordinator: Coordinator,
    agents: Server,
    /// How many orders each agent was given.
    given: HashMap<AgentId, u64>,
    /// The stores of the present round.
    round: Option<Round>,
    /// Where all reach this node.
    address: String,
    port: u16,
    /// Whether PyTorch's store is served here; if not, what is to be MASTER_PORT, if the user has
    /// said so.
    has_agent_store: bool,
    master_port: Option<u16>,
    orders: VecDeque<Order>,
    news: Vec<News>,
    hang_timeout: Option<Duration>,
    /// When to leave, once the job is over.
    farewell: Option<Instant>,
}

impl Leader {
    /// Serves all agents and workers at `port` of this machine, which others know as `host`; 0 is
    /// any free one.
    ///
    /// # Errors
    /// An `io::Error`, `AddrInUse` if the port is taken.
    pub fn serving(job: &Job, node: Node, host: &str, port: u16) -> anyhow::Result<Leader> {
        let (token, bind, master_port) = match job.nodes.meeting {
            Meeting::Alone { master_port, .. } => {
                let own = address::own(host);
                if own.is_none() {
                    log::warn!(
                        "{host} is no address of this machine: workers that go there find neither store; leave out \
                         --master-addr for one node"
                    );
                }
                (secret()?, own.unwrap_or_else(address::any), master_port)
            }
            _ => (link::token(job)?, address::interface(&[host, &node.address]), None),
        };
        let agents = Server::start(&Address::Tcp(address::join(&bind.to_string(), port)), &token)?;
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
            given: HashMap::new(),
            round: None,
            address: node.address.clone(),
            port,
            has_agent_store: job.nodes.has_agent_store,
            master_port,
            orders: VecDeque::new(),
            news: Vec::new(),
            hang_timeout: job.hang_timeout,
            farewell: None,
        };
        leader.tell(Event::Joined { node });
        Ok(leader)
    }

    /// What the agent of this node has to tell.
    pub fn tell(&mut self, event: Event) {
        self.take(LEADER, event);
    }

    /// The next order for the agent of this node.
    pub fn hear(&mut self) -> Option<Order> {
        while let Some(message) = self.agents.posts().try_next() {
            match serde_json::from_slice(&message) {
                Ok((agent, event)) if agent != LEADER => self.take(agent, event),
                _ => log::warn!(
                    "another node's agent has sent what makes no sense: is it of the same version?"
                ),
            }
        }
        let now = Instant::now();
        if let Some(round) = &mut self.round {
            while let Some(message) = round.store.posts().try_next() {
                match serde_json::from_slice(&message) {
                    Ok(wait) => round.waits.take(wait, now),
                    Err(error) => log::warn!("a worker has posted what makes no sense: {error}"),
                }
            }
            let finding = round.waits.elapsed(now);
            self.news.extend(
                finding.as_ref().map(|finding| News::Hang { report: finding.report().into() }),
            );
            let orders = match finding {
                Some(Finding::Report(report)) => self.coordinator.say(&report),
                Some(Finding::Hung(report)) => self.coordinator.hung(report, now),
                None => Vec::new(),
            };
            self.pass_on(orders);
        }
        let orders = self.coordinator.elapsed(now);
        self.pass_on(orders);
        self.orders.pop_front()
    }

    /// What has happened since the last call.
    pub fn news(&mut self) -> Vec<News> {
        std::mem::take(&mut self.news)
    }

    /// For so long everything was stopped.
    pub fn paused(&mut self, time: Duration) {
        self.round.iter_mut().for_each(|round| round.waits.paused(time, Instant::now()));
    }

    pub fn watch(&self) -> Vec<BorrowedFd<'_>> {
        let round = self.round.as_ref().map(|round| &round.store);
        iter::once(&self.agents).chain(round).map(|store| store.posts().as_fd()).collect()
    }

    pub fn deadline(&self) -> Option<Instant> {
        let waits = self.round.as_ref().and_then(|round| round.waits.deadline());
        [self.farewell, self.coordinator.deadline(), waits].into_iter().flatten().min()
    }

    /// All others have heard that the job is over, or had time to.
    pub fn is_alone(&self) -> bool {
        self.coordinator.is_alone()
            || self.farewell.is_some_and(|farewell| farewell <= Instant::now())
    }

    fn take(&mut self, agent: AgentId, event: Event) {
        if let Event::Exited { round, rank, end } = &event {
            if let Some(present) = self.round.as_mut().filter(|present| present.number == *round) {
                present.waits.ended(*rank);
                present.store.set(&format!("exit/{rank}"), end.as_bytes());
            }
            return;
        }
        log::debug!("agent {agent}: {event:?}");
        match (&event, self.coordinator.host(agent)) {
            (Event::Joined { node, .. }, _) if agent != LEADER => {
                self.news.push(News::Joined { host: node.host.clone() })
            }
            (Event::Gone { why }, Some(host)) if self.farewell.is_none() => {
                self.news.push(News::Lost { host: host.into(), reason: why.clone() })
            }
            _ => {}
        }
        let orders = self.coordinator.handle(agent, event, Instant::now());
        self.pass_on(orders);
    }

    fn pass_on(&mut self, orders: Vec<(AgentId, Order)>) {
        for (agent, mut order) in orders {
            if let Order::Start { round, placement } = &mut order {
                match self.rendezvous(*round) {
                    Ok(rendezvous) => placement.rendezvous = rendezvous,
                    Err(error) => {
                        // No agent has started yet: they all get the end instead.
                        let end = self
                            .coordinator
                            .give_up(format!("cannot serve the workers' store: {error:#}"));
                        return self.pass_on(end);
                    }
                }
            }
            // Others that are refused are ended before the job is.
            if agent == LEADER && matches!(order, Order::End(_)) {
                self.farewell.get_or_insert_with(|| Instant::now() + FAREWELL);
            }
            match &order {
                // It holds the store's token, which is not for logs.
                Order::Start { round, .. } => {
                    log::debug!("order for agent {agent}: start round {round}")
                }
                order => log::debug!("order for agent {agent}: {order:?}"),
            }
            if agent == LEADER {
                self.orders.push_back(order);
                continue;
            }
            let number = self.given.entry(agent).or_default();
            let text = serde_json::to_vec(&order).unwrap_or_default(); // plain data: it cannot fail
            self.agents.set(&order_key(agent, *number), &text);
            *number += 1;
        }
    }

    /// How the workers of a round meet: at new stores, which take the place of the last round's.
    fn rendezvous(&mut self, round: u32) -> anyhow::Result<Rendezvous> {
        if let Some(present) = self.round.as_ref().filter(|present| present.number == round) {
            return Ok(present.rendezvous.clone());
        }
        self.round = None;
        let token = secret()?;
        let store = self.agents.beside(&token)?;
        let tcp_store = self.has_agent_store.then(|| self.agents.serve_tcp_store()).transpose()?;
        let master_port = match (self.has_agent_store, self.master_port) {
            (true, _) => self.port,
            (false, Some(port)) => port,
            (false, None) => {
                address::free_port().context("cannot find a free port for MASTER_PORT")?
            }
        };
        let rendezvous = Rendezvous {
            master_addr: self.address.clone(),
            master_port,
            has_agent_store: self.has_agent_store,
            store: Address::Tcp(address::join(&self.address, self.port)).to_string(),
            token,
        };
        let waits = Waits::new(self.hang_timeout);
        self.round = Some(Round {
            number: round,
            store,
            _tcp_store: tcp_store,
            rendezvous: rendezvous.clone(),
            waits,
        });
        Ok(rendezvous)
    }
}

/// The workers' stores in a round, how they find them, and their long waits.
struct Round {
    number: u32,
    store: Server,
    /// PyTorch's. A restarted program counts on one that is empty.
    _tcp_store: Option<TcpStore>,
    rendezvous: Rendezvous,
    waits: Waits,
}

/// Where an agent finds its order of this number.
pub fn order_key(agent: AgentId, number: u64) -> String {
    format!("orders/{agent}/{number}")
}

/// 128 random bits.
pub fn secret() -> anyhow::Result<String> {
    let mut bytes = [0; 16];
    let random = File::open("/dev/urandom").and_then(|mut random| random.read_exact(&mut bytes));
    random.context("cannot read /dev/urandom")?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}
