//! The groups that this rank is in, as processes on other nodes can ask.

use std::sync::Arc;

use crate::world::World;

/// The name of the group of all ranks of a job.
pub const ALL_RANKS: &str = "0";

/// This rank's membership of a group. It begins before the rank agrees to make the group, and lasts
/// until the rank leaves. So if a member on another node finds that this rank is not in the group,
/// this rank has left it.
pub struct Presence {
    world: Arc<World>,
    /// A name that only groups without common members share.
    pub group: String,
}

impl Presence {
    /// Joins the group of this name.
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
