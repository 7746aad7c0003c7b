//! Moves many tensors into one flat buffer and back, each way by one kernel.

use std::ffi::c_void;
use std::ops::Range;
use std::ptr::{from_ref, null_mut};
use std::sync::Arc;

use cudarc::driver::sys::{self, CUfunction};

use super::compile::compile;
use super::device::Device;
use super::error::{Error, Result, check};
use super::kernel_cache::Kernels;
use super::layout::{Chunk, FlatLayout, TENSORS_PER_LAUNCH};
use super::memory::{DeviceBuffer, DeviceMemory};
use super::stream::Stream;
use crate::types::DType;

/// Threads of a block: with 8 blocks on each processor of the GPU all of its threads are used.
const THREADS: u32 = 256;

/// Moves a fixed set of tensors between their own memory and a flat buffer, changing the type on
/// the way.
///
/// | from \ to | `f32` | `f64` | `f16`, `bf16` |
/// |---|---|---|---|
/// | `f32`, `f16`, `bf16` | in `f32` | in `f32`, then widened | in `f32`, rounded once |
/// | `f64` | in `f64`, rounded once | in `f64` | in `f64`, rounded to `f32` and then again |
///
/// "In" is where [`pack`](Packer::pack) multiplies. Rounding is to nearest, ties to even; NaN stays
/// NaN.
#[derive(Debug)]
pub struct Packer {
    device: Arc<Device>,
    tensors: DType,
    layout: FlatLayout,
    kernels: Kernels,
    /// The chunks of all launches.
    chunks: DeviceMemory,
    launches: Vec<DeviceLaunch>,
}

/// The tensors and the chunks of the device that a launch moves.
#[derive(Debug)]
struct DeviceLaunch {
    tensors: Range<usize>,
    chunks: Range<usize>,
}

// SAFETY: the kernels' handles may be used from any thread; nothing changes once the packer is
// made.
unsafe impl Send for Packer {}
// SAFETY: as above.
unsafe impl Sync for Packer {}

impl Packer {
    /// Prepares to move tensors of `lengths` elements of type `tensors` to and from a buffer of
    /// type `flat`. Compiles the kernels if need be (a second or so; kept in the user's cache), and
    /// waits for the device.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] if a type is not a floating-point one, [`Error::NoCompiler`],
    /// [`Error::Compile`], [`Error::Driver`].
    pub fn new(
        device: &Arc<Device>,
        tensors: DType,
        flat: DType,
        lengths: &[usize],
    ) -> Result<Packer> {
        let layout = FlatLayout::new(lengths, flat)?;
        let kernels = device.kernels.get(tensors, flat, || {
            let image = compile(tensors, flat, device.architecture())?;
            device.bind()?;
            Ok(image)
        })?;
        let mut content = Vec::new();
        let mut launches = Vec::new();
        let mut start = 0;
        for launch in layout.launches().filter(|launch| !launch.chunks.is_empty()) {
            let end = start + launch.chunks.len();
            content.extend(launch.chunks.iter().flat_map(bytes_of));
            launches.push(DeviceLaunch { tensors: launch.tensors, chunks: start..end });
            start = end;
        }
        let chunks = DeviceMemory::allocate(device, content.len())?;
        chunks.write(&content)?;
        Ok(Packer { device: device.clone(), tensors, layout, kernels, chunks, launches })
    }

    /// Returns where the tensors lie in the flat buffer.
    pub fn layout(&self) -> &FlatLayout {
        &self.layout
    }

    /// Enqueues `flat[place of t + i] = scale * tensors[t][i]` for all tensors and their elements.
    /// A tensor may already lie in its own place in `flat`, if the type is the same, and must not
    /// overlap `flat` otherwise. The memory between the places is not touched.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] if the number, types or lengths are not those given to [`Packer::new`]
    /// (`flat` may be longer) or the stream is another device's, [`Error::Driver`].
    pub fn pack(
        &self,
        tensors: &[impl DeviceBuffer],
        flat: &mut impl DeviceBuffer,
        scale: f64,
        stream: &Stream,
    ) -> Result<()> {
        let single = scale as f32;
        let scale = if self.tensors == DType::F64 {
            from_ref(&scale).cast()
        } else {
            from_ref(&single).cast()
        };
        self.launch(self.kernels.pack, tensors, flat, scale, stream)
    }

