//! Collectives on tensors.

use std::sync::Arc;

use flow_autograd::CudaTensor;
use flow_comm::nccl::CudaGroup;
use flow_comm::{Buffer, DType, ProcessGroup, ReduceOp};
use tch::{Device, Tensor};

use crate::device::{choose, DeviceKind};
use crate::error::{job_rank, Error, Result};

/// What a process group does with tensors, which are on the CPU or on this rank's GPU, the same on all ranks.
///
/// Tensors that are contiguous are worked on where they are, others through a contiguous copy. Operations on GPUs are
/// enqueued in the order of libtorch's current stream, as its own are.
pub trait TensorCollectives {
    /// Chooses what ranks compute on: for [`DeviceKind::Cuda`], each the GPU of its local rank (LOCAL_RANK), counted
    /// among those that CUDA_VISIBLE_DEVICES leaves. All ranks call this, before anything else is done with tensors.
    ///
    /// # Errors
    ///
    /// On all ranks, if one cannot have its device: more ranks than GPUs, a libtorch without CUDA, no driver.
    fn use_device(&self, kind: DeviceKind) -> Result<Device>;
    /// The device this rank computes on: the CPU, unless [`TensorCollectives::use_device`] chose a GPU.
    fn device(&self) -> Device;
    /// Reduces `tensor` element by element over all ranks, in place.
    fn all_reduce_tensor(&self, tensor: &mut Tensor, op: ReduceOp) -> Result<()>;
    /// Copies rank `root`'s `tensor` into all ranks'.
    fn broadcast_tensor(&self, tensor: &mut Tensor, root: usize) -> Result<()>;
    /// All ranks' tensors, which have equal shapes, stacked along a new first dimension.
    fn all_gather_tensor(&self, tensor: &Tensor) -> Result<Tensor>;
}

impl TensorCollectives for ProcessGroup {
    fn use_device(&self, kind: DeviceKind) -> Result<Device> {
        choose(self, kind)
    }

    fn device(&self) -> Device {
        self.cuda_device().map_or(Device::Cpu, |device| flow_autograd::torch_device(&device))
    }

    fn all_reduce_tensor(&self, tensor: &mut Tensor, op: ReduceOp) -> Result<()> {
        let operation = "all_reduce";
        in_place(tensor, |contiguous| match cuda_group(self, contiguous)? {
            Some(cuda) => {
                let mut memory = CudaTensor::new(contiguous).map_err(torch(self, operation))?;
                Ok(cuda.all_reduce(&mut memory, op, &current_stream(self, &cuda)?)?)
            }
            None => Ok(self.all_reduce(&mut Memory::new(self, operation, contiguous)?, op)?),
        })
    }

    fn broadcast_tensor(&self, tensor: &mut Tensor, root: usize) -> Result<()> {
        let operation = "broadcast";
        in_place(tensor, |contiguous| match cuda_group(self, contiguous)? {
            Some(cuda) => {
                let memory = CudaTensor::new(contiguous).map_err(torch(self, operation))?;
                Ok(cuda.broadcast(&mut [memory], root, &current_stream(self, &cuda)?)?)
            }
            None => Ok(self.broadcast(&mut Memory::new(self, operation, contiguous)?, root)?),
        })
    }

    fn all_gather_tensor(&self, tensor: &Tensor) -> Result<Tensor> {
        let operation = "all_gather";
        let tensor = tensor.contiguous();
        let shape: Vec<i64> = std::iter::once(self.world_size() as i64).chain(tensor.size()).collect();
        let output = Tensor::empty(shape, (tensor.kind(), tensor.device()));
        match cuda_group(self, &tensor)? {
            Some(cuda) => {
                let input = CudaTensor::new(&tensor).map_err(torch(self, operation))?;
                let mut memory = CudaTensor::new(&output).map_err(torch(self, operation))?;
                cuda.all_gather(&input, &mut memory, &current_stream(self, &cuda)?)?;
            }
            None => {
                let input = Memory::new(self, operation, &tensor)?;
                self.all_gather(&input, &mut Memory::new(self, operation, &output)?)?;
            }
        }
        Ok(output)
    }
}

/// The group's collectives on the tensor's GPU; None for a tensor that is not on one.
pub(crate) fn cuda_group(group: &ProcessGroup, tensor: &Tensor) -> Result<Option<Arc<CudaGroup>>> {
    let chosen = group.cuda_device().filter(|device| flow_autograd::torch_device(device) == tensor.device());
    match (chosen, tensor.device()) {
        (Some(device), _) => Ok(Some(group.nccl(device.ordinal())?)),
        (None, Device::Cuda(ordinal)) => Ok(Some(group.nccl(ordinal)?)),
        _ => Ok(None),
    }
}

/// libtorch's stream on the group's GPU.
pub(crate) fn current_stream(group: &ProcessGroup, cuda: &CudaGroup) -> Result<flow_comm::nccl::Stream> {
    flow_autograd::current_stream(cuda.device()).map_err(torch(group, "finding libtorch's stream"))
}

pub(crate) fn torch(group: &ProcessGroup, operation: &'static str) -> impl Fn(flow_autograd::Error) -> Error {
    let rank = job_rank(group);
    move |error| Error::Torch { rank, operation, reason: error.to_string() }
}

/// Has `run` work on the tensor itself, or on a contiguous copy of it.
fn in_place(tensor: &mut Tensor, run: impl FnOnce(&Tensor) -> Result<()>) -> Result<()> {
    let contiguous = tensor.detach().contiguous();
    run(&contiguous)?;
    if flow_autograd::data_ptr(&contiguous) != flow_autograd::data_ptr(tensor) {
        tch::no_grad(|| tensor.copy_(&contiguous));
    }
    Ok(())
}

/// A contiguous CPU tensor as a buffer.
struct Memory {
    tensor: Tensor,
    dtype: DType,
}

impl Memory {
    fn new(group: &ProcessGroup, operation: &'static str, tensor: &Tensor) -> Result<Self> {
        flow_autograd::bytes(tensor).map_err(torch(group, operation))?;
        let unknown = || Error::Torch {
            rank: job_rank(group),
            operation,
            reason: format!("tensors of {:?} cannot be sent", tensor.kind()),
        };
        let dtype = flow_autograd::dtype(tensor.kind()).ok_or_else(unknown)?;
        Ok(Self { tensor: tensor.shallow_clone(), dtype })
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
