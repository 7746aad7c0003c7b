//! Members on other nodes: how a group is linked to them, and what its ranks tell each other beside
//! the data.
//!
//! Data goes over the leaders' wire. Everything that is rare goes through the store, where each
//! rank has a connection of its own, so that it is told and heard whatever the leaders are doing:
//! the group's first failure, what ranks say about it, and where those are that have waited long.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::engine::Engine;
use crate::error::Result;
use crate::failure::remote::{WatchedConnections, POLL_INTERVAL};
use crate::group::core::GroupCore;
use crate::transport::{ConnectError, Connections, DisconnectReason};

/// A group's part on other nodes.
pub struct InterNode {
    core: Arc<GroupCore>,
    /// This node.
    pub node: usize,
    /// In the leader.
    pub links: Option<Arc<Mutex<LeaderLinks>>>,
}

/// What a leader carries data with.
pub struct LeaderLinks {
    /// Between the leaders, by node.
    pub wire: Box<dyn Connections>,
    /// Where what is to be reduced comes in.
    pub scratch: Vec<u64>,
}

impl InterNode {
    pub fn new(core: &Arc<GroupCore>) -> Self {
        Self { core: Arc::clone(core), node: core.nodes[core.rank], links: None }
    }

    /// The other nodes.
    pub fn remote_nodes(&self) -> impl Iterator<Item = usize> + Clone + '_ {
        (0..self.core.leaders.len()).filter(|&node| node != self.node)
    }
}

impl WatchedConnections for Mutex<LeaderLinks> {
    fn abort(&self, failure: &str) {
        if let Ok(mut links) = self.try_lock() {
            links.wire.abort(failure);
        }
    }

    fn disconnect_reason(&self, node: usize) -> Option<DisconnectReason> {
        self.try_lock().ok()?.wire.disconnect_reason(node)
    }

    fn shutdown(&self) {
        if let Ok(mut links) = self.try_lock() {
            links.wire.shutdown();
        }
    }
}

impl Engine {
    /// Links the leaders.
    pub fn link(&mut self) -> Result<()> {
        if !self.is_leader() {
            return Ok(());
        }
        let wire = self.connect(
            "leaders",
            &self.core.leaders,
            self.core.nodes[self.core.rank],
            &"linking the nodes",
        )?;
        if let Some(inter_node) = &mut self.inter_node {
            let links = Arc::new(Mutex::new(LeaderLinks { wire, scratch: Vec::new() }));
            self.failure.watch_connections(Arc::clone(&links) as Arc<dyn WatchedConnections>);
            inter_node.links = Some(links);
        }
        Ok(())
    }

    /// Links members of the group.
    pub fn connect(
        &self,
        channel: &str,
        members: &[usize],
        own: usize,
        operation: &dyn std::fmt::Display,
    ) -> Result<Box<dyn Connections>> {
        let Some(transport) = &self.core.world.transport else {
            return Err(self.core.caller().argument("link", "there is no other node".into()));
        };
        let ranks: Vec<usize> = members.iter().map(|&member| self.core.ranks[member]).collect();
        let (mut waiting, mut asked, mut suspect) =
            (self.failure.begin_wait(), Instant::now(), None);
        let mut patience = |missing: &[usize]| {
            let missing: Vec<usize> = missing.iter().map(|&missing| members[missing]).collect();
            self.failure.check_failure(operation, true)?;
            let mut gone =
                missing.iter().find_map(|&r| Some((r, self.failure.disconnect_reason(r)?)));
            if gone.is_none() && asked.elapsed() >= POLL_INTERVAL {
                asked = Instant::now();
                let report = |&&r: &&usize| {
                    self.core.world.exit_report(self.core.ranks[r], Duration::ZERO).is_some()
                };
                gone = missing.iter().find(report).map(|&r| (r, DisconnectReason::Ended));
            }
            match gone {
                // Before it went it may have connected: there is another look at the connections in
                // between.
                Some((peer, how)) if suspect.replace(peer) == Some(peer) => {
                    Err(self.failure.handle_disconnect(peer, how, operation))
                }
                _ => self.failure.check_deadline(&mut waiting, operation, &|| missing.clone()),
            }
        };
        let linked = transport.connect(&self.core.key(channel), &ranks, own, &mut patience);
        linked.map_err(|unlinked| match unlinked {
            ConnectError::Cancelled(error) => error,
            ConnectError::PeerDown(loss) => {
                self.failure.handle_disconnect(members[loss.member], loss.how, operation)
            }
        })
    }

    /// Whether those of `members` that come after this one have connected, so that
    /// [`Engine::connect`] need not wait.
    pub fn have_connected(&self, channel: &str, members: &[usize], own: usize) -> bool {
        let Some(transport) = &self.core.world.transport else {
            return false;
        };
        let ranks: Vec<usize> = members.iter().map(|&member| self.core.ranks[member]).collect();
        transport.have_connected(&self.core.key(channel), &ranks, own)
    }

    /// Closes this rank's connections for messages, with the group's failure as the reason if it
    /// has failed.
    pub fn disconnect(&self) {
        let has_failed = self.control.header().poison.is_set();
        let leave = |wire: &mut dyn Connections| {
            if has_failed {
                self.failure.abandon(wire)
            } else {
                wire.shutdown()
            }
        };
        for mut link in self.outgoing.iter().filter_map(|link| link.try_lock().ok()) {
            if let Some(wire) = &mut *link {
                leave(&mut **wire);
            }
        }
        for mut queue in self
            .queues
            .iter()
            .filter_map(|queue| queue.open(&self.control.rank(self.core.rank).doorbell))
        {
            if let Some(wire) = &mut queue.link {
                leave(&mut **wire);
            }
        }
    }
}
