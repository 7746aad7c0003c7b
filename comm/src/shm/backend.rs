//! The back-end over shared memory: on one node, and between nodes through their leaders.

use std::sync::Arc;

use crate::backend::{BucketLaunch, BufferView, Buffers, HostBackend};
use crate::collectives::bucket::BucketQueue;
use crate::collectives::hierarchical::Hierarchical;
use crate::collectives::host::HostCollectives;
use crate::descriptor::{MessageDescriptor, OpDescriptor};
use crate::error::Result;
use crate::failure::Failure;
use crate::internode::InterNode;
use crate::p2p::{AnyReceiver, Matcher, Receiver, Sender};
use crate::shm::rounds::Rounds;

/// The back-end's name in traces.
pub const NAME: &str = "shm";

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
    fn name(&self) -> &'static str {
        NAME
    }

    fn collective(&self, operation: OpDescriptor, buffers: Buffers) -> Result<()> {
        crate::collectives::run(&self.collectives, operation, buffers)
    }

    fn read_peers(
        &self,
        operation: OpDescriptor,
        data: BufferView,
        lengths: &[usize],
        read: &mut dyn FnMut(&[*const u8]),
    ) -> Result<bool> {
        crate::collectives::peers::read_peers(&self.collectives, operation, data, lengths, read)
    }

    fn send(&self, data: BufferView, message: &MessageDescriptor, to: usize) -> Result<()> {
        self.sender.send(data, message, to)
    }

    fn recv(
        &self,
        data: BufferView,
        message: &MessageDescriptor,
        from: Option<usize>,
    ) -> Result<usize> {
        match from {
            Some(from) => self.receiver.recv(data, message, from).map(|()| from),
            None => self.any_receiver.recv(data, message),
        }
    }

    fn launch_bucket(&self, launch: BucketLaunch) -> Result<bool> {
        self.buckets.launch(launch)
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
