//! Tensors as the memory of collectives.

use std::sync::Arc;

use flow_autograd::CudaTensor;
use flow_comm::nccl::{CudaGroup, Stream};
use flow_comm::{Buffer, DType, ProcessGroup};
use tch::{Device, Kind, Tensor};

use crate::error::{Result, failed, torch_failed};

/// The reason that errors give for a tensor that [`overlaps`].
pub const OVERLAPS: &str =
    "has elements that share memory, as expand() makes them: use contiguous()";

/// Returns whether several of the tensor's elements may lie in the same place, so that it cannot be
/// written to.
pub fn overlaps(tensor: &Tensor) -> bool {
    !tensor.is_contiguous() && may_overlap(&tensor.size(), &tensor.stride())
}

/// Returns whether a step along some dimension stays within what the dimensions of smaller steps
/// reach.
fn may_overlap(shape: &[i64], strides: &[i64]) -> bool {
    let mut steps: Vec<(i64, i64)> = strides
        .iter()
        .zip(shape)
        .filter(|&(_, &length)| length != 1)
        .map(|(&stride, &length)| (stride, length))
        .collect();
    steps.sort_unstable();
    if shape.contains(&0) {
        return false;
    }
    let mut reach = 0;
    for (stride, length) in steps {
        if stride <= reach {
            return true;
        }
        reach += stride * (length - 1);
    }
    false
}

/// Returns the group's collectives on the tensor's GPU; None for a tensor that is not on one.
///
/// # Errors
///
/// The group's GPUs, or NCCL, cannot be used.
pub fn cuda_group(group: &ProcessGroup, tensor: &Tensor) -> Result<Option<Arc<CudaGroup>>> {
    let chosen =
        group.cuda_device().filter(|device| flow_autograd::torch_device(device) == tensor.device());
    match (chosen, tensor.device()) {
        (Some(device), _) => Ok(Some(group.nccl(device.ordinal())?)),
        (None, Device::Cuda(ordinal)) => Ok(Some(group.nccl(ordinal)?)),
        _ => Ok(None),
    }
}

/// Returns libtorch's stream on the group's GPU.
///
/// # Errors
///
/// The CUDA part of libtorch is not loaded.
pub fn current_stream(group: &ProcessGroup, cuda: &CudaGroup) -> Result<Stream> {
    let failed = failed(group, "finding libtorch's stream");
    flow_autograd::current_stream(cuda.device()).map_err(|error| failed(error.to_string()))
}

/// Returns the tensor itself, without its history, or a contiguous copy of it.
pub(crate) fn contiguous(tensor: &Tensor) -> Tensor {
    let tensor = tensor.detach();
    flow_autograd::resolved(&tensor).unwrap_or(tensor).contiguous()
}

/// Writes what [`contiguous`] returned back to the tensor, unless it is the tensor itself.
pub(crate) fn copy_back(
    group: &ProcessGroup,
    operation: &'static str,
    contiguous: &Tensor,
    tensor: &mut Tensor,
) -> Result<()> {
    if flow_autograd::data_ptr(contiguous) == flow_autograd::data_ptr(tensor) {
        return Ok(());
    }
    let copied = tch::no_grad(|| tensor.f_copy_(contiguous));
    copied.map(drop).map_err(torch_failed(group, operation))
}

/// Returns how many elements of a buffer an element of such a tensor is: one, or its bytes where
/// reductions do not know the kind.
pub(crate) fn units(kind: Kind) -> usize {
    flow_autograd::dtype(kind).map_or_else(|| kind.elt_size_in_bytes(), |_| 1)
}

/// A contiguous CPU tensor as a buffer. Kinds that reductions do not know are bytes.
pub struct HostTensor {
    tensor: Tensor,
    dtype: DType,
}

impl HostTensor {
    /// Makes a buffer of `tensor`, which is contiguous and on the CPU.
    pub fn new(tensor: &Tensor) -> Self {
        let dtype = flow_autograd::dtype(tensor.kind()).unwrap_or(DType::U8);
        Self { tensor: tensor.shallow_clone(), dtype }
    }
}

impl Buffer for HostTensor {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn bytes(&self) -> &[u8] {
        flow_autograd::bytes(&self.tensor).unwrap_or_default()
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        flow_autograd::bytes_mut(&mut self.tensor).unwrap_or_default()
    }
}

/// Makes a buffer of a contiguous CUDA tensor. Kinds that reductions do not know are bytes.
///
/// # Errors
/// The tensor is not contiguous, or not on a GPU.
pub fn cuda_tensor(tensor: &Tensor) -> Result<CudaTensor, flow_autograd::Error> {
    match flow_autograd::dtype(tensor.kind()) {
        Some(_) => CudaTensor::new(tensor),
        None => CudaTensor::as_bytes(tensor),
    }
}

/// Makes a buffer for `operation` of a contiguous CUDA tensor.
pub(crate) fn cuda_buffer(
    group: &ProcessGroup,
    operation: &'static str,
    tensor: &Tensor,
) -> Result<CudaTensor> {
    cuda_tensor(tensor).map_err(|error| failed(group, operation)(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_that_share_memory_are_found() {
        let cases: [(&[i64], &[i64], bool); 9] = [
            (&[], &[], false),
            (&[2, 3], &[3, 1], false),
            (&[3, 2], &[1, 3], false),
            (&[2, 3], &[8, 2], false), // with gaps
            (&[4, 1], &[1, 0], false), // one step of no width is none
            (&[0, 3], &[0, 0], false), // nothing at all
            (&[3], &[0], true),
            (&[2, 3], &[0, 1], true),
            (&[3, 2], &[1, 1], true), // windows that overlap
        ];
        for (shape, strides, expected) in cases {
            assert_eq!(may_overlap(shape, strides), expected, "{shape:?} {strides:?}");
        }
    }
}