    /// Enqueues `tensors[t][i] = flat[place of t + i]` for all tensors and their elements. What
    /// holds for [`pack`](Packer::pack) holds here.
    ///
    /// # Errors
    ///
    /// Those of [`pack`](Packer::pack).
    pub fn unpack(
        &self,
        flat: &impl DeviceBuffer,
        tensors: &mut [impl DeviceBuffer],
        stream: &Stream,
    ) -> Result<()> {
        self.launch(self.kernels.unpack, tensors, flat, null_mut(), stream)
    }

    /// Launches a kernel; `scale` points to its last argument, and is not read by kernels that have
    /// none.
    fn launch(
        &self,
        kernel: CUfunction,
        tensors: &[impl DeviceBuffer],
        flat: &impl DeviceBuffer,
        scale: *const c_void,
        stream: &Stream,
    ) -> Result<()> {
        self.check(tensors, flat, stream)?;
        self.device.bind()?;
        let flat = flat.address();
        for launch in &self.launches {
            let chunks = self.chunks.address() + (launch.chunks.start * size_of::<Chunk>()) as u64;
            let mut addresses = [0u64; TENSORS_PER_LAUNCH];
            for (address, tensor) in addresses.iter_mut().zip(&tensors[launch.tensors.clone()]) {
                *address = tensor.address();
            }
            let arguments = [
                from_ref(&chunks).cast(),
                from_ref(&addresses).cast(),
                from_ref(&flat).cast(),
                scale,
            ];
            let blocks = launch.chunks.len() as u32;
            // SAFETY: the arguments have the types of the kernel's parameters and are copied by the
            // call. The chunks lie within the tensors and the buffer, whose lengths `check`
            // compared; all of that memory stays allocated until the kernel is done, by
            // `DeviceBuffer`'s contract and because `DeviceMemory` is freed only after all work.
            check("start a kernel", unsafe {
                sys::cuLaunchKernel(
                    kernel,
                    blocks,
                    1,
                    1,
                    THREADS,
                    1,
                    1,
                    0,
                    stream.handle().cast(),
                    arguments.as_ptr().cast_mut().cast(),
                    null_mut(),
                )
            })?;
        }
        Ok(())
    }

    fn check(
        &self,
        tensors: &[impl DeviceBuffer],
        flat: &impl DeviceBuffer,
        stream: &Stream,
    ) -> Result<()> {
        if !Arc::ptr_eq(stream.device(), &self.device) {
            return wrong(format!(
                "the stream is on {:?}, the kernels on {:?}",
                stream.device(),
                self.device
            ));
        }
        if tensors.len() != self.layout.lengths().len() {
            return wrong(format!(
                "got {} tensors instead of {}",
                tensors.len(),
                self.layout.lengths().len()
            ));
        }
        for (i, (tensor, length)) in tensors.iter().zip(self.layout.lengths()).enumerate() {
            let bytes = length * self.tensors.size();
            if tensor.dtype() != self.tensors || tensor.bytes() != bytes {
                return wrong(format!(
                    "tensor {i} has {} bytes of {} instead of {bytes} of {}",
                    tensor.bytes(),
                    tensor.dtype(),
                    self.tensors
                ));
            }
        }
        if flat.dtype() != self.layout.flat() || flat.bytes() < self.layout.bytes() {
            return wrong(format!(
                "the buffer has {} bytes of {} instead of {} of {}",
                flat.bytes(),
                flat.dtype(),
                self.layout.bytes(),
                self.layout.flat()
            ));
        }
        Ok(())
    }
}

/// Returns the error of arguments that do not fit.
fn wrong(what: String) -> Result<()> {
    Err(Error::Argument(format!("cannot move tensors to or from a flat buffer: {what}")))
}

/// Returns a chunk as the device reads it.
fn bytes_of(chunk: &Chunk) -> [u8; size_of::<Chunk>()] {
    let mut bytes = [0; size_of::<Chunk>()];
    bytes[..8].copy_from_slice(&chunk.flat_start.to_ne_bytes());
    bytes[8..16].copy_from_slice(&chunk.tensor_start.to_ne_bytes());
    bytes[16..20].copy_from_slice(&chunk.length.to_ne_bytes());
    bytes[20..].copy_from_slice(&chunk.tensor.to_ne_bytes());
    bytes
}
