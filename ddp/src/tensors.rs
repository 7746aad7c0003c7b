//! Collectives on tensors.

use flow_comm::{Buffer, DType, ProcessGroup, ReduceOp, SharedBuffer};
use tch::{Device, Tensor};

use crate::error::{job_rank, Error, Result};

/// What a process group does with tensors. CPU tensors that are contiguous are worked on where they are, others
/// through a contiguous copy.
pub trait TensorCollectives {
    /// The device this rank computes on.
    fn device(&self) -> Device;
    /// Reduces `tensor` element by element over all ranks, in place.
    fn all_reduce_tensor(&self, tensor: &mut Tensor, op: ReduceOp) -> Result<()>;
    /// Copies rank `root`'s `tensor` into all ranks'.
    fn broadcast_tensor(&self, tensor: &mut Tensor, root: usize) -> Result<()>;
    /// All ranks' tensors, which have equal shapes, stacked along a new first dimension.
    fn all_gather_tensor(&self, tensor: &Tensor) -> Result<Tensor>;
}

impl TensorCollectives for ProcessGroup {
    fn device(&self) -> Device {
        Device::Cpu
    }

    fn all_reduce_tensor(&self, tensor: &mut Tensor, op: ReduceOp) -> Result<()> {
        in_place(self, tensor, "all_reduce", |memory| self.all_reduce(memory, op))
    }

    fn broadcast_tensor(&self, tensor: &mut Tensor, root: usize) -> Result<()> {
        in_place(self, tensor, "broadcast", |memory| self.broadcast(memory, root))
    }

    fn all_gather_tensor(&self, tensor: &Tensor) -> Result<Tensor> {
        let input = Memory::new(self, "all_gather", tensor.contiguous())?;
        let shape: Vec<i64> = std::iter::once(self.world_size() as i64).chain(tensor.size()).collect();
        let output = Tensor::empty(shape, (tensor.kind(), Device::Cpu));
        let mut output = Memory::new(self, "all_gather", output)?;
        self.all_gather(&input, &mut output)?;
        Ok(output.tensor)
    }
}

fn in_place(
    group: &ProcessGroup,
    tensor: &mut Tensor,
    operation: &'static str,
    run: impl FnOnce(&mut Memory) -> flow_comm::Result<()>,
) -> Result<()> {
    let mut memory = Memory::new(group, operation, tensor.detach().contiguous())?;
    run(&mut memory)?;
    if flow_autograd::data_ptr(&memory.tensor) != flow_autograd::data_ptr(tensor) {
        tch::no_grad(|| tensor.copy_(&memory.tensor));
    }
    Ok(())
}

/// A contiguous CPU tensor as a buffer.
struct Memory {
    tensor: Tensor,
    dtype: DType,
}

impl Memory {
    fn new(group: &ProcessGroup, operation: &'static str, tensor: Tensor) -> Result<Self> {
        let fail = |reason| Error::Torch { rank: job_rank(group), operation, reason };
        flow_autograd::bytes(&tensor).map_err(|e| fail(e.to_string()))?;
        let kind = tensor.kind();
        let dtype = flow_autograd::dtype(kind).ok_or_else(|| fail(format!("tensors of {kind:?} cannot be sent")))?;
        Ok(Self { tensor, dtype })
    }
}

impl Buffer for Memory {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn bytes(&self) -> &[u8] {
        // Checked when made.
        flow_autograd::bytes(&self.tensor).unwrap_or_default()
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        flow_autograd::bytes_mut(&mut self.tensor).unwrap_or_default()
    }
}

/// Broadcasts many small tensors in one collective.
pub(crate) struct CoalescedBroadcast {
    tensors: Vec<Tensor>,
    memory: SharedBuffer<u8>,
}

impl CoalescedBroadcast {
    pub fn new(group: &ProcessGroup, tensors: Vec<Tensor>) -> Result<Self> {
        let bytes = tensors.iter().map(size_in_bytes).sum();
        Ok(Self { tensors, memory: group.alloc_shared(bytes)? })
    }

    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// Gives all ranks the root's values. Costs a copy on each side; the transfer itself is one.
    pub fn run(&mut self, group: &ProcessGroup, root: usize) -> Result<()> {
        let fail = |e: flow_autograd::Error| Error::Torch {
            rank: job_rank(group),
            operation: "broadcasting tensors",
            reason: e.to_string(),
        };
        let mut end = 0;
        if group.rank() == root {
            for tensor in &self.tensors {
                let tensor = tensor.detach().contiguous();
                let bytes = flow_autograd::bytes(&tensor).map_err(fail)?;
                self.memory[end..end + bytes.len()].copy_from_slice(bytes);
                end += bytes.len();
            }
            group.broadcast(&mut self.memory, root)?;
            return Ok(());
        }
        group.broadcast(&mut self.memory, root)?;
        for tensor in &mut self.tensors {
            let mut target = tensor.detach().contiguous();
            let bytes = flow_autograd::bytes_mut(&mut target).map_err(fail)?;
            bytes.copy_from_slice(&self.memory[end..end + bytes.len()]);
            end += bytes.len();
            if flow_autograd::data_ptr(&target) != flow_autograd::data_ptr(tensor) {
                tch::no_grad(|| tensor.copy_(&target));
            }
        }
        Ok(())
    }
}

fn size_in_bytes(tensor: &Tensor) -> usize {
    tensor.numel() * tensor.kind().elt_size_in_bytes()
}
