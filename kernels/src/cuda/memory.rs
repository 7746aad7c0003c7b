//! Memory on a GPU.

use std::sync::Arc;

use cudarc::driver::sys::{self, CUdeviceptr};

use super::device::Device;
use super::error::{Error, Result, check, check_release};
use super::stream::Stream;
use crate::types::DType;

/// Memory on a GPU that kernels may be given: a tensor's, or a part of a larger buffer.
///
/// # Safety
///
/// - `address` is that of `bytes` bytes of memory of one device, aligned to `dtype`'s size, or
///   `bytes` is 0.
/// - All three stay the same while the value lives.
/// - The memory stays allocated until the value is dropped. It then stays until everything is over
///   that was enqueued before the drop, on the stream in whose order the memory was handed out. So
///   it is with libtorch's caching allocator and `cuMemFree`. Work on another stream must be
///   ordered before that one's (an [`Event`](super::Event)) or before the drop.
pub unsafe trait DeviceBuffer {
    /// Returns where the memory begins on the device.
    fn address(&self) -> u64;

    /// Returns its length in bytes.
    fn bytes(&self) -> usize;

    /// Returns the type of its elements.
    fn dtype(&self) -> DType;
}

// SAFETY: it is the same memory, and the value behind the reference keeps the contract.
unsafe impl<T: DeviceBuffer + ?Sized> DeviceBuffer for &mut T {
    fn address(&self) -> u64 {
        (**self).address()
    }

    fn bytes(&self) -> usize {
        (**self).bytes()
    }

    fn dtype(&self) -> DType {
        (**self).dtype()
    }
}

/// Memory that we allocate ourselves, a buffer of bytes. Freeing it waits for the work of the whole
/// device.
#[derive(Debug)]
pub struct DeviceMemory {
    device: Arc<Device>,
    address: CUdeviceptr,
    bytes: usize,
}

impl DeviceMemory {
    /// Allocates memory of undefined content, aligned to 256 bytes at least.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`], mostly because memory is short.
    pub fn allocate(device: &Arc<Device>, bytes: usize) -> Result<DeviceMemory> {
        device.bind()?;
        let mut address = 0;
        // SAFETY: the context is current, and `address` is there to be written. The driver refuses
        // to allocate 0 bytes.
        check("allocate memory", unsafe { sys::cuMemAlloc_v2(&mut address, bytes.max(1)) })?;
        Ok(DeviceMemory { device: device.clone(), address, bytes })
    }

    /// Copies `content` to the beginning of the memory, and waits until it is there. Work on
    /// streams that uses the memory must be done before.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] if `content` is longer than the memory, [`Error::Driver`].
    pub fn write(&self, content: &[u8]) -> Result<()> {
        self.check_length(content.len())?;
        self.device.bind()?;
        // SAFETY: the memory is ours and long enough. The copy may return before the content has
        // left the driver's own buffer, but not before it is enqueued on the legacy default stream.
        unsafe {
            check(
                "copy to the GPU",
                sys::cuMemcpyHtoD_v2(self.address, content.as_ptr().cast(), content.len()),
            )?;
            check("copy to the GPU", sys::cuStreamSynchronize(std::ptr::null_mut()))
        }
    }

    /// Copies the beginning of the memory to `content`. Work on streams that writes the memory must
    /// be done before.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] if `content` is longer than the memory, [`Error::Driver`].
    pub fn read(&self, content: &mut [u8]) -> Result<()> {
        self.check_length(content.len())?;
        self.device.bind()?;
        // SAFETY: the memory is ours and long enough, and so is `content`.
        let result = unsafe {
            sys::cuMemcpyDtoH_v2(content.as_mut_ptr().cast(), self.address, content.len())
        };
        check("copy from the GPU", result)
    }

    /// Enqueues the writing of zeros to all of the memory.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`].
    pub fn fill_zero(&self, stream: &Stream) -> Result<()> {
        self.device.bind()?;
        // SAFETY: the memory is ours, and is freed only after all of the device's work.
        check("fill memory", unsafe {
            sys::cuMemsetD8Async(self.address, 0, self.bytes, stream.handle().cast())
        })
    }

    /// Enqueues a copy of `source` to the beginning of the memory, as long as the shorter of both.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`].
    pub fn copy_from(&self, source: &dyn DeviceBuffer, stream: &Stream) -> Result<()> {
        self.device.bind()?;
        let bytes = self.bytes.min(source.bytes());
        // SAFETY: both are long enough and stay until the copy is done: ours is freed only after
        // all of the device's work, the other by its contract.
        let result = unsafe {
            sys::cuMemcpyDtoDAsync_v2(self.address, source.address(), bytes, stream.handle().cast())
        };
        check("copy on the GPU", result)
    }

    fn check_length(&self, bytes: usize) -> Result<()> {
        if bytes > self.bytes {
            return Err(Error::Argument(format!(
                "{bytes} bytes cannot be copied: the GPU's memory has {}",
                self.bytes
            )));
        }
        Ok(())
    }
}

// SAFETY: the memory is this value's, of bytes, and freed when the device has done all its work.
unsafe impl DeviceBuffer for DeviceMemory {
    fn address(&self) -> u64 {
        self.address
    }

    fn bytes(&self) -> usize {
        self.bytes
    }

    fn dtype(&self) -> DType {
        DType::U8
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: it is ours; the driver waits for the work that uses it.
            check_release("free memory", unsafe { sys::cuMemFree_v2(self.address) });
        }
    }
}
