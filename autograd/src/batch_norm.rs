//! Batch norms whose training is computed in Rust.

use std::ffi::{c_char, c_void};
use std::mem::ManuallyDrop;
use std::ptr::null_mut;

use tch::Tensor;
use torch_sys::C_tensor;

use crate::error::{BoxError, Error};
use crate::ffi::{self, BatchNormClosure, BatchNormView};

/// A batch norm in training: the arguments of PyTorch's `F.batch_norm`.
#[derive(Clone, Copy, Debug)]
pub struct BatchNorm<'a> {
    /// The batch: `[N, C]`, or `[N, C, ...]`.
    pub input: &'a Tensor,
    /// The factor of each channel, `[C]`.
    pub weight: Option<&'a Tensor>,
    /// What is added to each channel, `[C]`.
    pub bias: Option<&'a Tensor>,
    /// The mean of each channel over past batches, `[C]`, which this batch changes.
    pub running_mean: Option<&'a Tensor>,
    /// The unbiased variance of each channel over past batches, `[C]`, which this batch changes.
    pub running_var: Option<&'a Tensor>,
    /// The weight of this batch in the running statistics.
    pub momentum: f64,
    /// What is added to the variance before its root is taken.
    pub eps: f64,
}

/// Has `compute` take the place of libtorch's batch norm in training, wherever this running mean is
/// the layer's. In evaluation, and without this running mean, libtorch's stays. A second call for a
/// running mean replaces the first. `compute` is dropped with the tensor.
///
/// An `Err` or a panic of `compute` becomes the error of the batch norm.
///
/// # Errors
///
/// The tensor requires a gradient.
///
/// ```
/// use flow_autograd::{replace_batch_norm, replaces_batch_norm};
/// use tch::nn::{self, ModuleT};
/// use tch::{Device, Kind, Tensor};
///
/// let vs = nn::VarStore::new(Device::Cpu);
/// let norm = nn::batch_norm1d(vs.root(), 3, Default::default());
/// assert!(!replaces_batch_norm(&norm.running_mean));
/// replace_batch_norm(&norm.running_mean, |norm| Ok(norm.input * 2))?;
/// assert!(replaces_batch_norm(&norm.running_mean));
/// let x = Tensor::ones([2, 3], (Kind::Float, Device::Cpu));
/// assert_eq!(norm.forward_t(&x, true), &x * 2);
/// # Ok::<(), flow_autograd::Error>(())
/// ```
pub fn replace_batch_norm<F>(running_mean: &Tensor, compute: F) -> Result<(), Error>
where
    F: Fn(&BatchNorm<'_>) -> Result<Tensor, BoxError> + Send + Sync + 'static,
{
    let data = Box::into_raw(Box::new(compute)).cast();
    let closure = BatchNormClosure { data, call: call::<F>, drop: ffi::drop_box::<F> };
    // SAFETY: the tensor is alive; the closure's functions fit its data.
    unsafe {
        let text = ffi::flow_replace_batch_norm(running_mean.as_ptr(), closure);
        ffi::check("replace_batch_norm", text)
    }
}

/// Returns whether [`replace_batch_norm`] has replaced the batch norms that have this running mean.
pub fn replaces_batch_norm(running_mean: &Tensor) -> bool {
    // SAFETY: the tensor is alive.
    unsafe { ffi::flow_replaces_batch_norm(running_mean.as_ptr()) }
}

/// Returns the gradients of the weight and of the bias of a batch norm that has normalized `input` by
/// this mean and variance, `[C]`: for each channel, the sum of `gradient` times the normalized input,
/// and the sum of `gradient`.
///
/// # Errors
///
/// libtorch's.
pub fn batch_norm_sums(
    gradient: &Tensor,
    input: &Tensor,
    mean: &Tensor,
    variance: &Tensor,
    eps: f64,
) -> Result<(Tensor, Tensor), Error> {
    let [gradient, input, mean, variance] = [gradient, input, mean, variance].map(Tensor::as_ptr);
    let (mut of_weight, mut of_bias) = (null_mut(), null_mut());
    // SAFETY: the tensors are alive, and the results are writable.
    unsafe {
        let text = ffi::flow_batch_norm_sums(
            gradient,
            input,
            mean,
            variance,
            eps,
            &mut of_weight,
            &mut of_bias,
        );
        ffi::check("batch_norm_sums", text)?;
        Ok((Tensor::from_ptr(of_weight), Tensor::from_ptr(of_bias)))
    }
}

/// # Safety
///
/// `compute` must point to an `F`, `norm` to a valid view, and `result` be writable.
unsafe extern "C" fn call<F>(
    compute: *mut c_void,
    norm: *const BatchNormView,
    result: *mut *mut C_tensor,
) -> *mut c_char
where
    F: Fn(&BatchNorm<'_>) -> Result<Tensor, BoxError>,
{
    ffi::report("a batch norm", || {
        // SAFETY: the caller's promise.
        let (compute, norm) = unsafe { (&*compute.cast::<F>(), &*norm) };
        // SAFETY: the tensors are C++'s, and alive.
        let input = unsafe { ffi::borrow(norm.input) };
        let [weight, bias, running_mean, running_var] =
            [norm.weight, norm.bias, norm.running_mean, norm.running_var]
                // SAFETY: as above, where there is a tensor.
                .map(|tensor| (!tensor.is_null()).then(|| unsafe { ffi::borrow(tensor) }));
        let output = compute(&BatchNorm {
            input: &input,
            weight: weight.as_deref(),
            bias: bias.as_deref(),
            running_mean: running_mean.as_deref(),
            running_var: running_var.as_deref(),
            momentum: norm.momentum,
            eps: norm.eps,
        })?;
        let output = ManuallyDrop::new(output);
        // SAFETY: the caller's promise; the handle is given away.
        unsafe { *result = output.as_ptr().cast_mut() };
        Ok(())
    })
}
