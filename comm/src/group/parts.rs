//! The parts of a group, apart from its threads.

use std::sync::Arc;
use std::time::Duration;

use super::core::GroupCore;
use super::host::HostOperations;
use crate::descriptor::{MessageDescriptor, OpDescriptor};
use crate::error::Result;
use crate::failure::Failure;
use crate::internode::presence::{ALL_RANKS, Presence};
use crate::shm::arena::Block;
use crate::shm::control::Control;
use crate::shm::segments::Segments;
use crate::world::World;

/// The parts of a group that its handles and threads share.
#[derive(Clone)]
pub struct Parts {
    pub core: Arc<GroupCore>,
    pub failure: Arc<Failure>,
    pub host: Arc<HostOperations>,
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
    /// Returns the group of all ranks of a job.
    pub fn of_world(world: Arc<World>, timeout: Duration) -> Self {
        Self {
            control: world.root_control(),
            ranks: (0..world.size).collect(),
            block: None,
            name: world.name.clone(),
            presence: Presence::new(&world, ALL_RANKS.into()),
            timeout,
            world,
        }
    }
}

impl Parts {
    /// Makes a group, whose nodes are connected here. `operation` is for errors.
    pub fn new(group: NewGroup, operation: &str) -> Result<Self> {
        let NewGroup { world, ranks, control, block, name, presence, timeout } = group;
        let core = Arc::new(GroupCore::new(world, ranks, timeout, name));
        let failure = Failure::new(Arc::clone(&core), Arc::new(control), block, presence);
        let failure = Arc::new(failure);
        let host = Arc::new(HostOperations::new(&failure, operation)?);
        Ok(Self { core, failure, host })
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
        let finished = self.host.buckets.finish();
        finished.inspect_err(|_| self.core.recorder.fail(launched.records()))
    }

    /// Waits for a launched bucket and those before it.
    pub fn finish_bucket(&self, segments: &Segments) -> Result<()> {
        let finished = self.host.buckets.finish_one(segments);
        finished.inspect_err(|_| self.core.recorder.fail(self.core.launched_buckets.records()))
    }
}
