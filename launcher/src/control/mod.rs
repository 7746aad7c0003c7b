//! The control plane: how this node's agent and the coordinator exchange events and commands.
//!
//! | file | subject |
//! |---|---|
//! | `coordinator.rs`, `job_phase.rs` | who takes part, when rounds start and stop (pure) |
//! | `coordinator/in_place.rs`, `worker_table.rs` | what follows when a worker fails, in place (pure) |
//! | `coordinator/leaving.rs` | what follows when an agent is stopped by a signal, or lost (pure) |
//! | `coordinator/resuming.rs` | what follows when another node leads (pure) |
//! | `assignment.rs` | the ranks of each node (pure) |
//! | `stall.rs` | workers that wait long for each other (pure) |
//! | `election/` | who leads when the leading agent is lost (pure) |
//! | `job_record.rs` | what all agents keep of the job |
//! | `worker_report.rs` | what workers send to the leader |
//! | `local_store.rs` | a node's store for its workers, which outlives the leader |
//! | `candidate.rs` | an agent that may lead: its store, and its part in elections |
//! | `claim.rs` | an elected leader's claim of the endpoint |
//! | `search.rs` | the search for the agent that leads |
//! | `mailbox.rs` | messages of threads to the event loop |
//! | `watchers.rs`, `status.rs` | what those are told who watch the job (pure) |
//! | `leader.rs` | the leading agent: runs the coordinator and serves the stores |
//! | `leader/round.rs`, `leader/stores.rs` | the workers' stores |
//! | `leader/replication.rs` | the copy of them that a member keeps |
//! | `leader/watching.rs` | what it does for those who watch the job |
//! | `follower.rs` | any other agent: a client of the leader's store |
//! | `follower/connection.rs` | its threads, which talk to the leader |
//! | `protocol.rs`, `node.rs`, `token.rs` | the messages, a node, the job's secret |

pub mod assignment;
mod candidate;
mod claim;
pub mod coordinator;
mod election;
mod follower;
mod job_phase;
pub mod job_record;
mod leader;
mod local_store;
mod mailbox;
pub mod node;
pub mod protocol;
pub mod search;
mod stall;
pub mod status;
pub mod token;
mod watchers;
mod worker_report;
mod worker_table;

use std::io;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context;
use flow_store::net::{host_name, local_address_for};
use flow_store::{Address, Server};

use crate::control::candidate::Candidate;
use crate::control::follower::{Elected, Follower};
use crate::control::leader::Leader;
use crate::control::node::Node;
use crate::control::protocol::{AgentEvent, ClusterEvent, ControlMessage, KeptWorkers, Loss};
use crate::control::token::{TOKEN, token};
use crate::job::{Job, Rendezvous};
use crate::net;

/// The time in which a node that lost its connection tries to join again.
const REJOIN_TIMEOUT: Duration = Duration::from_secs(60);

/// This agent's side of the control plane.
pub enum ControlPlane {
    /// The coordinator runs in this agent, which leads the others if there are any.
    Leader(Box<Leader>),
    Follower(Box<Follower>),
    /// The agent has no part in the job, and does not come to have one.
    Closed,
}

impl ControlPlane {
    /// Joins the job as its leader or as a follower. [`ControlPlane::poll`] returns the outcome.
    pub fn open(job: &Job, local_world_size: u32) -> anyhow::Result<ControlPlane> {
        let (host, port) = meeting_place(job);
        if serves(job) {
            match Leader::serving(job, node(job, local_world_size, host.into()), host, port) {
                Ok(leader) => {
                    if job.nodes.max > 1 && std::env::var_os(TOKEN).is_none() {
                        log::warn!(
                            "whoever knows --rdzv-id may join at port {port}; set {TOKEN}, a \
                             secret, on all nodes"
                        );
                    }
                    return Ok(ControlPlane::Leader(Box::new(leader)));
                }
                // Another agent of this host leads already.
                Err(error) if is_taken(&error) && !must_serve(job) => {}
                Err(error) => {
                    let hint = if is_taken(&error) {
                        "; choose another by --master-port or --rdzv-endpoint"
                    } else {
                        ""
                    };
                    return Err(error
                        .context(format!("cannot serve the job at port {port} of {host}{hint}")));
                }
            }
        }
        let candidate =
            if may_change_leader(job) { Some(candidate(job, host, port)?) } else { None };
        ControlPlane::follow(job, local_world_size, job.nodes.timeouts.join, candidate, None)
    }

