//! What a group consists of, apart from its threads.

use std::sync::Arc;
use std::time::Duration;

use super::core::GroupCore;
use crate::backend::HostBackend;
use crate::error::Result;
use crate::failure::Failure;
use crate::internode::presence::{Presence, ALL_RANKS};
use crate::shm::arena::Block;
use crate::shm::backend::SharedMemory;
use crate::shm::control::Control;
use crate::world::World;

/// The parts of a group that its handles and threads share.
#[derive(Clone)]
pub struct Parts {
    pub core: Arc<GroupCore>,
    pub failure: Arc<Failure>,
    pub backend: Arc<dyn HostBackend>,
}

/// A group to be: its members by their ranks in the job, and its control block on this node, which
/// the first of them has.
pub struct NewGroup {
    pub world: Arc<World>,
    pub ranks: Vec<usize>,
    pub control: Control,
    pub block: Option<Block>,
    pub name: String,
    pub presence: Presence,
    pub timeout: Duration,
}

impl NewGroup {
    /// The group of all ranks of a job.
    pub fn of_world(world: Arc<World>, timeout: Duration) -> Self {
        let (control, ranks) = (world.root_control(), (0..world.size).collect());
        let presence = Presence::new(&world, ALL_RANKS.into());
        Self { world, ranks, control, block: None, name: ALL_RANKS.into(), presence, timeout }
    }

    pub fn failure(self) -> Arc<Failure> {
        let core = Arc::new(GroupCore::new(self.world, self.ranks, self.timeout, self.name));
        Arc::new(Failure::new(core, Arc::new(self.control), self.block, self.presence))
    }
}

impl Parts {
    /// The group of all ranks of a job.
    pub fn of_world(world: Arc<World>, timeout: Duration) -> Result<Self> {
        let failure = NewGroup::of_world(world, timeout).failure();
        let backend = Arc::new(SharedMemory::new(Arc::clone(&failure), "join")?);
        Ok(Self { core: Arc::clone(&failure.core), failure, backend })
    }

    /// A group of some of this one's members, on the same back-end.
    pub fn sub_group(&self, group: NewGroup, operation: &str) -> Result<Self> {
        let failure = group.failure();
        let backend = self.backend.new_group(Arc::clone(&failure), operation)?;
        Ok(Self { core: Arc::clone(&failure.core), failure, backend })
    }
}
