//! Moves many tensors into one flat buffer and back, each way by one kernel.

use std::collections::HashMap;
use std::ffi::{c_void, CString};
use std::ops::Range;
use std::ptr::{from_ref, null_mut};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{self, CUfunction, CUmodule};

use super::compile::{compile, kernel_name};
use super::device::Device;
use super::error::{check, check_release, Error, Result};
use super::layout::{Layout, Piece, TENSORS_PER_LAUNCH};
use super::memory::{DeviceBuffer, Memory};
use super::stream::Stream;
use crate::types::DType;

/// Threads of a block: with 8 blocks on each processor of the GPU all of its threads are used.
const THREADS: u32 = 256;

/// The kernels that a device has loaded, by the types of the tensors and of the flat buffer.
pub(super) type KernelCache = Mutex<HashMap<(DType, DType), Kernels>>;

/// The loaded kernels for one pair of types.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kernels {
    module: CUmodule,
    pack: CUfunction,
    unpack: CUfunction,
}

impl Kernels {
    /// The kernels for tensors of type `tensors` and a buffer of type `flat`; compiled when
    /// `device` first needs them.
    fn of(device: &Device, tensors: DType, flat: DType) -> Result<Kernels> {
        let mut loaded = device.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernels) = loaded.get(&(tensors, flat)) {
            return Ok(*kernels);
        }
        let image = compile(tensors, flat, device.architecture())?;
        device.bind()?;
        let (mut module, mut pack, mut unpack) = (null_mut(), null_mut(), null_mut());
        // SAFETY: the context is current; the image is a whole cubin, or PTX with a zero at its
        // end.
        check("load a kernel", unsafe {
            sys::cuModuleLoadData(&mut module, image.as_ptr().cast())
        })?;
        for (function, name) in [
            (&mut pack, kernel_name("pack", tensors, flat)),
            (&mut unpack, kernel_name("unpack", flat, tensors)),
        ] {
            let name = CString::new(name).unwrap_or_default();
            // SAFETY: the module is loaded, and `function` is there to be written.
            check("find a kernel", unsafe {
                sys::cuModuleGetFunction(function, module, name.as_ptr())
            })?;
        }
        let kernels = Kernels { module, pack, unpack };
        loaded.insert((tensors, flat), kernels);
        Ok(kernels)
    }

    /// For the device's `Drop`, with its context current.
    pub(super) fn unload(&self) {
        // SAFETY: nobody uses the kernels any more: every packer holds the device.
        check_release("unload a kernel", unsafe { sys::cuModuleUnload(self.module) });
    }
}

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
    layout: Layout,
    kernels: Kernels,
    /// The pieces of all launches.
    pieces: Memory,
    launches: Vec<Launch>,
}

/// Which tensors, and which of the device's pieces.
#[derive(Debug)]
struct Launch {
    tensors: Range<usize>,
    pieces: Range<usize>,
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
        let layout = Layout::new(lengths, flat)?;
        let kernels = Kernels::of(device, tensors, flat)?;
        let (mut content, mut launches, mut start) = (Vec::new(), Vec::new(), 0);
        for launch in layout.launches().filter(|launch| !launch.pieces.is_empty()) {
            let end = start + launch.pieces.len();
            content.extend(launch.pieces.iter().flat_map(bytes_of));
            launches.push(Launch { tensors: launch.tensors, pieces: start..end });
            start = end;
        }
        let pieces = Memory::allocate(device, content.len())?;
        pieces.write(&content)?;
        Ok(Packer { device: device.clone(), tensors, layout, kernels, pieces, launches })
    }

    /// Where the tensors lie in the flat buffer.
    pub fn layout(&self) -> &Layout {
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

    /// `scale` points to the kernel's last argument, and is not read by kernels that have none.
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
            let pieces = self.pieces.address() + (launch.pieces.start * size_of::<Piece>()) as u64;
            let mut addresses = [0u64; TENSORS_PER_LAUNCH];
            for (address, tensor) in addresses.iter_mut().zip(&tensors[launch.tensors.clone()]) {
                *address = tensor.address();
            }
            let arguments = [
                from_ref(&pieces).cast(),
                from_ref(&addresses).cast(),
                from_ref(&flat).cast(),
                scale,
            ];
            let blocks = launch.pieces.len() as u32;
            // SAFETY: the arguments have the types of the kernel's parameters and are copied by the
            // call. The pieces lie within the tensors and the buffer, whose lengths `check`
            // compared; all of that memory stays allocated until the kernel is done, by
            // `DeviceBuffer`'s contract and because `Memory` is freed only after all work.
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
        let wrong = |what: String| {
            Err(Error::Argument(format!("cannot move tensors to or from a flat buffer: {what}")))
        };
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
                let (dtype, got) = (tensor.dtype(), tensor.bytes());
                return wrong(format!(
                    "tensor {i} has {got} bytes of {dtype} instead of {bytes} of {}",
                    self.tensors
                ));
            }
        }
        if flat.dtype() != self.layout.flat() || flat.bytes() < self.layout.bytes() {
            let (dtype, got, bytes) = (flat.dtype(), flat.bytes(), self.layout.bytes());
            return wrong(format!(
                "the buffer has {got} bytes of {dtype} instead of {bytes} of {}",
                self.layout.flat()
            ));
        }
        Ok(())
    }
}

/// A piece as the device reads it.
fn bytes_of(piece: &Piece) -> [u8; size_of::<Piece>()] {
    let mut bytes = [0; size_of::<Piece>()];
    bytes[..8].copy_from_slice(&piece.flat_start.to_ne_bytes());
    bytes[8..16].copy_from_slice(&piece.tensor_start.to_ne_bytes());
    bytes[16..20].copy_from_slice(&piece.length.to_ne_bytes());
    bytes[20..].copy_from_slice(&piece.tensor.to_ne_bytes());
    bytes
}
