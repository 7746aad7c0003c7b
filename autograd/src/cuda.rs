//! CUDA tensors and streams, as NCCL and CUDA kernels know them.
//!
//! The program is linked with the CPU part of libtorch only; the CUDA part is loaded when it is
//! asked for.

use std::sync::{Arc, OnceLock};

use flow_kernels::DType;
use flow_kernels::cuda::{Device, DeviceBuffer, Stream};
use tch::{Cuda, Kind, Tensor};

use crate::Error;
use crate::ffi;
use crate::memory::{check_fit, memory, tensor_from_raw};

/// Feature `test-fakes` only: tensors are on the CPU, and a fake driver, whose device memory is
/// host memory, treats them as tensors on a GPU. Its default stream is the calling thread.
fn host_as_gpu() -> bool {
    static HOST_AS_GPU: OnceLock<bool> = OnceLock::new();
    *HOST_AS_GPU.get_or_init(|| {
        cfg!(feature = "test-fakes")
            && std::env::var_os("FLOW_TEST_HOST_AS_GPU").is_some_and(|value| value == "1")
    })
}

/// Returns libtorch's name of the device.
pub fn torch_device(device: &Device) -> tch::Device {
    if host_as_gpu() { tch::Device::Cpu } else { tch::Device::Cuda(device.ordinal()) }
}

/// Loads the CUDA part of libtorch unless it is loaded already. Call this before any other use of
/// tensors: libtorch decides only once whether it has CUDA, the first time that matters.
///
/// # Errors
///
/// libtorch is one without CUDA, its libraries do not load, or it has decided already.
pub fn load_cuda() -> Result<(), Error> {
    if host_as_gpu() {
        return Ok(());
    }
    // SAFETY: there are no arguments; constructors of libtorch's own library run.
    unsafe { ffi::check("load_cuda", ffi::flow_load_cuda()) }.map_err(|error| {
        Error::NoCuda(format!(
            "{error}; scripts/setup --cuda gets a libtorch with CUDA, or set LIBTORCH to one"
        ))
    })?;
    let found = Device::count().map_err(|error| Error::NoCuda(error.to_string()))?;
    let seen = Cuda::device_count();
    if found > 0 && seen <= 0 {
        return Err(Error::NoCuda(format!(
            "the driver has {found} GPUs and libtorch none: choose the device before any other \
             use of tch, and see that the driver is new enough for this libtorch"
        )));
    }
    Ok(())
}

/// Returns the stream on which libtorch, called by this thread, works on `device` at present.
///
/// # Errors
///
/// The CUDA part of libtorch is not loaded.
pub fn current_stream(device: &Arc<Device>) -> Result<Stream, Error> {
    let mut handle = std::ptr::null_mut();
    if !host_as_gpu() {
        // SAFETY: `handle` is writable.
        unsafe {
            ffi::check(
                "current_stream",
                ffi::flow_current_stream(device.ordinal() as i32, &mut handle),
            )?
        };
    }
    // SAFETY: libtorch's streams, on the primary context as `device` is, are never destroyed.
    Ok(unsafe { Stream::borrowed(device, handle) })
}

/// A contiguous CUDA tensor as a buffer of collectives and kernels.
#[derive(Debug)]
pub struct CudaTensor {
    tensor: Tensor,
    address: u64,
    bytes: usize,
    dtype: DType,
}

impl CudaTensor {
    /// Shares the tensor's memory. As with CPU tensors, nobody may use it through another tensor
    /// while an operation works on it. The order of the stream that the operation was given counts.
    ///
    /// # Errors
    ///
    /// The tensor is not on a GPU, not contiguous, or of a kind that collectives do not know.
    pub fn new(tensor: &Tensor) -> Result<Self, Error> {
        let kind = tensor.kind();
        let Some(dtype) = crate::dtype(kind) else {
            return Err(Error::UnfitMemory(format!("tensors of {kind:?} cannot be sent")));
        };
        Ok(Self { dtype, ..Self::as_bytes(tensor)? })
    }

    /// Shares the tensor as a buffer of bytes, of whatever kind it is: see [`CudaTensor::new`].
    ///
    /// # Errors
    ///
    /// The tensor is not on a GPU, or not contiguous.
    pub fn as_bytes(tensor: &Tensor) -> Result<Self, Error> {
        let memory = memory(tensor);
        if !(memory.on_cuda || host_as_gpu()) || !memory.dense_contiguous {
            return Err(Error::UnfitMemory(format!(
                "a tensor on {:?} of shape {:?} is not contiguous memory of a GPU",
                tensor.device(),
                tensor.size()
            )));
        }
        Ok(Self {
            tensor: tensor.shallow_clone(),
            address: memory.data.map_or(0, |data| data.as_ptr() as u64),
            bytes: memory.bytes,
            dtype: DType::U8,
        })
    }

    /// Returns the tensor itself.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }
}

// SAFETY: a contiguous CUDA tensor's memory is `bytes` from `address`; the tensor keeps it, and
// libtorch's allocator hands it out again in the order of the stream that it was allocated for.
unsafe impl DeviceBuffer for CudaTensor {
    fn address(&self) -> u64 {
        self.address
    }

    fn bytes(&self) -> usize {
        self.bytes
    }

    fn dtype(&self) -> DType {
        self.dtype
    }
}

/// Returns a contiguous tensor in device memory, which is dropped when the last tensor that uses it
/// is gone.
///
/// # Errors
///
/// The memory is too small for the shape, or not aligned for the kind.
pub fn tensor_from_device_memory(
    device: &Device,
    memory: impl DeviceBuffer + Send + 'static,
    shape: &[i64],
    kind: Kind,
) -> Result<Tensor, Error> {
    check_fit(memory.address() as usize, memory.bytes(), shape, kind)?;
    let data = memory.address() as *mut u8;
    // SAFETY: there is room for the shape on the device, and the owner keeps it.
    unsafe { tensor_from_raw(data, shape, kind, torch_device(device), memory) }
}
