//! The back-end over shared memory: on one node, and between nodes through their leaders.

use std::sync::Arc;

use flow_kernels::{DType, ReduceOp};

use crate::backend::{BufferView, Buffers, HostBackend};
use crate::collectives::bucket::BucketQueue;
use crate::collectives::hierarchical::Hierarchical;
use crate::collectives::host::HostCollectives;
use crate::collectives::segments::Segments;
use crate::descriptor::OpDescriptor;
use crate::error::Result;
use crate::failure::Failure;
use crate::internode::InterNode;
use crate::p2p::{AnyReceiver, Matcher, Receiver, Sender};
use crate::shm::rounds::Rounds;

/// A group's parts. Each depends on those below only, and on the group's members and failure:
/// buckets and collectives on `Hierarchical`, that on `InterNode`, that on `Rounds`.
pub struct SharedMemory {
    buckets: BucketQueue,
    collectives: HostCollectives,
    sender: Sender,
    receiver: Receiver,
    any_receiver: AnyReceiver,
}

impl SharedMemory {
    /// The parts of one group, whose nodes are connected here. `operation` makes the group.
    pub fn new(failure: Arc<Failure>, operation: &str) -> Result<Self> {
        let rounds = Arc::new(Rounds::new(Arc::clone(&failure)));
        let (mut inter_node, mut hierarchical) = (None, None);
        if failure.core.is_inter_node() {
            let connected = Arc::new(InterNode::new(&rounds, operation)?);
            hierarchical = Some(Arc::new(Hierarchical::new(&rounds, &connected)));
            inter_node = Some(connected);
        }
        let matcher = Arc::new(Matcher::new(&failure));
        Ok(Self {
            buckets: BucketQueue::new(Arc::clone(&rounds), hierarchical.clone()),
            collectives: HostCollectives::new(rounds, inter_node, hierarchical),
            sender: Sender::new(&failure),
            receiver: Receiver::new(Arc::clone(&matcher)),
            any_receiver: AnyReceiver::new(matcher),
        })
    }
}

impl HostBackend for SharedMemory {
    fn collective(&self, operation: OpDescriptor, buffers: Buffers) -> Result<()> {
        self.buckets.finish()?;
        crate::collectives::run(&self.collectives, operation, buffers)
    }

    fn send(&self, data: BufferView, dtype: DType, to: usize, tag: u32) -> Result<()> {
        self.sender.send(data, dtype, to, tag)
    }

    fn recv(&self, data: BufferView, dtype: DType, from: Option<usize>, tag: u32) -> Result<usize> {
        match from {
            Some(from) => self.receiver.recv(data, dtype, from, tag).map(|()| from),
            None => self.any_receiver.recv(data, dtype, tag),
        }
    }

    fn launch_bucket(&self, segments: &Arc<Segments>, reduce: ReduceOp) -> Result<bool> {
        self.buckets.launch(segments, reduce)
    }

    fn progress_buckets(&self) -> Result<()> {
        self.buckets.progress()
    }

    fn finish_buckets(&self) -> Result<()> {
        self.buckets.finish()
    }

    fn new_group(&self, failure: Arc<Failure>, operation: &str) -> Result<Arc<dyn HostBackend>> {
        Ok(Arc::new(SharedMemory::new(failure, operation)?))
    }
}
