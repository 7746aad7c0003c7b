//! CUDA devices, and the kernels that gather gradients into one flat buffer and spread them again.
//!
//! | type | is |
//! |---|---|
//! | [`Device`] | a GPU's primary context, which libtorch uses too |
//! | [`Stream`], [`Event`] | a queue of the GPU's work, and a mark in it |
//! | [`DeviceBuffer`], [`DeviceMemory`] | somebody's memory on the GPU, and our own |
//! | [`mapped_files`], [`nvidia_wheels`] | libraries of this process, and where to find NVIDIA's |
//! | [`FlatLayout`], [`Packer`] | places of tensors in the flat buffer, and kernels that move them |
//!
//! Nothing of CUDA is linked. The driver (`libcuda.so.1`) is opened when a device is asked for.
//! NVIDIA's run-time compiler (`libnvrtc.so`) is opened when a kernel is first needed. Where one is
//! missing, the [`Error`] says what to install.

mod cache;
mod compile;
mod device;
mod error;
mod kernel_cache;
mod layout;
mod library;
mod mapped;
mod memory;
mod pack;
mod stream;

pub use compile::compile;
pub use device::Device;
pub use error::{Error, Result};
pub use layout::{Chunk, FlatLayout, Launch, TENSORS_PER_LAUNCH};
pub use mapped::{MappedFile, mapped_files, nvidia_wheels};
pub use memory::{DeviceBuffer, DeviceMemory};
pub use pack::Packer;
pub use stream::{Event, Stream};