    /// Joins again, after the connection or the leadership was lost. Another node may lead by then, or
    /// this one. `kept`: the workers that still run.
    pub fn reopen(
        &mut self,
        job: &Job,
        local_world_size: u32,
        kept: Option<KeptWorkers>,
    ) -> anyhow::Result<()> {
        let candidate = match std::mem::replace(self, ControlPlane::Closed) {
            ControlPlane::Leader(leader) => Some(leader.into_candidate()),
            ControlPlane::Follower(mut follower) => follower.candidate.take(),
            ControlPlane::Closed => None,
        };
        let timeouts = job.nodes.timeouts;
        let mut timeout = timeouts.join.min(REJOIN_TIMEOUT);
        if candidate.is_some() {
            // A silent leader is not replaced before the others have surely stopped following it.
            timeout = timeout.max(3 * timeouts.heartbeat);
        }
        *self = ControlPlane::follow(job, local_world_size, timeout, candidate, kept)?;
        Ok(())
    }

    fn follow(
        job: &Job,
        local_world_size: u32,
        timeout: Duration,
        mut candidate: Option<Candidate>,
        kept: Option<KeptWorkers>,
    ) -> anyhow::Result<ControlPlane> {
        if let Some(candidate) = &mut candidate {
            candidate.election.may_stand(Instant::now());
        }
        let (host, port) = meeting_place(job);
        let node = node(job, local_world_size, String::new());
        let follower = Follower::join(job, node, host, port, timeout, candidate, kept)?;
        Ok(ControlPlane::Follower(Box::new(follower)))
    }

    /// Whether the workers of this node can go on under another leader.
    pub fn outlives_leader(&self) -> bool {
        match self {
            ControlPlane::Follower(follower) => {
                follower.candidate.as_ref().is_some_and(|candidate| candidate.local.is_some())
            }
            ControlPlane::Leader(_) | ControlPlane::Closed => false,
        }
    }

    /// Returns a store that says who leads the job, and the token that it asks for.
    pub fn store(&self) -> Option<(&str, &str)> {
        match self {
            ControlPlane::Leader(leader) => Some(leader.store()),
            ControlPlane::Follower(follower) => Some(follower.store()),
            ControlPlane::Closed => None,
        }
    }

    /// Returns the address at which the agents of the job meet.
    pub fn endpoint(job: &Job) -> String {
        let (host, port) = meeting_place(job);
        net::join(host, port)
    }

    /// Sends an event to the coordinator.
    pub fn send(&mut self, event: AgentEvent) {
        match self {
            ControlPlane::Leader(leader) => leader.send(event),
            ControlPlane::Follower(follower) => follower.send(event),
            ControlPlane::Closed => {}
        }
    }

    /// Sends the timeline of a rank, once its worker has ended, to the leader.
    pub fn send_trace(&self, round: u32, rank: u32, path: PathBuf) {
        if let ControlPlane::Follower(follower) = self {
            follower.send_trace(round, rank, path);
        }
    }

    /// Takes the next message from the coordinator, if any.
    pub fn poll(&mut self, job: &Job, local_world_size: u32) -> Option<ControlMessage> {
        if let ControlPlane::Follower(follower) = self
            && let Some(elected) = follower.take_elected()
        {
            match lead(job, local_world_size, elected) {
                Ok(leader) => *self = ControlPlane::Leader(Box::new(leader)),
                Err(error) => {
                    let why = format!("this node is elected as the leader, but {error:#}");
                    return Some(ControlMessage::Disconnected(Loss {
                        why,
                        is_silent: false,
                        was_found: true,
                    }));
                }
            }
        }
        match self {
            ControlPlane::Leader(leader) => leader.poll(),
            ControlPlane::Follower(follower) => follower.poll(),
            ControlPlane::Closed => None,
        }
    }

    /// Returns what the leader has learnt about other nodes and hangs since the last call.
    pub fn events(&mut self) -> Vec<ClusterEvent> {
        match self {
            ControlPlane::Leader(leader) => leader.events(),
            ControlPlane::Follower(_) | ControlPlane::Closed => Vec::new(),
        }
    }

    /// Notes that this process was suspended for this long.
    pub fn paused(&mut self, time: Duration) {
        if let ControlPlane::Leader(leader) = self {
            leader.paused(time);
        }
    }

