//! Devices.

use std::ffi::{CStr, c_char, c_int};
use std::fmt;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use cudarc::driver::sys::{self, CUcontext, CUdevice, CUdevice_attribute, CUresult};

use super::error::{Error, Result, check, check_release};
use super::kernel_cache::KernelCache;
use super::library::load_driver;

/// A GPU, through its primary context: the one that libtorch uses. Memory and streams may be passed
/// between the two.
pub struct Device {
    ordinal: usize,
    name: String,
    architecture: u32,
    handle: CUdevice,
    context: CUcontext,
    pub(super) kernels: KernelCache,
}

// SAFETY: the driver's functions may be called from any thread, and a context may be current in
// many.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl Device {
    /// Returns the number of GPUs that this process sees.
    ///
    /// # Errors
    ///
    /// [`Error::NoDriver`] without a driver, [`Error::Driver`] when it does not work.
    pub fn count() -> Result<usize> {
        load_driver()?;
        // SAFETY: the driver is loaded.
        match unsafe { sys::cuInit(0) } {
            CUresult::CUDA_ERROR_NO_DEVICE => return Ok(0),
            result => check("start its driver", result)?,
        }
        let mut count: c_int = 0;
        // SAFETY: the driver is initialized, and `count` is there to be written.
        match unsafe { sys::cuDeviceGetCount(&mut count) } {
            CUresult::CUDA_ERROR_NO_DEVICE => Ok(0),
            result => check("count the GPUs", result).map(|()| usize::try_from(count).unwrap_or(0)),
        }
    }

    /// Opens the GPU with this number, counted among those that `CUDA_VISIBLE_DEVICES` leaves. All
    /// callers share one value.
    ///
    /// # Errors
    ///
    /// Those of [`Device::count`]; [`Error::Argument`] where there is no such GPU.
    pub fn open(ordinal: usize) -> Result<Arc<Device>> {
        static OPEN: Mutex<Vec<(usize, Weak<Device>)>> = Mutex::new(Vec::new());
        let count = Device::count()?;
        if ordinal >= count {
            return Err(Error::Argument(format!(
                "there is no GPU {ordinal}: this process sees {count}, counted from 0"
            )));
        }
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        let shared = open
            .iter()
            .find(|(number, _)| *number == ordinal)
            .and_then(|(_, device)| device.upgrade());
        if let Some(device) = shared {
            return Ok(device);
        }
        let device = Arc::new(Device::retain(ordinal)?);
        open.retain(|(number, _)| *number != ordinal);
        open.push((ordinal, Arc::downgrade(&device)));
        Ok(device)
    }

    /// Retains the primary context of GPU `ordinal`, which exists.
    fn retain(ordinal: usize) -> Result<Device> {
        let mut handle = 0;
        let mut context = null_mut();
        let mut name = [0 as c_char; 256];
        // SAFETY: the driver is initialized; what is written is there to be written, and `name` is
        // as long as said.
        unsafe {
            check("find the GPU", sys::cuDeviceGet(&mut handle, ordinal as c_int))?;
            check(
                "read the GPU's name",
                sys::cuDeviceGetName(name.as_mut_ptr(), name.len() as c_int - 1, handle),
            )?;
        }
        let mut architecture = [0; 2];
        for (value, attribute) in architecture.iter_mut().zip([
            CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        ]) {
            // SAFETY: as above.
            check("read the GPU's architecture", unsafe {
                sys::cuDeviceGetAttribute(value, attribute, handle)
            })?;
        }
        let [major, minor] = architecture.map(c_int::unsigned_abs);
        // SAFETY: as above; `name` ends with a zero, which the driver could not overwrite.
        let name = unsafe {
            check("open the GPU", sys::cuDevicePrimaryCtxRetain(&mut context, handle))?;
            CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned()
        };
        Ok(Device {
            ordinal,
            name,
            architecture: 10 * major + minor,
            handle,
            context,
            kernels: KernelCache::default(),
        })
    }

    /// Returns the GPU's number.
    pub fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// Returns the GPU's name, for messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the compute capability as one number: 90 for `sm_90`.
    pub fn architecture(&self) -> u32 {
        self.architecture
    }

    /// Makes this the calling thread's device, for libraries that work on that; our own operations
    /// do it themselves.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`].
    pub fn make_current(&self) -> Result<()> {
        self.bind()
    }

    /// Waits until all work that was enqueued on the device is done.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`], also when earlier work of this process failed on the GPU.
    pub fn synchronize(&self) -> Result<()> {
        self.bind()?;
        // SAFETY: the context is current.
        check("finish the GPU's work", unsafe { sys::cuCtxSynchronize() })
    }

    /// Makes the device the thread's: every operation begins with this, and later ones find it
    /// done.
    pub(super) fn bind(&self) -> Result<()> {
        let mut current = null_mut();
        // SAFETY: the driver is initialized, and the context is retained.
        unsafe {
            check("find the thread's GPU", sys::cuCtxGetCurrent(&mut current))?;
            if current != self.context {
                check("choose the thread's GPU", sys::cuCtxSetCurrent(self.context))?;
            }
        }
        Ok(())
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if self.bind().is_ok() {
            self.kernels.unload();
        }
        // SAFETY: it was retained once, and everything that needs it holds an `Arc<Device>`.
        check_release("close the GPU", unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.handle) });
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cuda:{} ({}, sm_{})", self.ordinal, self.name, self.architecture)
    }
}
