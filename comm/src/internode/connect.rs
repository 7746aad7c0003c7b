//! Connections between members on different nodes: how they are made, and how bytes go over them.

use std::fmt::Display;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::Result;
use crate::failure::remote::POLL_INTERVAL;
use crate::failure::Failure;
use crate::group::core::GroupCore;
use crate::transport::{ConnectError, Connections, DisconnectReason, PeerDown};

/// Connects members of one group.
pub struct Connector {
    core: Arc<GroupCore>,
    failure: Arc<Failure>,
}

impl Connector {
    pub fn new(failure: &Arc<Failure>) -> Self {
        Self { core: Arc::clone(&failure.core), failure: Arc::clone(failure) }
    }

    /// Connects members of the group, each of which calls this; `own` is this rank's position among
    /// them. The last one does not wait for the others.
    pub fn connect(
        &self,
        channel: &str,
        members: &[usize],
        own: usize,
        operation: &dyn Display,
    ) -> Result<Box<dyn Connections>> {
        let (core, failure) = (&self.core, &self.failure);
        let Some(transport) = &core.world.transport else {
            let reason = "all members are on this node".into();
            return Err(core.caller().argument(&operation.to_string(), reason));
        };
        let mut deadline = failure.begin_wait();
        let (mut asked, mut suspect) = (Instant::now(), None);
        let mut cancel_check = |missing: &[usize]| {
            let missing: Vec<usize> = missing.iter().map(|&missing| members[missing]).collect();
            failure.check_failure(operation, true)?;
            let mut gone = missing.iter().find_map(|&r| Some((r, failure.disconnect_reason(r)?)));
            if gone.is_none() && asked.elapsed() >= POLL_INTERVAL {
                asked = Instant::now();
                let has_ended =
                    |&&r: &&usize| core.world.exit_report(core.ranks[r], Duration::ZERO).is_some();
                gone = missing.iter().find(has_ended).map(|&r| (r, DisconnectReason::Ended));
            }
            match gone {
                // It may have connected before it ended: only when it is missing again after
                // another look at the connections, it has not.
                Some((peer, how)) if suspect.replace(peer) == Some(peer) => {
                    Err(failure.handle_disconnect(peer, how, operation))
                }
                _ => failure.check_deadline(&mut deadline, operation, &|| missing.clone()),
            }
        };
        let ranks = self.job_ranks(members);
        let connected = transport.connect(&core.key(channel), &ranks, own, &mut cancel_check);
        connected.map_err(|error| match error {
            ConnectError::Cancelled(error) => error,
            ConnectError::PeerDown(loss) => {
                failure.handle_disconnect(members[loss.member], loss.how, operation)
            }
        })
    }

    /// Whether those of `members` that come after this one have connected, so that
    /// [`Connector::connect`] need not wait.
    pub fn have_connected(&self, channel: &str, members: &[usize], own: usize) -> bool {
        self.core.world.transport.as_ref().is_some_and(|transport| {
            transport.have_connected(&self.core.key(channel), &self.job_ranks(members), own)
        })
    }

    fn job_ranks(&self, members: &[usize]) -> Vec<usize> {
        members.iter().map(|&member| self.core.ranks[member]).collect()
    }
}

/// Moves what can be moved; if `is_over` then is false, waits for more, at most for `time`. A member
/// that has gone may have sent all before.
pub fn progress(
    connections: &mut dyn Connections,
    time: Duration,
    is_over: &mut dyn FnMut(&dyn Connections) -> bool,
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
