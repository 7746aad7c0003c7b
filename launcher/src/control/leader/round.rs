//! The stores of the workers.

use std::sync::Arc;

use flow_store::{Server, TcpStoreServer};

use crate::control::assignment::RendezvousStoreInfo;
use crate::control::stall::StallTracker;

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
