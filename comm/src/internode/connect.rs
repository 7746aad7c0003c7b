//! Connections between members on different nodes: how they are made, and how bytes go over them.

use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use crate::error::Result;
use crate::failure::Failure;
use crate::group::core::GroupCore;
use crate::transport::{Connections, PeerDown};

/// Connects members of one group.
pub struct Connector {
    core: Arc<GroupCore>,
    failure: Arc<Failure>,
}

impl Connector {
    /// Connects members of the group that `failure` is of.
    pub fn new(failure: &Arc<Failure>) -> Self {
        Self { core: Arc::clone(&failure.core), failure: Arc::clone(failure) }
    }

    /// Connects members of the group, each of which calls this; `own` is this rank's position among
    /// them. It does not wait for the others: a connection is made when it is first used.
    pub fn connect(
        &self,
        channel: &str,
        members: &[usize],
        own: usize,
        operation: &dyn Display,
    ) -> Result<Box<dyn Connections>> {
        let core = &self.core;
        let failure = &self.failure;
        let Some(transport) = &core.world.transport else {
            let reason = "all members are on this node".into();
            return Err(core.caller().argument(&operation.to_string(), reason));
        };
        let ranks: Vec<usize> = members.iter().map(|&member| core.ranks[member]).collect();
        transport
            .connect(&failure.presence.group, &core.key(channel), &ranks, own)
            .map_err(|loss| failure.handle_disconnect(members[loss.member], loss.how, operation))
    }
}

/// Moves what can be moved; if `is_over` then is false, waits for more, at most for `time`. A
/// member that has gone may have sent all before.
pub fn progress(
    connections: &mut dyn Connections,
    time: Duration,
    is_over: &mut dyn FnMut(&mut dyn Connections) -> bool,
) -> Result<bool, PeerDown> {
    let moved = connections.progress(Duration::ZERO);
    if is_over(connections) {
        return Ok(true);
    }
    moved?;
    if time.is_zero() {
        // The other end may be on the same processor: the kernel likes to put processes together
        // that talk to each other.
        std::thread::yield_now();
        return Ok(false);
    }
    let moved = connections.progress(time);
    let is_over = is_over(connections);
    moved.map(|()| is_over).or_else(|loss| if is_over { Ok(true) } else { Err(loss) })
}