    /// Returns what is readable when [`ControlPlane::poll`] has something to return.
    pub fn watch(&self) -> Vec<BorrowedFd<'_>> {
        match self {
            ControlPlane::Leader(leader) => leader.watch(),
            ControlPlane::Follower(follower) => follower.watch(),
            ControlPlane::Closed => Vec::new(),
        }
    }

    /// Returns when to call [`ControlPlane::poll`] at the latest.
    pub fn deadline(&self) -> Option<Instant> {
        match self {
            ControlPlane::Leader(leader) => leader.deadline(),
            ControlPlane::Follower(follower) => follower.deadline(),
            ControlPlane::Closed => None,
        }
    }

    /// Whether the job is over and no other agent needs this one.
    pub fn is_done(&self) -> bool {
        match self {
            ControlPlane::Leader(leader) => leader.is_alone(),
            ControlPlane::Follower(_) | ControlPlane::Closed => true,
        }
    }
}

/// Returns the host and the port at which the agents of a job meet.
fn meeting_place(job: &Job) -> (&str, u16) {
    match &job.nodes.rendezvous {
        Rendezvous::Alone { master_addr, master_port } => {
            let host =
                master_addr.as_deref().or(job.nodes.local_addr.as_deref()).unwrap_or("127.0.0.1");
            // A port that was given is for PyTorch's store, whoever serves that.
            (host, master_port.filter(|_| job.nodes.has_agent_store).unwrap_or(0))
        }
        Rendezvous::Static { master_addr, master_port, .. } => (master_addr, *master_port),
        Rendezvous::Endpoint { host, port, .. } => (host, *port),
    }
}

/// Whether this agent serves the others at the meeting place, if no other of this host does.
fn serves(job: &Job) -> bool {
    match &job.nodes.rendezvous {
        Rendezvous::Alone { .. } => true,
        Rendezvous::Static { node_rank, .. } => *node_rank == 0,
        Rendezvous::Endpoint { host, is_host, .. } => {
            is_host.unwrap_or_else(|| net::is_local(host))
        }
    }
}

/// Describes this node; `address` if the user gives none.
fn node(job: &Job, local_world_size: u32, address: String) -> Node {
    let node_rank = match job.nodes.rendezvous {
        Rendezvous::Static { node_rank, .. } => Some(node_rank),
        _ => None,
    };
    Node {
        host: host_name(),
        address: job.nodes.local_addr.clone().unwrap_or(address),
        node_rank,
        local_world_size,
        role: job.role.clone(),
        nodes: (job.nodes.min, job.nodes.max),
        is_in_place: job.is_in_place,
        can_report: true,
    }
}

/// Whether the job goes on when its leading node is lost.
fn may_change_leader(job: &Job) -> bool {
    let goes_on =
        job.nodes.min < job.nodes.max || job.max_restarts > 0 || job.min_workers.is_some();
    match job.nodes.rendezvous {
        Rendezvous::Alone { .. } => false,
        // Otherwise the others could but wait for node 0.
        Rendezvous::Static { .. } => goes_on && job.is_in_place,
        Rendezvous::Endpoint { .. } => goes_on,
    }
}

/// Makes this agent one that may lead: it serves a store at a free port.
fn candidate(job: &Job, host: &str, port: u16) -> anyhow::Result<Candidate> {
    let own = job.nodes.local_addr.clone();
    // The endpoint's host may not be known yet.
    let own = own.or_else(|| Some(local_address_for((host, port)).ok()?.to_string()));
    let bind = own.as_deref().and_then(net::own).unwrap_or_else(net::any);
    let token = token(&job.nodes.id)?;
    let server = Server::start(&Address::Tcp(net::join(&bind.to_string(), 0)), &token)
        .context("cannot serve a store, which this node needs to lead the job one day")?;
    let mut candidate = Candidate::new(server, &token, job.nodes.timeouts.heartbeat, job.grace)?;
    candidate.address = own.zip(candidate.port()).map(|(own, port)| net::join(&own, port));
    Ok(candidate)
}

/// Makes this agent the leader that it is elected as.
fn lead(job: &Job, local_world_size: u32, elected: Elected) -> anyhow::Result<Leader> {
    let Elected { candidate, kept, events } = elected;
    let address = candidate.election.address().unwrap_or_default();
    let (own, _) = address.rsplit_once(':').context("it has no address")?;
    let own = own.trim_start_matches('[').trim_end_matches(']');
    let (host, port) = meeting_place(job);
    let node = node(job, local_world_size, own.into());
    let mut leader = Leader::elected(job, node, candidate, kept, net::join(host, port))?;
    for event in events {
        leader.send(event);
    }
    Ok(leader)
}

fn must_serve(job: &Job) -> bool {
    !matches!(job.nodes.rendezvous, Rendezvous::Endpoint { is_host: None, .. })
}

fn is_taken(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::AddrInUse)
}
