//! How much memory libtorch allocates.

use std::ptr::null_mut;

use crate::error::Error;
use crate::ffi::{self, MeasurementHandle};

/// Returns the result of `run`, and how many bytes it leaves allocated. They are those of tensors
/// on any device that libtorch made in `run` on this thread, and that live at its end. After a
/// forward these are its outputs and what autograd has saved for the backward. What other threads
/// allocate or free meanwhile is not seen, and each allocation costs a little more: measure once,
/// not in each step.
///
/// # Errors
///
/// libtorch's.
///
/// ```
/// use flow_autograd::allocated_by;
/// use tch::{Device, Kind, Tensor};
///
/// let x = Tensor::ones([1000], (Kind::Double, Device::Cpu)).set_requires_grad(true);
/// let (y, bytes) = allocated_by(|| (&x + 1).exp().sum(Kind::Double))?;
/// // The exponentials, which are their own gradient, and the sum; x + 1 is gone.
/// assert_eq!(bytes, 8 * 1000 + 8);
/// # drop(y);
/// # Ok::<(), flow_autograd::Error>(())
/// ```
pub fn allocated_by<T>(run: impl FnOnce() -> T) -> Result<(T, usize), Error> {
    let mut handle = null_mut();
    // SAFETY: `handle` is writable.
    unsafe { ffi::check("allocated_by", ffi::flow_measure_allocated(&mut handle))? };
    let mut measurement = Measurement(handle);
    let result = run();
    let bytes = measurement.end();
    Ok((result, bytes))
}

/// Ends also when `run` panics.
struct Measurement(*mut MeasurementHandle);

impl Measurement {
    fn end(&mut self) -> usize {
        let handle = std::mem::replace(&mut self.0, null_mut());
        if handle.is_null() {
            0
        } else {
            // SAFETY: the handle is of this thread, ours, and not used again.
            unsafe { ffi::flow_end_measurement(handle) }
        }
    }
}

impl Drop for Measurement {
    fn drop(&mut self) {
        self.end();
    }
}
