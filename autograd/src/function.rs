//! Differentiable operations written in Rust.

use std::ffi::{c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null;

use tch::Tensor;
use torch_sys::C_tensor;

use crate::error::{BoxError, Error};
use crate::ffi::{self, BoolSlice, FunctionClosure, TensorList, TensorSlice};

/// The result of the forward of a [`custom_function`].
#[derive(Debug)]
pub struct Forward {
    /// The results of the operation.
    pub outputs: Vec<Tensor>,
    /// The tensors that backward needs: inputs, outputs or others. Unlike tensors that the backward
    /// closure captures, outputs may be among them without a leak. Backward fails if a saved tensor
    /// was changed in place meanwhile.
    pub saved: Vec<Tensor>,
}

/// Runs `forward` on `inputs` and returns its outputs: PyTorch's `torch.autograd.Function`.
///
/// `forward` runs once, at once, and records no graph. If an input requires a gradient, the outputs
/// do (those of a floating-point kind). Backward through them then calls `backward` with the saved
/// tensors and with the gradient of each output. That is `None` for an output that the loss does
/// not depend on. It returns the gradient of each input, or `None` for no gradient. `backward` may
/// run more than once (if the graph is retained), and on another thread. It records a graph of its
/// own if the caller asks for one (`create_graph`). It is dropped with the graph.
///
/// # Errors
///
/// An `Err` or a panic of `forward`, with its text, or libtorch's. An `Err` or a panic of
/// `backward` ends the backward, which returns an error with that text.
///
/// ```
/// use flow_autograd::{custom_function, Forward};
/// use tch::{Device, Kind, Tensor};
///
/// let x = Tensor::from_slice(&[3.0]).set_requires_grad(true);
/// let square = custom_function(
///     &[&x],
///     |inputs| {
///         let square = &inputs[0] * &inputs[0];
///         Ok(Forward { outputs: vec![square], saved: vec![inputs[0].shallow_clone()] })
///     },
///     |saved, grads| Ok(vec![grads[0].as_ref().map(|grad| grad * &saved[0] * 2)]),
/// )?;
/// square[0].f_backward()?;
/// assert_eq!(x.grad().double_value(&[0]), 6.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn custom_function<F, B>(
    inputs: &[&Tensor],
    forward: F,
    backward: B,
) -> Result<Vec<Tensor>, Error>
where
    F: FnOnce(&[Tensor]) -> Result<Forward, BoxError>,
    B: Fn(&[Tensor], &[Option<Tensor>]) -> Result<Vec<Option<Tensor>>, BoxError> + Send + 'static,
{
    custom_function_of_needed(inputs, forward, move |saved, grads, _| backward(saved, grads))
}

/// Returns whether operations on this thread record a graph: `torch.is_grad_enabled()`. In the
/// backward of a [`custom_function`] it says whether the gradients are to have gradients.
pub fn grad_enabled() -> bool {
    // SAFETY: it reads a flag of this thread.
    unsafe { ffi::flow_grad_enabled() }
}

/// Does what [`custom_function`] does, and tells `backward` whether each input's gradient is
/// needed: `ctx.needs_input_grad`, for this backward.
pub(crate) fn custom_function_of_needed<F, B>(
    inputs: &[&Tensor],
    forward: F,
    backward: B,
) -> Result<Vec<Tensor>, Error>
where
    F: FnOnce(&[Tensor]) -> Result<Forward, BoxError>,
    B: Fn(&[Tensor], &[Option<Tensor>], &[bool]) -> Result<Vec<Option<Tensor>>, BoxError>
        + Send
        + 'static,
{
    const OPERATION: &str = "custom_function";
    let mut forward = Some(forward);
    let forward = FunctionClosure {
        data: (&raw mut forward).cast(),
        call: call_forward::<F>,
        drop: not_dropped,
    };
    let backward = FunctionClosure {
        data: Box::into_raw(Box::new(backward)).cast(),
        call: call_backward::<B>,
        drop: ffi::drop_box::<B>,
    };
    let inputs: Vec<*const C_tensor> = inputs.iter().map(|input| input.as_ptr()).collect();
    let inputs = TensorSlice { tensors: inputs.as_ptr(), count: inputs.len() };
    let mut outputs = Vec::<Tensor>::new();
    // SAFETY: the inputs are alive, and `outputs` and `forward` outlive the call; the closures'
    // functions fit their data.
    unsafe {
        let data = (&raw mut outputs).cast();
        ffi::check(
            OPERATION,
            ffi::flow_apply_function(inputs, forward, backward, data, push_output),
        )?;
    }
    Ok(outputs)
}

