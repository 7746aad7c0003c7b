//! The stores that the leader serves to the workers of a round.

use std::sync::Arc;

use anyhow::Context;
use flow_store::net::secret;
use flow_store::{Address, Server};

use super::Leader;
use super::round::{ReplicaState, Round};
use crate::control::assignment::RendezvousStoreInfo;
use crate::control::stall::StallTracker;
use crate::net;

impl Leader {
    /// Opens new stores for the workers of a round, in place of the last round's.
    pub(super) fn open_stores(&mut self, round: u32) -> anyhow::Result<RendezvousStoreInfo> {
        if let Some(present) = self.round.as_ref().filter(|present| present.number == round) {
            return Ok(present.stores.clone());
        }
        self.round = None;
        self.replica = ReplicaState::None;
        let token = secret()?;
        let store = Arc::new(self.candidate.server.beside(&token)?);
        self.serve_round(round, store, token)
    }

    /// Makes this store, with this token, that of the round's workers.
    pub(super) fn serve_round(
        &mut self,
        number: u32,
        store: Arc<Server>,
        token: String,
    ) -> anyhow::Result<RendezvousStoreInfo> {
        let tcp_store =
            self.has_agent_store.then(|| self.candidate.server.serve_tcp_store()).transpose()?;
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
            number,
            store,
            _tcp_store: tcp_store,
            stores: stores.clone(),
            stalls,
            table: None,
        });
        Ok(stores)
    }
}
