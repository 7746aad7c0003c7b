//! How this node's agent and the coordinator hear of each other.

use std::ffi::OsString;
use std::io;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use anyhow::bail;

use crate::address;
use crate::coordinator::{Event, Node, Order};
use crate::job::{Job, Meeting};
use crate::leader::{Leader, News};
use crate::member::Member;

/// The variable with the secret of the job.
pub const TOKEN: &str = "FLOW_TOKEN";

/// How long a node that was cut off tries to come back.
const AGAIN: Duration = Duration::from_secs(60);

/// What an agent hears.
#[derive(Debug)]
pub enum Heard {
    Order(Order),
    /// It takes long to join; for the user.
    Wait(String),
    /// The coordinator cannot be reached any more, or refuses this node.
    Lost(String),
}

/// See the head of this file.
pub enum Link {
    /// The coordinator runs in this agent, which leads the others if there are any.
    Leader(Box<Leader>),
    Member(Member),
}

impl Link {
    /// Joins the job as its leader or as a member; how that went is heard later.
    pub fn open(job: &Job, local_world_size: u32) -> anyhow::Result<Link> {
        Link::find(job, local_world_size, job.nodes.patience.join, true)
    }

    /// Joins again, as a member that was cut off.
    pub fn reopen(job: &Job, local_world_size: u32) -> anyhow::Result<Link> {
        Link::find(job, local_world_size, job.nodes.patience.join.min(AGAIN), false)
    }

    fn find(
        job: &Job,
        local_world_size: u32,
        patience: Duration,
        may_lead: bool,
    ) -> anyhow::Result<Link> {
        let node = |address: String, node_rank: Option<u32>| Node {
            host: address::host_name(),
            address: job.nodes.local_addr.clone().unwrap_or(address),
            node_rank,
            local_world_size,
            role: job.role.clone(),
            nodes: (job.nodes.min, job.nodes.max),
        };
        let (node_rank, host, port, serves) = match &job.nodes.meeting {
            Meeting::Alone { master_addr, master_port } => {
                let host = master_addr
                    .as_deref()
                    .or(job.nodes.local_addr.as_deref())
                    .unwrap_or("127.0.0.1");
                // A port that was given is for PyTorch's store, whoever serves that.
                (None, host, master_port.filter(|_| job.nodes.has_agent_store).unwrap_or(0), true)
            }
            Meeting::Static { node_rank, master_addr, master_port } => {
                (Some(*node_rank), &**master_addr, *master_port, *node_rank == 0)
            }
            Meeting::Endpoint { host, port, is_host } => {
                (None, &**host, *port, is_host.unwrap_or_else(|| address::is_local(host)))
            }
        };
        if serves && may_lead {
            match Leader::serving(job, node(host.into(), node_rank), host, port) {
                Ok(leader) => {
                    if job.nodes.max > 1 && std::env::var_os(TOKEN).is_none() {
                        log::warn!(
                            "whoever knows --rdzv-id may join at port {port}; set {TOKEN}, a secret, on all nodes"
                        );
                    }
                    return Ok(Link::Leader(Box::new(leader)));
                }
                // Another agent of this machine has come first.
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
        Ok(Link::Member(Member::join(job, node(String::new(), node_rank), host, port, patience)?))
    }

    pub fn tell(&mut self, event: Event) {
        match self {
            Link::Leader(leader) => leader.tell(event),
            Link::Member(member) => member.tell(event),
        }
    }

    /// What has been heard, one at a time.
    pub fn hear(&mut self) -> Option<Heard> {
        match self {
            Link::Leader(leader) => leader.hear().map(Heard::Order),
            Link::Member(member) => member.hear(),
        }
    }

    /// What the leader has learnt of other nodes and of hangs since the last call.
    pub fn news(&mut self) -> Vec<News> {
        match self {
            Link::Leader(leader) => leader.news(),
            Link::Member(_) => Vec::new(),
        }
    }

    /// For so long this process was stopped.
    pub fn paused(&mut self, time: Duration) {
        if let Link::Leader(leader) = self {
            leader.paused(time);
        }
    }

    /// Readable when there is something to hear.
    pub fn watch(&self) -> Vec<BorrowedFd<'_>> {
        match self {
            Link::Leader(leader) => leader.watch(),
            Link::Member(member) => vec![member.watch()],
        }
    }

    /// When [`Link::hear`] is to be called in any case.
    pub fn deadline(&self) -> Option<Instant> {
        match self {
            Link::Leader(leader) => leader.deadline(),
            Link::Member(_) => None,
        }
    }

    /// The job is over and nobody needs this agent any more.
    pub fn is_done(&self) -> bool {
        match self {
            Link::Leader(leader) => leader.is_alone(),
            Link::Member(_) => true,
        }
    }
}

fn must_serve(job: &Job) -> bool {
    !matches!(job.nodes.meeting, Meeting::Endpoint { is_host: None, .. })
}

fn is_taken(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::AddrInUse)
}

/// What admits an agent: the same secret on all nodes from FLOW_TOKEN, or else just the job's name.
pub fn token(job: &Job) -> anyhow::Result<String> {
    match std::env::var_os(TOKEN).map(OsString::into_string) {
        None => Ok(format!("flow-launch job {}", job.nodes.id)),
        Some(Ok(token)) if !token.is_empty() => Ok(token),
        Some(_) => bail!("{TOKEN} is empty or not UTF-8; it must be the same text on all nodes"),
    }
}
