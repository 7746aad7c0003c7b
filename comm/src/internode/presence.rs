//! Which groups this rank is in, as processes on other nodes can ask.

use std::sync::Arc;

use crate::world::World;

/// The name of the group of all ranks of a job.
pub const ALL_RANKS: &str = "0";

/// This rank's membership of a group: from before it agrees to make the group until it has left. So a
/// member on another node may take this rank for gone if this rank is not in the group.
pub struct Presence {
    world: Arc<World>,
    /// A name that only groups without common members share.
    pub group: String,
}

impl Presence {
    pub fn new(world: &Arc<World>, group: String) -> Self {
        if let Some(transport) = &world.transport {
            transport.join_group(&group);
        }
        Self { world: Arc::clone(world), group }
    }
}

impl Drop for Presence {
    fn drop(&mut self) {
        if let Some(transport) = &self.world.transport {
            transport.leave_group(&self.group);
        }
    }
}
