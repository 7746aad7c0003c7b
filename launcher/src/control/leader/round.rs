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
    pub table: Option<WorkerTable>,
}

impl Round {
    /// Tells the workers how one of them has ended.
    pub fn exited(&mut self, rank: u32, replacement: u32, end: &str) {
        self.stalls.rank_exited(rank, replacement);
        self.store.set(&exit_key(rank, replacement), end.as_bytes());
    }

    /// Tells the workers that one of them was replaced, if they were not told how it ended.
    pub fn was_replaced(&mut self, rank: u32, replacement: u32) {
        if let Ok(None) = self.store.get(&exit_key(rank, replacement)) {
            self.exited(rank, replacement, "a failure");
        }
    }

    /// Returns whether a worker that was started in place of others waits to join the job, as it has
    /// said.
    pub fn waits(&self, rank: u32, replacement: u32) -> Option<bool> {
        let said = self.store.get(&format!("newcomer/{rank}.{replacement}")).ok()??;
        Some(said == b"waits")
    }
}

/// Returns the key under which the workers find how one of them has ended.
fn exit_key(rank: u32, replacement: u32) -> String {
    match replacement {
        0 => format!("exit/{rank}"),
        count => format!("exit/{rank}.{count}"),
    }
}

/// The replica of the round's store that a member is asked to keep.
#[derive(Clone, Copy)]
pub struct ReplicaRequest {
    pub agent: AgentId,
    pub member: MemberId,
    /// Tells it from others.
    pub number: u64,
    pub since: Instant,
}

/// The replica of the round's store.
pub enum ReplicaState {
    /// Nobody is asked to keep one.
    None,
    Asked(ReplicaRequest),
    /// It has all.
    Complete(ReplicaRequest),
    /// Not all know that there is none any more.
    Lost,
}

/// Returns the table of workers in a store, if they may go on.
pub fn table_in(store: &Server) -> anyhow::Result<Option<WorkerTable>> {
    let Some(text) = store.get(WORKERS_KEY)? else { return Ok(None) };
    Ok(serde_json::from_slice(&text)?)
}
