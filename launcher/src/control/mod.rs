//! The control plane: how this node's agent and the coordinator exchange events and commands.
//!
//! | file | subject |
//! |---|---|
//! | `coordinator.rs`, `job_phase.rs` | who takes part, when rounds start and stop (pure) |
//! | `coordinator/in_place.rs`, `worker_table.rs` | what follows when a worker fails, in place (pure) |
//! | `assignment.rs` | the ranks of each node (pure) |
//! | `stall.rs` | workers that wait long for each other (pure) |
//! | `leader.rs` | the leading agent: runs the coordinator and serves the stores |
//! | `follower.rs` | any other agent: a client of the leader's store |
//! | `protocol.rs`, `node.rs`, `token.rs` | the messages, a node, the job's secret |

pub mod assignment;
pub mod coordinator;
mod follower;
mod job_phase;
mod leader;
pub mod node;
pub mod protocol;
mod stall;
pub mod token;
mod worker_table;

use std::io;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use flow_store::net::host_name;

use crate::control::follower::Follower;
use crate::control::leader::Leader;
use crate::control::node::Node;
use crate::control::protocol::{AgentEvent, ClusterEvent, ControlMessage};
use crate::control::token::TOKEN;
use crate::job::{Job, Rendezvous};
use crate::net;

/// The time in which a node that lost its connection tries to join again.
const REJOIN_TIMEOUT: Duration = Duration::from_secs(60);

/// This agent's side of the control plane.
pub enum ControlPlane {
    /// The coordinator runs in this agent, which leads the others if there are any.
    Leader(Box<Leader>),
    Follower(Follower),
}

impl ControlPlane {
    /// Joins the job as its leader or as a follower. [`ControlPlane::poll`] returns the outcome.
    pub fn open(job: &Job, local_world_size: u32) -> anyhow::Result<ControlPlane> {
        ControlPlane::join(job, local_world_size, job.nodes.timeouts.join, true)
    }

    /// Joins again as a follower, after the connection was lost.
    pub fn reopen(job: &Job, local_world_size: u32) -> anyhow::Result<ControlPlane> {
        ControlPlane::join(
            job,
            local_world_size,
            job.nodes.timeouts.join.min(REJOIN_TIMEOUT),
            false,
        )
    }

    fn join(
        job: &Job,
        local_world_size: u32,
        timeout: Duration,
        may_lead: bool,
    ) -> anyhow::Result<ControlPlane> {
        let node = |address: String, node_rank: Option<u32>| Node {
            host: host_name(),
            address: job.nodes.local_addr.clone().unwrap_or(address),
            node_rank,
            local_world_size,
            role: job.role.clone(),
            nodes: (job.nodes.min, job.nodes.max),
            is_in_place: job.is_in_place,
        };
        let (node_rank, host, port, serves) = match &job.nodes.rendezvous {
            Rendezvous::Alone { master_addr, master_port } => {
                let host = master_addr
                    .as_deref()
                    .or(job.nodes.local_addr.as_deref())
                    .unwrap_or("127.0.0.1");
                // A port that was given is for PyTorch's store, whoever serves that.
                (None, host, master_port.filter(|_| job.nodes.has_agent_store).unwrap_or(0), true)
            }
            Rendezvous::Static { node_rank, master_addr, master_port } => {
                (Some(*node_rank), &**master_addr, *master_port, *node_rank == 0)
            }
            Rendezvous::Endpoint { host, port, is_host } => {
                (None, &**host, *port, is_host.unwrap_or_else(|| net::is_local(host)))
            }
        };
        if serves && may_lead {
            match Leader::serving(job, node(host.into(), node_rank), host, port) {
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
        Ok(ControlPlane::Follower(Follower::join(
            job,
            node(String::new(), node_rank),
            host,
            port,
            timeout,
        )?))
    }

    /// Sends an event to the coordinator.
    pub fn send(&mut self, event: AgentEvent) {
        match self {
            ControlPlane::Leader(leader) => leader.send(event),
            ControlPlane::Follower(follower) => follower.send(event),
        }
    }

    /// Sends the timeline of a rank, once its worker has ended, to the leader.
    pub fn send_trace(&self, round: u32, rank: u32, path: PathBuf) {
        if let ControlPlane::Follower(follower) = self {
            follower.send_trace(round, rank, path);
        }
    }

    /// Takes the next message from the coordinator, if any.
    pub fn poll(&mut self) -> Option<ControlMessage> {
        match self {
            ControlPlane::Leader(leader) => leader.poll().map(ControlMessage::Command),
            ControlPlane::Follower(follower) => follower.poll(),
        }
    }

    /// Returns what the leader has learnt about other nodes and hangs since the last call.
    pub fn events(&mut self) -> Vec<ClusterEvent> {
        match self {
            ControlPlane::Leader(leader) => leader.events(),
            ControlPlane::Follower(_) => Vec::new(),
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
            ControlPlane::Follower(follower) => vec![follower.watch()],
        }
    }

    /// Returns when to call [`ControlPlane::poll`] at the latest.
    pub fn deadline(&self) -> Option<Instant> {
        match self {
            ControlPlane::Leader(leader) => leader.deadline(),
            ControlPlane::Follower(_) => None,
        }
    }

    /// Whether the job is over and no other agent needs this one.
    pub fn is_done(&self) -> bool {
        match self {
            ControlPlane::Leader(leader) => leader.is_alone(),
            ControlPlane::Follower(_) => true,
        }
    }
}

fn must_serve(job: &Job) -> bool {
    !matches!(job.nodes.rendezvous, Rendezvous::Endpoint { is_host: None, .. })
}

fn is_taken(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::AddrInUse)
}
