//! One bucket's life in a backward: gradients come in, are reduced, and are where the optimizer
//! reads them.

pub(crate) mod assignment;
mod cpu;
mod cuda;
pub(crate) mod progress;

use std::time::{Duration, Instant};

use flow_comm::nccl::Event;
use flow_comm::ProcessGroup;
use tch::{Kind, Tensor};

use self::cpu::CpuBucket;
use self::cuda::CudaBucket;
use self::progress::ReducePath;
use crate::error::Result;
use crate::parameter::Parameter;

/// A bucket and the memory it is reduced in.
pub(crate) struct Bucket {
    /// Parameters by index, in the order of their places.
    pub members: Vec<usize>,
    memory: Memory,
    /// Gradients still to come in this backward.
    pub pending: usize,
    /// When the last one came.
    pub ready: Option<Instant>,
}

enum Memory {
    Shared(CpuBucket),
    Cuda(Box<CudaBucket>),
}

impl Bucket {
    pub fn new(
        group: &ProcessGroup,
        path: &ReducePath,
        number: usize,
        members: Vec<usize>,
        parameters: &[Parameter],
        communication: Option<Kind>,
    ) -> Result<Self> {
        let number = number as u32;
        let tensors: Vec<&Parameter> = members.iter().map(|&m| &parameters[m]).collect();
        let kind = communication.unwrap_or(tensors[0].kind);
        let memory = match path {
            ReducePath::Cpu(progress) => {
                Memory::Shared(CpuBucket::new(group, progress, number, &tensors, kind)?)
            }
            ReducePath::Cuda(cuda) => {
                Memory::Cuda(Box::new(CudaBucket::new(group, cuda, number, &tensors, kind)?))
            }
        };
        let pending = members.len();
        Ok(Self { members, memory, pending, ready: None })
    }

    /// Says in which step the bucket is reduced next.
    pub fn set_step(&mut self, step: u32) {
        match &mut self.memory {
            Memory::Shared(bucket) => bucket.segments.set_step(step),
            Memory::Cuda(bucket) => bucket.set_step(step),
        }
    }

    /// Takes in a member's gradient, of which `owned` says whether its memory is nobody else's. On
    /// the CPU it is then reduced where it is, if all ranks can reach it there. Returns whether it
    /// is.
    pub fn mark_ready(&mut self, slot: usize, gradient: &Tensor, owned: bool) -> Result<bool> {
        let in_place = match &mut self.memory {
            Memory::Shared(bucket) => bucket.mark_ready(slot, gradient, owned),
            Memory::Cuda(bucket) => bucket.mark_ready(slot, gradient, owned)?,
        };
        self.arrived();
        Ok(in_place)
    }

    /// Takes part with zeros for a member that got no gradient.
    pub fn take_zeros(&mut self, slot: usize) -> Result<()> {
        match &mut self.memory {
            Memory::Shared(bucket) => bucket.take_zeros(slot),
            Memory::Cuda(bucket) => bucket.take_zeros(slot)?,
        }
        self.arrived();
        Ok(())
    }

    fn arrived(&mut self) {
        self.pending -= 1;
        if self.pending == 0 {
            self.ready = Some(Instant::now());
        }
    }

    /// Hands the bucket over to be reduced; false if that must be tried again later.
    pub fn launch(&mut self) -> flow_comm::Result<bool> {
        match &mut self.memory {
            Memory::Shared(bucket) => bucket.launch(),
            Memory::Cuda(bucket) => bucket.launch().map(|()| true),
        }
    }

    /// The reduced gradient of a member; None if it was reduced where it is.
    pub fn reduced_grad(&self, slot: usize) -> Option<&Tensor> {
        match &self.memory {
            Memory::Shared(bucket) => bucket.reduced_grad(slot),
            Memory::Cuda(bucket) => bucket.reduced_grad(slot),
        }
    }

    /// Whether [`Bucket::reduced_grad`] is to become the gradient, rather than be copied to it.
    pub fn grad_is_view(&self) -> bool {
        matches!(self.memory, Memory::Cuda(_))
    }

    /// Bytes as communicated.
    pub fn bytes(&self) -> usize {
        match &self.memory {
            Memory::Shared(bucket) => bucket.segments.bytes(),
            Memory::Cuda(bucket) => bucket.bytes(),
        }
    }

    /// On a GPU: see [`CudaBucket::times`].
    pub fn times(&self, begin: &Event, end: &Event) -> Option<[Duration; 3]> {
        match &self.memory {
            Memory::Shared(_) => None,
            Memory::Cuda(bucket) => bucket.times(begin, end),
        }
    }

    /// Ready for the next backward. `stream_joined`: nothing on a GPU uses the gradients any more, in
    /// libtorch's order.
    pub fn reset(&mut self, stream_joined: bool) {
        self.pending = self.members.len();
        self.ready = None;
        match &mut self.memory {
            Memory::Shared(bucket) => bucket.segments.clear(),
            Memory::Cuda(bucket) => bucket.release(stream_joined),
        }
    }
}
