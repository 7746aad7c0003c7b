//! Where the workers of a job find each other.

use std::fs::File;
use std::io::{self, Read};
use std::net::{Ipv4Addr, Ipv6Addr, TcpListener};

use anyhow::Context;
use flow_comm::store::{Address, Server};

use crate::args::Usage;
use crate::job::{Job, Meeting};
use crate::round::Placement;
use crate::worker::End;

/// The job's store, where this launcher serves it, and what workers are told of it.
pub struct Rendezvous {
    /// For one node; several are on their own (torch's variables only).
    store: Option<Server>,
    placement: Placement,
}

impl Rendezvous {
    pub fn start(job: &Job, local_world_size: u32) -> anyhow::Result<Rendezvous> {
        let mut store = None;
        let mut named = (String::new(), String::new());
        let (group_rank, master_addr, master_port) = match &job.nodes.meeting {
            Meeting::Alone { master_addr, master_port } => {
                let token = token().context("cannot read /dev/urandom")?;
                let address = Address::Tcp("127.0.0.1:0".into());
                let server = Server::start(&address, &token).context("cannot start the store on 127.0.0.1")?;
                named = (server.address().to_string(), token);
                store = Some(server);
                (0, master_addr.clone().unwrap_or_else(|| "127.0.0.1".into()), *master_port)
            }
            Meeting::Static { node_rank, master_addr, master_port } => {
                (*node_rank, master_addr.clone(), Some(*master_port))
            }
            Meeting::Endpoint { .. } => {
                return Err(Usage("--rdzv-endpoint is not served yet; use --master-addr and --node-rank".into()).into())
            }
        };
        let master_port = match master_port {
            Some(port) => port,
            None => free_port().context("cannot find a free port for MASTER_PORT; give --master-port")?,
        };
        let world_size = job.nodes.max * local_world_size;
        let first_rank = group_rank * local_world_size;
        let placement = Placement {
            restart_count: 0,
            group_rank,
            group_world_size: job.nodes.max,
            first_rank,
            local_world_size,
            world_size,
            first_role_rank: first_rank,
            role_world_size: world_size,
            master_addr,
            master_port,
            store: named,
        };
        Ok(Rendezvous { store, placement })
    }

    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Lets the other workers know how one has ended.
    pub fn ended(&self, rank: u32, end: End) {
        if let Some(store) = &self.store {
            store.set(&format!("exit/{rank}"), end.to_string().as_bytes());
        }
    }
}

/// What admits a worker to the store: 128 random bits.
fn token() -> io::Result<String> {
    let mut bytes = [0; 16];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// A TCP port that is free on all addresses of this machine.
fn free_port() -> io::Result<u16> {
    let listener =
        TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0)).or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)))?;
    Ok(listener.local_addr()?.port())
}
