//! The stores of the workers.

use std::sync::Arc;
use std::time::Instant;

use flow_store::{Server, TcpStoreServer};

use crate::control::assignment::RendezvousStoreInfo;
use crate::control::job_record::MemberId;
use crate::control::protocol::AgentId;
use crate::control::stall::StallTracker;
use crate::control::worker_table::WorkerTable;

/// The key under which the store has the coordinator's table of workers.
pub const WORKERS_KEY: &str = "launcher/workers";

/// A round: the workers' stores and their stalls.
pub struct Round {
    pub number: u32,
    pub store: Arc<Server>,
    /// PyTorch's store. A restarted program expects an empty one.
    pub _tcp_store: Option<TcpStoreServer>,
    pub stores: RendezvousStoreInfo,
    pub stalls: StallTracker,
    /// The coordinator's table of workers, as it was put in the store.
    pub table: Vec<u8>,
}

impl Round {
    /// Tells the workers how one of them has ended.
    pub fn exited(&mut self, rank: u32, replacement: u32, end: &str) {
        self.stalls.rank_exited(rank, replacement);
        let key = match replacement {
            0 => format!("exit/{rank}"),
            count => format!("exit/{rank}.{count}"),
        };
        self.store.set(&key, end.as_bytes());
    }
}

/// The replica of the round's store.
pub enum ReplicaState {
    /// Nobody is asked to keep one.
    None,
    /// This agent is asked since then.
    Asked(AgentId, MemberId, Instant),
    /// This agent has all.
    Complete(AgentId, MemberId),
    /// Not all know that there is none any more.
    Lost,
}

/// Returns the table of workers in a store.
pub fn table_in(store: &Server) -> anyhow::Result<Option<WorkerTable>> {
    let Some(text) = store.get(WORKERS_KEY)? else { return Ok(None) };
    Ok(Some(serde_json::from_slice(&text)?))
}
