//! Finds the driver and the run-time compiler, and makes sure before the first call that they have
//! all that we use.

use std::env;
use std::error::Error as _;
use std::ffi::{c_char, c_int, c_void};
use std::fs;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use cudarc::driver::sys;
use libloading::Library;

use super::error::{Error, Result};
use super::mapped::nvidia_wheels;

/// Every function of the driver that this crate calls: `cudarc` panics at the first call of one
/// that is missing.
const DRIVER_FUNCTIONS: &[&str] = &[
    "cuCtxGetCurrent",
    "cuCtxGetStreamPriorityRange",
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventElapsedTime",
    "cuEventQuery",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuInit",
    "cuLaunchKernel",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyDtoH_v2",
    "cuMemcpyHtoD_v2",
    "cuMemsetD8Async",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
];

/// Makes sure that the driver's functions can be called. Looks once per process.
///
/// # Errors
///
/// [`Error::NoDriver`].
pub(super) fn load_driver() -> Result<()> {
    static FOUND: OnceLock<Result<()>> = OnceLock::new();
    FOUND.get_or_init(find_driver).clone()
}

fn find_driver() -> Result<()> {
    // SAFETY: the driver's library may be loaded at any time.
    if !unsafe { sys::is_culib_present() } {
        return Err(Error::NoDriver { reason: "libcuda.so.1 is not found".into() });
    }
    // SAFETY: as above, and it is there, without which this would panic.
    let library = unsafe { sys::culib() };
    for name in DRIVER_FUNCTIONS {
        // SAFETY: the symbol is only looked up, as an address.
        if unsafe { library.get::<*const c_void>(name.as_bytes()) }.is_err() {
            return Err(Error::NoDriver {
                reason: format!("libcuda.so.1 is too old and lacks {name}"),
            });
        }
    }
    Ok(())
}

/// Calls `cuEventElapsedTime`, which every driver has; `cudarc` only knows its second version,
/// which drivers before CUDA 12.8 lack.
///
/// # Errors
///
/// [`Error::NoDriver`].
pub(super) fn elapsed_time()
-> Result<unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> sys::CUresult> {
    load_driver()?;
    // SAFETY: the library is there, and this is the function's signature.
    let function = unsafe { sys::culib().get(b"cuEventElapsedTime") };
    function
        .map(|function| *function)
        .map_err(|error| Error::NoDriver { reason: error.to_string() })
}

/// Declares the functions of NVRTC that this crate calls, and how they are looked up.
macro_rules! nvrtc {
    ($($function:ident: $signature:ty,)*) => {
        /// NVIDIA's run-time compiler. Not by `cudarc`, which would take whatever `libnvrtc.so` it
        /// finds first.
        #[allow(non_snake_case)]
        pub(super) struct Nvrtc { $(pub(super) $function: $signature,)* }

        impl Nvrtc {
            /// # Safety
            ///
            /// The library must be NVRTC, and must never be unloaded.
            unsafe fn from(library: &Library) -> std::result::Result<Self, libloading::Error> {
                // SAFETY: the caller's promise; the signatures are those of NVRTC's documentation.
                unsafe {
                    Ok(Nvrtc { $($function: *library.get(stringify!($function).as_bytes())?,)* })
                }
            }
        }
    };
}

/// A program of NVRTC's.
pub(super) type Program = *mut c_void;

nvrtc! {
    nvrtcVersion: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int,
    nvrtcGetErrorString: unsafe extern "C" fn(c_int) -> *const c_char,
    nvrtcGetNumSupportedArchs: unsafe extern "C" fn(*mut c_int) -> c_int,
    nvrtcGetSupportedArchs: unsafe extern "C" fn(*mut c_int) -> c_int,
    nvrtcCreateProgram: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> c_int,
    nvrtcCompileProgram: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int,
    nvrtcDestroyProgram: unsafe extern "C" fn(*mut Program) -> c_int,
    nvrtcGetProgramLogSize: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    nvrtcGetProgramLog: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    nvrtcGetCUBINSize: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    nvrtcGetCUBIN: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    nvrtcGetPTXSize: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    nvrtcGetPTX: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
}

/// Loads the run-time compiler. Looks once per process. If the environment variable `FLOW_NVRTC` is
/// set, it looks at that path and nowhere else. Else it looks by name, as the dynamic linker does,
/// and then where PyTorch's wheels have it, beside a libtorch that this process has loaded.
///
/// # Errors
///
/// [`Error::NoCompiler`].
pub(super) fn load_compiler() -> Result<&'static Nvrtc> {
    static FOUND: OnceLock<Result<Nvrtc>> = OnceLock::new();
    FOUND.get_or_init(find_compiler).as_ref().map_err(Clone::clone)
}

fn find_compiler() -> Result<Nvrtc> {
    let candidates = match env::var_os("FLOW_NVRTC") {
        Some(path) => vec![path.into()],
        None => ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]
            .map(PathBuf::from)
            .into_iter()
            .chain(in_wheels())
            .collect(),
    };
    let mut failures = Vec::new();
    for candidate in &candidates {
        // SAFETY: NVRTC may be loaded at any time; it is never unloaded.
        match unsafe { load_forever(candidate).and_then(|library| Nvrtc::from(&library)) } {
            Ok(nvrtc) => return Ok(nvrtc),
            Err(error) => {
                // The linker's own words are in the source, and begin with the path.
                failures
                    .push(error.source().map_or_else(|| error.to_string(), ToString::to_string));
            }
        }
    }
    Err(Error::NoCompiler { reason: format!("no libnvrtc can be used ({})", failures.join("; ")) })
}

/// Loads NVRTC from `path` and, if that has a folder, the library of the same folder that NVRTC
/// opens by its name only.
///
/// # Safety
///
/// That of [`Library::new`].
unsafe fn load_forever(
    path: &Path,
) -> std::result::Result<ManuallyDrop<Library>, libloading::Error> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    for neighbour in folder.into_iter().flat_map(fs::read_dir).flatten().flatten() {
        if neighbour.file_name().to_string_lossy().starts_with("libnvrtc-builtins.so") {
            // SAFETY: the caller's promise. Should it fail, NVRTC says so when it compiles.
            let _ = unsafe { Library::new(neighbour.path()) }.map(ManuallyDrop::new);
        }
    }
    // SAFETY: the caller's promise.
    unsafe { Library::new(path) }.map(ManuallyDrop::new)
}

/// Returns where PyTorch's wheels of CUDA 13 and 12 have NVRTC; nowhere without such a libtorch.
fn in_wheels() -> Vec<PathBuf> {
    let Some(nvidia) = nvidia_wheels() else { return Vec::new() };
    vec![nvidia.join("cu13/lib/libnvrtc.so.13"), nvidia.join("cuda_nvrtc/lib/libnvrtc.so.12")]
}
