//! Gradients that are changed on their way.

use std::ffi::{c_char, c_void};
use std::mem::ManuallyDrop;

use tch::Tensor;
use torch_sys::C_tensor;

use crate::error::{BoxError, Error};
use crate::ffi::{self, GradientClosure};

/// Calls `change` with each gradient that comes back to `tensor` in a backward, on the thread that
/// runs it. What it returns goes on instead; None leaves the gradient as it is. The closure is
/// dropped with the graph.
///
/// An `Err` or a panic of `change` ends the backward, which returns an error with that text.
///
/// # Errors
///
/// The tensor requires no gradient.
pub fn map_gradient<F>(tensor: &Tensor, change: F) -> Result<(), Error>
where
    F: Fn(&Tensor) -> Result<Option<Tensor>, BoxError> + Send + Sync + 'static,
{
    let data = Box::into_raw(Box::new(change)).cast();
    let closure = GradientClosure { data, call: call::<F>, drop: ffi::drop_box::<F> };
    // SAFETY: the tensor is alive; the closure's functions fit its data.
    unsafe { ffi::check("map_gradient", ffi::flow_map_gradient(tensor.as_ptr(), closure)) }
}

/// # Safety
///
/// `change` must point to an `F`, `gradient` to a tensor, and `result` be writable.
unsafe extern "C" fn call<F>(
    change: *mut c_void,
    gradient: *const C_tensor,
    result: *mut *mut C_tensor,
) -> *mut c_char
where
    F: Fn(&Tensor) -> Result<Option<Tensor>, BoxError>,
{
    ffi::report("a change of a gradient", || {
        // SAFETY: the caller's promise. The gradient is C++'s, and not dropped here.
        let (change, gradient) = unsafe {
            (&*change.cast::<F>(), ManuallyDrop::new(Tensor::from_ptr(gradient.cast_mut())))
        };
        if let Some(changed) = change(&gradient)? {
            let changed = ManuallyDrop::new(changed);
            // SAFETY: the caller's promise; the handle is given away.
            unsafe { *result = changed.as_ptr().cast_mut() };
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::{Device, Kind};

    #[test]
    fn gradients_are_changed_left_or_refused() {
        let x = Tensor::ones([2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let y = &x * 2;
        map_gradient(&y, |gradient| Ok(Some(gradient * 10))).unwrap();
        map_gradient(&y, |_| Ok(None)).unwrap();
        y.sum(Kind::Float).backward();
        assert_eq!(Vec::<f32>::try_from(x.grad()).unwrap(), [20.0, 20.0]);
        let z = &x * 2;
        map_gradient(&z, |_| Err("no gradients today".into())).unwrap();
        let error = z.sum(Kind::Float).f_backward().unwrap_err().to_string();
        assert!(error.contains("no gradients today"), "{error}");
        assert!(map_gradient(&x.detach(), |_| Ok(None)).is_err());
    }
}
