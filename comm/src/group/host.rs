//! The parts that a group's operations on the host run on.

use std::sync::Arc;

use crate::collectives::bucket::BucketQueue;
use crate::collectives::hierarchical::Hierarchical;
use crate::collectives::host::HostCollectives;
use crate::error::Result;
use crate::failure::Failure;
use crate::internode::InterNode;
use crate::p2p::{AnyReceiver, Matcher, Receiver, Sender};
use crate::shm::rounds::Rounds;

/// The parts that move a group's data on the host: shared memory on a node, and between nodes a
/// transport.
///
/// Each part depends on those below only, and on the group's members and failure: buckets and
/// collectives on `Hierarchical`, that on `InterNode`, that on `Rounds`.
pub struct HostOperations {
    pub buckets: BucketQueue,
    pub collectives: HostCollectives,
    pub sender: Sender,
    pub receiver: Receiver,
    pub any_receiver: AnyReceiver,
}

impl HostOperations {
    /// Makes the operations of one group, whose nodes are connected here. `operation` makes the
    /// group.
    pub fn new(failure: &Arc<Failure>, operation: &str) -> Result<Self> {
        let rounds = Arc::new(Rounds::new(Arc::clone(failure)));
        let mut inter_node = None;
        let mut hierarchical = None;
        if failure.core.is_inter_node() {
            let connected = Arc::new(InterNode::new(&rounds, operation)?);
            hierarchical = Some(Arc::new(Hierarchical::new(&rounds, &connected)));
            inter_node = Some(connected);
        }
        let matcher = Arc::new(Matcher::new(failure));
        Ok(Self {
            buckets: BucketQueue::new(Arc::clone(&rounds), hierarchical.clone()),
            collectives: HostCollectives::new(rounds, inter_node, hierarchical),
            sender: Sender::new(failure),
            receiver: Receiver::new(Arc::clone(&matcher)),
            any_receiver: AnyReceiver::new(matcher),
        })
    }

    /// Waits until no collective and no bucket of this process is under way, in a group that has
    /// failed.
    pub fn settle(&self) {
        self.buckets.settle();
        self.collectives.settle();
    }
}
