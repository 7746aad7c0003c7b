//! Collectives on tensors.

use std::sync::Arc;

use flow_autograd::CudaTensor;
use flow_comm::nccl::CudaGroup;
use flow_comm::{Buffer, DType, ProcessGroup, ReduceOp};
use tch::{Device, TchError, Tensor};

use crate::device::{choose, DeviceKind};
use crate::error::{job_rank, Error, Result};
use crate::layout::{overlaps, OVERLAPS};

/// What a process group does with tensors, which are on the CPU or on this rank's GPU, the same on
/// all ranks.
///
/// Tensors that are contiguous are worked on where they are, others through a contiguous copy.
/// Operations on GPUs are enqueued in the order of libtorch's current stream, as its own are.
///
/// Tensors are dense, and of kind `Float`, `Double`, `Half`, `BFloat16`, `Int`, `Int64` or `Uint8`.
/// What a result is written to has memory of its own for each element, unlike what `expand` makes.
/// Any other tensor is an error of this rank, before the others are met.
pub trait TensorCollectives {
    /// Chooses what ranks compute on: for [`DeviceKind::Cuda`], each the GPU of its local rank
    /// (LOCAL_RANK), counted among those that CUDA_VISIBLE_DEVICES leaves. All ranks call this,
    /// before anything else is done with tensors.
    ///
    /// # Errors
    ///
    /// On all ranks, if one cannot have its device: more ranks than GPUs, a libtorch without CUDA,
    /// no driver.
    fn use_device(&self, kind: DeviceKind) -> Result<Device>;
    /// The device this rank computes on: the CPU, unless [`TensorCollectives::use_device`] chose a
    /// GPU.
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
        check(self, operation, tensor, true)?;
        let data = contiguous(tensor);
        match cuda_group(self, &data)? {
            Some(cuda) => {
                let mut memory = CudaTensor::new(&data).map_err(torch(self, operation))?;
                cuda.all_reduce(&mut memory, op, &current_stream(self, &cuda)?)?;
            }
            None => self.all_reduce(&mut Memory::new(self, operation, &data)?, op)?,
        }
        copy_home(self, operation, &data, tensor)
    }

    fn broadcast_tensor(&self, tensor: &mut Tensor, root: usize) -> Result<()> {
        let operation = "broadcast";
        let receives = self.rank() != root;
        check(self, operation, tensor, receives)?;
        let data = contiguous(tensor);
        match cuda_group(self, &data)? {
            Some(cuda) => {
                let memory = CudaTensor::new(&data).map_err(torch(self, operation))?;
                cuda.broadcast(&mut [memory], root, &current_stream(self, &cuda)?)?;
            }
            None => self.broadcast(&mut Memory::new(self, operation, &data)?, root)?,
        }
        if receives {
            copy_home(self, operation, &data, tensor)?;
        }
        Ok(())
    }

    fn all_gather_tensor(&self, tensor: &Tensor) -> Result<Tensor> {
        let operation = "all_gather";
        check(self, operation, tensor, false)?;
        let tensor = contiguous(tensor);
        let shape: Vec<i64> =
            std::iter::once(self.world_size() as i64).chain(tensor.size()).collect();
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
    let chosen =
        group.cuda_device().filter(|device| flow_autograd::torch_device(device) == tensor.device());
    match (chosen, tensor.device()) {
        (Some(device), _) => Ok(Some(group.nccl(device.ordinal())?)),
        (None, Device::Cuda(ordinal)) => Ok(Some(group.nccl(ordinal)?)),
        _ => Ok(None),
    }
}

/// libtorch's stream on the group's GPU.
pub(crate) fn current_stream(
    group: &ProcessGroup,
    cuda: &CudaGroup,
) -> Result<flow_comm::nccl::Stream> {
    flow_autograd::current_stream(cuda.device()).map_err(torch(group, "finding libtorch's stream"))
}

pub(crate) fn torch(
    group: &ProcessGroup,
    operation: &'static str,
) -> impl Fn(flow_autograd::Error) -> Error {
    let rank = job_rank(group);
    move |error| Error::Torch { rank, operation, reason: error.to_string() }
}

/// Whether a tensor can be sent and, if `written`, a result be written to it.
fn check(
    group: &ProcessGroup,
    operation: &'static str,
    tensor: &Tensor,
    written: bool,
) -> Result<()> {
    let fail = |reason: String| Err(Error::Torch { rank: job_rank(group), operation, reason });
    if let Some(reason) = flow_autograd::unsendable(tensor) {
        return fail(format!("the tensor {reason}"));
    }
    if flow_autograd::dtype(tensor.kind()).is_none() {
        return fail(format!(
            "the tensor is {:?}: make it Float, Double, Half, BFloat16, Int, Int64 or Uint8",
            tensor.kind()
        ));
    }
    if written && overlaps(tensor) {
        return fail(format!("no result can be written to the tensor, as it {OVERLAPS}"));
    }
    Ok(())
}

/// The tensor itself, without its history, or a contiguous copy of it.
pub(crate) fn contiguous(tensor: &Tensor) -> Tensor {
    let tensor = tensor.detach();
    match tensor.is_neg() || tensor.is_conj() {
        true => tensor.resolve_conj().resolve_neg().contiguous(),
        false => tensor.contiguous(),
    }
}

/// Writes what [`contiguous`] gave back to the tensor, unless it is the tensor itself.
pub(crate) fn copy_home(
    group: &ProcessGroup,
    operation: &'static str,
    contiguous: &Tensor,
    tensor: &mut Tensor,
) -> Result<()> {
    if flow_autograd::data_ptr(contiguous) == flow_autograd::data_ptr(tensor) {
        return Ok(());
    }
    let fail = |error: TchError| Error::Torch {
        rank: job_rank(group),
        operation,
        reason: error.to_string(),
    };
    tch::no_grad(|| tensor.f_copy_(contiguous)).map(drop).map_err(fail)
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
