//! The store at which the workers of a node ask for that of their round. It outlives a change of the
//! leader, and may be the replica that the next leader serves.

use std::sync::Arc;
use std::time::Duration;

use flow_store::{Address, Replica, ReplicaMessages, Server};

use crate::control::assignment::RendezvousStoreInfo;
use crate::control::worker_report::WorkerReport;

/// A node's store for the workers of a round.
pub struct LocalStore {
    pub round: u32,
    pub server: Arc<Server>,
    /// The leader's stores.
    pub stores: RendezvousStoreInfo,
    replica: Option<Replica>,
}

impl LocalStore {
    /// Opens the store beside that of the agent. It sends the workers to the leader's.
    pub fn open(
        agent: &Server,
        round: u32,
        stores: &RendezvousStoreInfo,
    ) -> anyhow::Result<LocalStore> {
        let server = Arc::new(agent.beside(&stores.token)?);
        let store = LocalStore { round, server, stores: stores.clone(), replica: None };
        store.server.send_elsewhere(Some(&store.stores.store.parse()?));
        Ok(store)
    }

    /// Whether the workers of these stores are admitted.
    pub fn is_for(&self, stores: &RendezvousStoreInfo) -> bool {
        self.stores.token == stores.token
    }

    /// Notes that the leader is lost: the workers wait for the next one.
    pub fn lose_leader(&mut self) {
        self.server.send_elsewhere(None);
        self.replica = None;
    }

    /// Sends the workers to another leader's store.
    pub fn follow(&mut self, stores: &RendezvousStoreInfo) -> anyhow::Result<()> {
        self.server.send_elsewhere(Some(&stores.store.parse()?));
        self.stores = stores.clone();
        self.replica = None;
        Ok(())
    }

    /// Makes it a replica of the leader's, which has asked for it by this number.
    pub fn replicate(&mut self, number: u64, silence: Duration) -> anyhow::Result<()> {
        // It takes no change of the one before any more.
        self.replica = None;
        let message = |is_complete| {
            // Plain data: it cannot fail.
            serde_json::to_vec(&WorkerReport::Replica { number, is_complete }).unwrap_or_default()
        };
        let messages = ReplicaMessages { complete: message(true), lost: message(false) };
        let leader: Address = self.stores.store.parse()?;
        let token = &self.stores.token;
        let replica = Replica::start(&self.server, leader, token, number, messages, silence)?;
        self.replica = Some(replica);
        Ok(())
    }
}
