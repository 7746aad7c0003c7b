//! Code that runs inside `backward`.

use std::ffi::{c_char, c_void};
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, PoisonError, TryLockError};

use tch::Tensor;
use torch_sys::C_tensor;

use crate::error::{BoxError, Error};
use crate::ffi::{self, Closure};

type Hook = dyn FnMut(&Tensor) -> Result<(), BoxError> + Send;

/// The closure that a parameter's C++ hook calls, if any.
///
/// The C++ hook stays on the parameter, with an empty slot, when the closure is removed. libtorch
/// reads it without a lock. To take it away would be a race with a backward on another thread.
#[derive(Default)]
struct Slot(Mutex<Option<Arc<Mutex<Hook>>>>);

impl Slot {
    /// Finds the slot of a parameter that has, or once had, a hook; an error if it can have none.
    fn of(parameter: &Tensor, operation: &'static str) -> Result<Option<Arc<Self>>, Error> {
        let mut data = null_mut();
        // SAFETY: the tensor is alive and `data` is writable.
        unsafe { ffi::check(operation, ffi::flow_grad_hook(parameter.as_ptr(), &mut data))? };
        // SAFETY: all our hooks' data are boxes of this type, which live as long as the parameter.
        Ok((!data.is_null()).then(|| unsafe { &*data.cast::<Arc<Self>>() }.clone()))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Arc<Mutex<Hook>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn call(&self, parameter: &Tensor) -> Result<(), BoxError> {
        // A clone, so that the hook itself may drop its GradHook.
        let Some(hook) = self.lock().clone() else { return Ok(()) };
        match hook.try_lock() {
            Ok(mut hook) => hook(parameter),
            Err(TryLockError::Poisoned(hook)) => hook.into_inner()(parameter),
            Err(TryLockError::WouldBlock) => {
                Err("a gradient hook was called again before it returned".into())
            }
        }
    }
}

/// A closure that libtorch calls during `backward` each time a parameter's gradient has been
/// accumulated. Dropping this removes the closure and frees it (after the call, if it is just
/// running).
///
/// ```
/// use flow_autograd::GradHook;
/// use tch::{Device, Kind, Tensor};
///
/// let weight = Tensor::ones([2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
/// let (sender, receiver) = std::sync::mpsc::channel();
/// let hook = GradHook::install(&weight, move |weight| {
///     Ok(sender.send(weight.grad().double_value(&[0]))?)
/// })?;
/// (&weight * 3).sum(Kind::Float).f_backward()?;
/// assert_eq!(receiver.try_recv()?, 3.0);
/// # drop(hook);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "dropping it removes the hook"]
pub struct GradHook {
    slot: Arc<Slot>,
}

impl GradHook {
    /// Calls `hook` with the parameter, whenever its `.grad` has its final value of a backward. It
    /// runs on the thread of that backward, which for a CUDA parameter is one of libtorch's. `hook`
    /// may replace the gradient.
    ///
    /// An `Err` or a panic of `hook` ends the backward, which returns an error with that text.
    ///
    /// # Errors
    ///
    /// The parameter has a hook already, or is not a leaf that requires a gradient.
    pub fn install(
        parameter: &Tensor,
        hook: impl FnMut(&Tensor) -> Result<(), BoxError> + Send + 'static,
    ) -> Result<Self, Error> {
        const OPERATION: &str = "GradHook::install";
        static INSTALLING: Mutex<()> = Mutex::new(());
        let _one_at_a_time = INSTALLING.lock().unwrap_or_else(PoisonError::into_inner);

        let slot = match Slot::of(parameter, OPERATION)? {
            Some(slot) => slot,
            None => {
                let slot = Arc::<Slot>::default();
                let data = Box::into_raw(Box::new(slot.clone())).cast();
                let closure = Closure { data, call: call_slot, drop: ffi::drop_box::<Arc<Slot>> };
                // SAFETY: the tensor is alive; the closure's functions fit its data.
                unsafe {
                    ffi::check(OPERATION, ffi::flow_set_grad_hook(parameter.as_ptr(), closure))?
                };
                slot
            }
        };
        let mut installed = slot.lock();
        if installed.is_some() {
            return Err(Error::HookInstalled);
        }
        *installed = Some(Arc::new(Mutex::new(hook)));
        drop(installed);
        Ok(GradHook { slot })
    }

