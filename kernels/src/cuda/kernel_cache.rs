//! The kernels that a device has loaded.

use std::collections::HashMap;
use std::ffi::CString;
use std::ptr::null_mut;
use std::sync::{Mutex, PoisonError};

use cudarc::driver::sys::{self, CUfunction, CUmodule};

use super::compile::kernel_name;
use super::error::{Result, check, check_release};
use crate::types::DType;

/// Loaded kernels, by the types of the tensors and of the flat buffer.
#[derive(Default)]
pub(super) struct KernelCache(Mutex<HashMap<(DType, DType), Kernels>>);

/// The loaded kernels for one pair of types.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kernels {
    module: CUmodule,
    pub pack: CUfunction,
    pub unpack: CUfunction,
}

// SAFETY: the driver's handles may be used from any thread.
unsafe impl Send for Kernels {}

impl KernelCache {
    /// Returns the kernels for tensors of type `tensors` and a buffer of type `flat`. At the first
    /// call for these types, `image` compiles them, and makes the device's context current.
    pub fn get(
        &self,
        tensors: DType,
        flat: DType,
        image: impl FnOnce() -> Result<Vec<u8>>,
    ) -> Result<Kernels> {
        let mut loaded = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernels) = loaded.get(&(tensors, flat)) {
            return Ok(*kernels);
        }
        let kernels = Kernels::load(&image()?, tensors, flat)?;
        loaded.insert((tensors, flat), kernels);
        Ok(kernels)
    }

    /// Unloads all kernels, for the device's `Drop`. The device's context is current, and nobody
    /// uses the kernels any more.
    pub fn unload(&mut self) {
        for (_, kernels) in self.0.get_mut().unwrap_or_else(PoisonError::into_inner).drain() {
            // SAFETY: nobody uses the kernels any more: every packer holds the device.
            check_release("unload a kernel", unsafe { sys::cuModuleUnload(kernels.module) });
        }
    }
}

impl Kernels {
    fn load(image: &[u8], tensors: DType, flat: DType) -> Result<Kernels> {
        let mut module = null_mut();
        let mut pack = null_mut();
        let mut unpack = null_mut();
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
        Ok(Kernels { module, pack, unpack })
    }
}
