//! The parts that the collectives of a group share.

use std::sync::Arc;

use super::hierarchical::Hierarchical;
use crate::descriptor::OpDescriptor;
use crate::error::Result;
use crate::group::core::GroupCore;
use crate::internode::InterNode;
use crate::memory::Buffers;
use crate::shm::control::Control;
use crate::shm::rounds::Rounds;

/// Moves the data of one collective, as far as it is this rank's to do. All ranks run it with the
/// same operation, in the same order. Threads of a rank may run several at once, which then wait
/// for each other.
pub type Collective = fn(&HostCollectives, OpDescriptor, Buffers) -> Result<()>;

/// The parts that a group's collectives run on.
pub struct HostCollectives {
    pub core: Arc<GroupCore>,
    pub control: Arc<Control>,
    pub rounds: Arc<Rounds>,
    /// The members on other nodes, if there are any.
    pub inter_node: Option<Arc<InterNode>>,
    pub hierarchical: Option<Arc<Hierarchical>>,
}

impl HostCollectives {
    /// Makes the collectives of a group; the options are there if it has members on other nodes.
    pub fn new(
        rounds: Arc<Rounds>,
        inter_node: Option<Arc<InterNode>>,
        hierarchical: Option<Arc<Hierarchical>>,
    ) -> Self {
        Self {
            core: Arc::clone(&rounds.core),
            control: Arc::clone(&rounds.control),
            rounds,
            inter_node,
            hierarchical,
        }
    }

    /// Waits until no thread of this process runs a collective.
    pub fn settle(&self) {
        drop(self.rounds.lock());
    }

    /// Waits until all ranks have arrived in a round, with `payload` bytes each.
    pub fn wait_arrived(&self, round: u64, operation: &OpDescriptor, payload: usize) -> Result<()> {
        match &self.inter_node {
            Some(inter_node) => inter_node.wait_arrived(round, operation, payload),
            None => self.rounds.wait_all_arrived(round, operation),
        }
    }
}
