//! The way of tensors from GPU to GPU.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use flow_autograd::{current_stream, BoxError, CudaTensor};
use flow_comm::nccl::{CudaGroup, Event, Stream};
use flow_comm::ProcessGroup;
use flow_plan::schedule::Schedule;
use flow_tensor::{TensorCollectives, Work};
use tch::Tensor;

/// A group of two ranks for each pair that talks to each other, and for each direction: messages of
/// a group follow each other on the device, so that two ranks which send to each other before they
/// receive would wait for each other for ever.
pub struct Links {
    /// By the rank that this one sends to.
    to: HashMap<usize, Link>,
    /// By the rank that this one receives from.
    from: HashMap<usize, Link>,
}

/// From rank 0 of a group to rank 1.
#[derive(Clone)]
pub struct Link {
    group: ProcessGroup,
    cuda: Arc<CudaGroup>,
}

impl Links {
    /// None where ranks do not compute on GPUs. All ranks of the group call this.
    pub fn new(group: &ProcessGroup, schedule: &Schedule) -> flow_comm::Result<Option<Self>> {
        let Some(device) = group.cuda_device() else { return Ok(None) };
        let rank_of = |stage| schedule.rank_of(stage);
        let neighbours = (1..schedule.stages()).map(|stage| (rank_of(stage - 1), rank_of(stage)));
        let pairs = neighbours.flat_map(|(one, other)| [(one, other), (other, one)]);
        let pairs: BTreeSet<(usize, usize)> = pairs.filter(|(from, to)| from != to).collect();
        let mut links = Self { to: HashMap::new(), from: HashMap::new() };
        for (from, to) in pairs {
            let Some(pair) = group.new_group(&[from, to])? else { continue };
            let link = Link { cuda: pair.nccl(device.ordinal())?, group: pair };
            match from == group.rank() {
                true => links.to.insert(to, link),
                false => links.from.insert(from, link),
            };
        }
        Ok(Some(links))
    }

    pub fn to(&self, rank: usize) -> Option<Link> {
        self.to.get(&rank).cloned()
    }

    pub fn from(&self, rank: usize) -> Option<Link> {
        self.from.get(&rank).cloned()
    }

    /// Has whoever waits on the other sides fail.
    pub fn abort(&self, cause: &str) {
        for link in self.to.values().chain(self.from.values()) {
            link.group.abort(cause);
            link.cuda.abort(cause);
        }
    }
}

impl Link {
    /// A stream that waits for what libtorch has enqueued so far, and for nothing that follows:
    /// that may wait for what the receiver computes of the tensors to send.
    pub fn so_far(&self) -> Result<Stream, BoxError> {
        let device = self.cuda.device();
        let (stream, event) = (Stream::high_priority(device)?, Event::new(device)?);
        event.record(&current_stream(device)?)?;
        stream.wait(&event)?;
        Ok(stream)
    }

    /// Sends contiguous tensors in the order of a stream, and has the host wait until they have been
    /// sent: their memory is free then.
    pub fn send(&self, tensors: &[Tensor], stream: &Stream) -> Result<(), BoxError> {
        for tensor in tensors {
            let memory = match flow_autograd::dtype(tensor.kind()) {
                Some(_) => CudaTensor::new(tensor)?,
                None => CudaTensor::as_bytes(tensor)?,
            };
            self.cuda.send(&memory, 1, stream)?;
        }
        Ok(self.cuda.synchronize()?)
    }

    /// Begins to receive a tensor.
    pub fn receive(&self, tensor: Tensor) -> Result<Work, BoxError> {
        Ok(self.group.recv_tensor_async(tensor, 0)?)
    }
}
