//! Links for tensors from GPU to GPU.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use flow_autograd::{BoxError, current_stream};
use flow_comm::ProcessGroup;
use flow_comm::nccl::{CudaGroup, Event, Stream};
use flow_plan::schedule::Schedule;
use flow_tensor::{TensorCollectives, Work, cuda_tensor};
use tch::Tensor;

/// The links of this rank. Each pair of neighbours has a group of two ranks for each direction. For
/// messages of one group follow each other on the device: two ranks that send to each other before
/// they receive would wait for ever.
pub struct Links {
    /// The links by the rank that this one sends to.
    to: HashMap<usize, Link>,
    /// The links by the rank that this one receives from.
    from: HashMap<usize, Link>,
}

/// A link from rank 0 of a group to rank 1.
#[derive(Clone)]
pub struct Link {
    group: ProcessGroup,
    cuda: Arc<CudaGroup>,
}

impl Links {
    /// Makes the links, or None where ranks do not compute on GPUs. All ranks of the group call this.
    pub fn new(group: &ProcessGroup, schedule: &Schedule) -> flow_comm::Result<Option<Self>> {
        let Some(device) = group.cuda_device() else { return Ok(None) };
        let mut pairs = BTreeSet::new();
        for stage in 1..schedule.stages() {
            let before = schedule.rank_of(stage - 1);
            let after = schedule.rank_of(stage);
            if before != after {
                pairs.insert((before, after));
                pairs.insert((after, before));
            }
        }
        let mut links = Self { to: HashMap::new(), from: HashMap::new() };
        for (from, to) in pairs {
            let Some(pair) = group.new_group(&[from, to])? else { continue };
            let link = Link { cuda: pair.nccl(device.ordinal())?, group: pair };
            if from == group.rank() {
                links.to.insert(to, link);
            } else {
                links.from.insert(from, link);
            }
        }
        Ok(Some(links))
    }

    /// Returns the link over which this rank sends to `rank`.
    pub fn link_to(&self, rank: usize) -> Option<Link> {
        self.to.get(&rank).cloned()
    }

    /// Returns the link over which this rank receives from `rank`.
    pub fn link_from(&self, rank: usize) -> Option<Link> {
        self.from.get(&rank).cloned()
    }

    /// Makes the ranks on the other sides fail.
    pub fn abort(&self, cause: &str) {
        for link in self.to.values().chain(self.from.values()) {
            link.group.abort(cause);
            link.cuda.abort(cause);
        }
    }
}

impl Link {
    /// Returns a stream that waits for what libtorch has enqueued so far, and for nothing later. Later
    /// work may wait for what the receiver computes of the tensors to send.
    pub fn so_far(&self) -> Result<Stream, BoxError> {
        let device = self.cuda.device();
        let stream = Stream::high_priority(device)?;
        let event = Event::new(device)?;
        event.record(&current_stream(device)?)?;
        stream.wait(&event)?;
        Ok(stream)
    }

    /// Sends contiguous tensors in the order of a stream. The host waits until they have been sent, so
    /// that their memory is free.
    pub fn send(&self, tensors: &[Tensor], stream: &Stream) -> Result<(), BoxError> {
        for tensor in tensors {
            self.cuda.send(&cuda_tensor(tensor)?, 1, stream)?;
        }
        Ok(self.cuda.synchronize()?)
    }

    /// Begins to receive a tensor.
    pub fn receive(&self, tensor: Tensor) -> Result<Work, BoxError> {
        Ok(self.group.recv_tensor_async(tensor, 0)?)
    }
}