    /// Returns whether the parameter has a hook at present, so that [`GradHook::install`] would
    /// refuse it.
    ///
    /// # Errors
    ///
    /// It can have none: it is not a leaf that requires a gradient.
    pub fn is_installed(parameter: &Tensor) -> Result<bool, Error> {
        let slot = Slot::of(parameter, "GradHook::is_installed")?;
        Ok(slot.is_some_and(|slot| slot.lock().is_some()))
    }
}

impl Drop for GradHook {
    fn drop(&mut self) {
        let hook = self.slot.lock().take();
        drop(hook); // with the slot unlocked: it is the user's code
    }
}

impl std::fmt::Debug for GradHook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GradHook").finish_non_exhaustive()
    }
}

/// Returns whether nothing else uses the memory of `parameter`'s gradient, so that it may be
/// changed at once. Call it in the parameter's hook: libtorch may share the gradient's memory with
/// nodes that this backward has yet to run.
pub fn grad_is_exclusive(parameter: &Tensor) -> bool {
    let mut exclusive = false;
    // SAFETY: the tensor is alive and `exclusive` is writable.
    let result = unsafe {
        ffi::check(
            "grad_is_exclusive",
            ffi::flow_grad_is_exclusive(parameter.as_ptr(), &mut exclusive),
        )
    };
    result.is_ok() && exclusive
}

/// # Safety
///
/// `slot` must point to an `Arc<Slot>` and `parameter` to a tensor.
unsafe extern "C" fn call_slot(slot: *mut c_void, parameter: *const C_tensor) -> *mut c_char {
    ffi::report("a gradient hook", || {
        // SAFETY: the caller's promise. The tensor is C++'s, and not dropped here.
        let (slot, parameter) = unsafe { (&*slot.cast::<Arc<Slot>>(), ffi::borrow(parameter)) };
        slot.call(&parameter)
    })
}

type NodeHook = Box<dyn Fn() -> Result<(), BoxError> + Send + Sync>;

/// Calls `hook` whenever a backward reaches the operation that computed `tensor`, on the thread
/// that runs the backward. The hook is dropped with the graph, or at once if `tensor` has none.
///
/// An `Err` or a panic of `hook` ends the backward, which returns an error with that text.
///
/// # Errors
///
/// libtorch's.
pub fn on_backward(
    tensor: &Tensor,
    hook: impl Fn() -> Result<(), BoxError> + Send + Sync + 'static,
) -> Result<(), Error> {
    let hook: NodeHook = Box::new(hook);
    let data = Box::into_raw(Box::new(hook)).cast();
    let closure = Closure { data, call: call_node_hook, drop: ffi::drop_box::<NodeHook> };
    // SAFETY: the tensor is alive; the closure's functions fit its data.
    unsafe { ffi::check("on_backward", ffi::flow_on_backward(tensor.as_ptr(), closure)) }
}

/// # Safety
///
/// `hook` must point to a `NodeHook`.
unsafe extern "C" fn call_node_hook(hook: *mut c_void, _: *const C_tensor) -> *mut c_char {
    ffi::report("a hook of a node", || {
        // SAFETY: the caller's promise.
        let hook = unsafe { &*hook.cast::<NodeHook>() };
        hook()
    })
}

type Callback = Option<Box<dyn FnOnce() -> Result<(), BoxError> + Send>>;

/// Calls `callback` once, when all gradients of the running backward are accumulated and before it
/// returns. It runs on the thread that called backward, or on one of libtorch's. Several callbacks
/// run in the order of these calls. If that backward runs inside a node of another, as in
/// checkpointing, the other's gradients are waited for as well, and so on.
///
/// An `Err` or a panic of `callback` makes the backward return an error with that text. If the
/// backward fails earlier, `callback` is dropped without being called: when backward returns or, if
/// an outer one fails, when its graph is freed.
///
/// # Errors
///
/// No backward runs on this thread: this is for gradient hooks.
pub fn at_end_of_backward(
    callback: impl FnOnce() -> Result<(), BoxError> + Send + 'static,
) -> Result<(), Error> {
    let callback: Callback = Some(Box::new(callback));
    let data = Box::into_raw(Box::new(callback)).cast();
    let closure = Closure { data, call: call_callback, drop: ffi::drop_box::<Callback> };
    // SAFETY: the closure's functions fit its data.
    unsafe { ffi::check("at_end_of_backward", ffi::flow_at_end_of_backward(closure)) }
}

/// # Safety
///
/// `callback` must point to a `Callback` that nothing else uses during the call.
unsafe extern "C" fn call_callback(callback: *mut c_void, _: *const C_tensor) -> *mut c_char {
    ffi::report("an end-of-backward callback", || {
        // SAFETY: the caller's promise.
        let callback = unsafe { &mut *callback.cast::<Callback>() };
        callback.take().map_or(Ok(()), |callback| callback())
    })
}
