//! Errors of CUDA.

use std::ffi::{CStr, c_char};
use std::ptr::null;

use cudarc::driver::sys::{self, CUresult};

/// An error of something on a GPU.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// The driver's library is missing or too old.
    #[error(
        "CUDA cannot be used: {reason}; install NVIDIA's driver (580 or newer for CUDA 13), or \
         run on the CPU"
    )]
    NoDriver {
        /// The thing that is missing.
        reason: String,
    },
    /// The driver refused or failed an operation, or an earlier kernel failed.
    #[error("CUDA could not {operation}: {reason}")]
    Driver {
        /// The request to the driver.
        operation: &'static str,
        /// The driver's name of the error, and its explanation.
        reason: String,
    },
    /// The run-time compiler's library is missing or too old.
    #[error(
        "the CUDA kernels cannot be compiled: {reason}; install it (pip install \
         nvidia-cuda-nvrtc) and, where it is not found, set FLOW_NVRTC to the path of \
         libnvrtc.so.13"
    )]
    NoCompiler {
        /// The places in which it was looked for, or what it lacks.
        reason: String,
    },
    /// The run-time compiler failed.
    #[error("the CUDA kernel {kernel} cannot be compiled: {log}")]
    Compile {
        /// The name of the kernel.
        kernel: String,
        /// The compiler's message.
        log: String,
    },
    /// A caller's mistake.
    #[error("{0}")]
    Argument(String),
}

/// The result of an operation on a GPU.
pub type Result<T> = std::result::Result<T, Error>;

/// Turns the driver's answer to `operation` into a `Result`.
pub(super) fn check(operation: &'static str, result: CUresult) -> Result<()> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    // SAFETY: an answer came from the driver, so its library was loaded; both functions give a
    // static text or null.
    let (name, explanation) =
        unsafe { (text(result, sys::cuGetErrorName), text(result, sys::cuGetErrorString)) };
    Err(Error::Driver { operation, reason: format!("{name} ({explanation})") })
}

/// For `Drop`, which cannot return an error. At the end of a process the driver reports that it has
/// shut down already.
pub(super) fn check_release(operation: &'static str, result: CUresult) {
    if let Err(error) = check(operation, result) {
        log::debug!("{error}");
    }
}

/// # Safety
///
/// `function` must store null or a C string that lives forever.
unsafe fn text(
    result: CUresult,
    function: unsafe fn(CUresult, *mut *const c_char) -> CUresult,
) -> String {
    let mut text = null();
    // SAFETY: `text` is there to be written; the rest is the caller's promise.
    unsafe {
        function(result, &mut text);
        if text.is_null() {
            return format!("error {}", result as u32);
        }
        CStr::from_ptr(text).to_string_lossy().into_owned()
    }
}