/// # Safety
///
/// `forward` must point to an `Option<F>` that nothing else uses during the call, the slices and
/// lists be valid.
unsafe extern "C" fn call_forward<F>(
    forward: *mut c_void,
    inputs: TensorSlice,
    _: TensorSlice,
    outputs: *mut TensorList,
    saved: *mut TensorList,
    _: BoolSlice,
) -> *mut c_char
where
    F: FnOnce(&[Tensor]) -> Result<Forward, BoxError>,
{
    ffi::report("the forward of a custom function", || {
        // SAFETY: the caller's promise.
        let (forward, inputs) = unsafe { (&mut *forward.cast::<Option<F>>(), handles(inputs)) };
        let forward = forward.take().ok_or("the forward runs only once")?;
        let inputs = defined(inputs)?;
        let result = forward(&inputs)?;
        // SAFETY: the caller's promise.
        unsafe {
            result.outputs.iter().try_for_each(|tensor| push(outputs, Some(tensor)))?;
            result.saved.iter().try_for_each(|tensor| push(saved, Some(tensor)))?;
        }
        Ok(())
    })
}

/// # Safety
///
/// `backward` must point to a `B`, the slices and lists be valid.
unsafe extern "C" fn call_backward<B>(
    backward: *mut c_void,
    saved: TensorSlice,
    grads: TensorSlice,
    results: *mut TensorList,
    _: *mut TensorList,
    needed: BoolSlice,
) -> *mut c_char
where
    B: Fn(&[Tensor], &[Option<Tensor>], &[bool]) -> Result<Vec<Option<Tensor>>, BoxError>,
{
    ffi::report("the backward of a custom function", || {
        // SAFETY: the caller's promise.
        let (backward, saved, grads, needed) = unsafe {
            let needed = ffi::slice(needed.values, needed.count);
            (&*backward.cast::<B>(), handles(saved), handles(grads), needed)
        };
        for grad in backward(&defined(saved)?, &grads, needed)? {
            // SAFETY: the caller's promise.
            unsafe { push(results, grad.as_ref())? };
        }
        Ok(())
    })
}

/// # Safety
///
/// The slice must be valid.
unsafe fn handles(slice: TensorSlice) -> Vec<Option<Tensor>> {
    if slice.count == 0 {
        return Vec::new();
    }
    let mut handles = Vec::new();
    // SAFETY: the caller's promise.
    for &tensor in unsafe { std::slice::from_raw_parts(slice.tensors, slice.count) } {
        handles.push(if tensor.is_null() {
            None
        } else {
            // SAFETY: the tensor is C++'s, and alive.
            Some(unsafe { ffi::borrow(tensor) }.shallow_clone())
        });
    }
    handles
}

fn defined(tensors: Vec<Option<Tensor>>) -> Result<Vec<Tensor>, BoxError> {
    let defined: Option<Vec<Tensor>> = tensors.into_iter().collect();
    defined.ok_or_else(|| "an undefined tensor was passed to a custom function".into())
}

/// # Safety
///
/// `list` must be valid.
unsafe fn push(list: *mut TensorList, tensor: Option<&Tensor>) -> Result<(), Error> {
    let tensor = tensor.map_or(null(), |tensor| tensor.as_ptr());
    // SAFETY: the caller's promise; the tensor is alive.
    unsafe { ffi::check("a custom function", ffi::flow_push_tensor(list, tensor)) }
}

/// # Safety
///
/// `outputs` must point to a `Vec<Tensor>` that nothing else uses during the call, and `tensor` be
/// the caller's, to give away.
unsafe extern "C" fn push_output(outputs: *mut c_void, tensor: *mut C_tensor) {
    // SAFETY: the caller's promise.
    let (outputs, tensor) =
        unsafe { (&mut *outputs.cast::<Vec<Tensor>>(), Tensor::from_ptr(tensor)) };
    // Only a failed allocation panics here.
    let _ = catch_unwind(AssertUnwindSafe(|| outputs.push(tensor)));
}

/// The forward closure stays Rust's.
unsafe extern "C" fn not_dropped(_: *mut c_void) {}
