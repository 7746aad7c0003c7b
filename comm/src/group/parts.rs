//! What a group consists of, apart from its threads.

use std::sync::Arc;
use std::time::Duration;

use super::core::GroupCore;
use crate::backend::HostBackend;
use crate::descriptor::{MessageDescriptor, OpDescriptor};
use crate::error::Result;
use crate::failure::Failure;
use crate::internode::presence::{Presence, ALL_RANKS};
use crate::shm::arena::Block;
use crate::shm::backend::{self, SharedMemory};
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
        let name = world.name().into();
        Self { world, ranks, control, block: None, name, presence, timeout }
    }

    /// The members and their failure, on the back-end of this name.
    pub fn failure(self, backend: &'static str) -> Arc<Failure> {
        let core = GroupCore::new(self.world, self.ranks, self.timeout, self.name, backend);
        Arc::new(Failure::new(Arc::new(core), Arc::new(self.control), self.block, self.presence))
    }
}

impl Parts {
    /// The group of all ranks of a job.
    pub fn of_world(world: Arc<World>, timeout: Duration) -> Result<Self> {
        let failure = NewGroup::of_world(world, timeout).failure(backend::NAME);
        let backend = Arc::new(SharedMemory::new(Arc::clone(&failure), "join")?);
        Ok(Self { core: Arc::clone(&failure.core), failure, backend })
    }

    /// A group of some of this one's members, on the same back-end.
    pub fn sub_group(&self, group: NewGroup, operation: &str) -> Result<Self> {
        let failure = group.failure(self.backend.name());
        let backend = self.backend.new_group(Arc::clone(&failure), operation)?;
        Ok(Self { core: Arc::clone(&failure.core), failure, backend })
    }

    /// Begins a collective, whose end the process group records.
    pub fn begin(&self, operation: &mut OpDescriptor) -> Result<()> {
        let start = self.core.assign_sequence(operation);
        self.failure.check_poison(operation)?;
        self.core.count_collective();
        self.core.recorder.begin(&start);
        Ok(())
    }

    /// Begins a message, whose end the process group records.
    pub fn begin_message(&self, message: &MessageDescriptor) -> Result<()> {
        self.failure.check_poison(message)?;
        let bytes = message.count * message.dtype.size();
        self.core.recorder.begin_message(message.kind, bytes);
        Ok(())
    }

    /// Waits for all launched buckets.
    pub fn finish_buckets(&self) -> Result<()> {
        let launched = &self.core.launched_buckets;
        if launched.is_empty() {
            return Ok(());
        }
        let finished = self.backend.finish_buckets();
        finished.inspect_err(|_| self.core.recorder.fail(launched.records()))
    }
}
