//! Global tensors: ordinary tensors with a dispatch key of ours, whose operations come to Rust.
//!
//! A global tensor has the logical sizes, this rank's local tensor, and a spec. Ranks outside its
//! placement have no local tensor. The spec is a value of the caller's type that says how the
//! elements lie on the ranks. Autograd, optimizers and modules see a tensor like any other.

mod call;
mod fast;
mod node;
mod value;

use std::any::TypeId;
use std::ffi::{c_char, c_void};
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ptr::{null, null_mut};
use std::sync::{Arc, OnceLock};

use tch::{TchError, Tensor};
use torch_sys::C_tensor;

use crate::error::{BoxError, Error};
use crate::ffi::global::{self as ffi, CallView, Callbacks, FastCallView};
use crate::ffi::{borrow, check, report};

pub use call::Call;
pub use fast::FastCall;
pub use node::Node;
pub use value::{Argument, LocalResult, Scalar, Wrapping};

/// Carries out the operations on global tensors.
pub trait Dispatcher: 'static {
    /// The layout of a tensor on the ranks.
    type Spec: Send + Sync + 'static;

    /// Returns a number that no other spec has, in the life of the process.
    fn spec_id(spec: &Self::Spec) -> u64;

    /// Carries out an operation whose key is known from [`Dispatcher::dispatch`], if it needs no more
    /// than to run on the locals. Returns false, and has done nothing, if it is to be dispatched.
    ///
    /// # Errors
    /// As those of `dispatch`.
    fn run_known(call: &mut FastCall<'_, Self::Spec>) -> Result<bool, BoxError>;

    /// Carries out an operation: gives as many outputs as it has returns.
    ///
    /// # Errors
    /// Whatever is wrong with the operation: the caller of the operation gets the text.
    fn dispatch(call: &mut Call<'_, Self::Spec>) -> Result<(), BoxError>;

    /// Decides in backward what becomes of the gradient of a leaf. `may_take`: it is to be
    /// accumulated, and not returned to the caller, so that it may be [taken](LeafGradient::Taken).
    /// `exclusive`: nothing else uses the memory of the gradient's local.
    ///
    /// # Errors
    /// They end the backward.
    fn gradient(
        leaf: &Tensor,
        gradient: &Tensor,
        may_take: bool,
        exclusive: bool,
    ) -> Result<LeafGradient, BoxError>;

    /// Returns whether all elements of these tensors are finite, on all ranks. At least one tensor is
    /// global.
    ///
    /// # Errors
    /// A collective fails.
    fn are_finite(tensors: &[Tensor]) -> Result<bool, BoxError>;
}

/// The gradient that is accumulated in `.grad` of a leaf.
#[derive(Debug)]
pub enum LeafGradient {
    /// The gradient that has come.
    Same,
    /// The leaf gets this gradient instead.
    Boxed(Tensor),
    /// Nothing: the dispatcher sets `.grad` itself, later.
    Taken,
}

/// The process's dispatcher, and the type of its specs.
struct Registered {
    dispatcher: TypeId,
    spec: TypeId,
    are_finite: fn(&[Tensor]) -> Result<bool, BoxError>,
}

/// The result of the first registration.
static REGISTERED: OnceLock<Result<Registered, Error>> = OnceLock::new();

/// Returns whether a tensor is global.
pub fn is_global(tensor: &Tensor) -> bool {
    // SAFETY: the tensor is alive.
    unsafe { !ffi::flow_global_spec(tensor.as_ptr()).is_null() }
}

/// Returns whether all elements of these tensors are finite. If one is global, all ranks call this, and
/// get the same.
///
/// # Errors
/// libtorch's; a collective fails.
pub fn are_finite(tensors: &[Tensor]) -> Result<bool, BoxError> {
    match REGISTERED.get() {
        Some(Ok(registered)) if tensors.iter().any(is_global) => (registered.are_finite)(tensors),
        _ => Ok(local_are_finite(tensors)?),
    }
}

/// Returns whether all elements of these plain tensors are finite. A device is waited for once.
///
/// # Errors
/// libtorch's.
pub fn local_are_finite(tensors: &[Tensor]) -> Result<bool, TchError> {
    let mut flags = Vec::with_capacity(tensors.len());
    for tensor in tensors {
        let values =
            if tensor.is_sparse() { tensor.f_internal_values()? } else { tensor.shallow_clone() };
        flags.push(values.f_isfinite()?.f_all()?);
    }
    if flags.is_empty() {
        return Ok(true);
    }
    bool::try_from(Tensor::f_stack(&flags, 0)?.f_all()?)
}

/// Makes global tensors, whose operations one [`Dispatcher`] carries out.
pub struct Globals<S>(PhantomData<fn() -> S>);

impl<S> Clone for Globals<S> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<S> Copy for Globals<S> {}

impl<S> std::fmt::Debug for Globals<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Globals")
    }
}

impl<S: Send + Sync + 'static> Globals<S> {
    /// Has all operations of libtorch on global tensors carried out by `D`. A process has one
    /// dispatcher: registering the same one again changes nothing.
    ///
    /// # Errors
    /// Another dispatcher is registered, or this version of libtorch is not known.
    pub fn register<D: Dispatcher<Spec = S>>() -> Result<Self, Error> {
        const OPERATION: &str = "Globals::register";
        let registered = REGISTERED.get_or_init(|| {
            let callbacks = Callbacks {
                fast: call_fast::<D>,
                dispatch: call_dispatch::<D>,
                gradient: call_gradient::<D>,
                spec_id: spec_id::<D>,
                clone_spec: clone_spec::<S>,
                drop_spec: drop_spec::<S>,
            };
            // SAFETY: the functions fit the specs, which are `Arc<S>`: all come from this type.
            unsafe { check(OPERATION, ffi::flow_global_register(callbacks))? };
            Ok(Registered {
                dispatcher: TypeId::of::<D>(),
                spec: TypeId::of::<S>(),
                are_finite: D::are_finite,
            })
        });
        if registered.as_ref().map_err(Clone::clone)?.dispatcher == TypeId::of::<D>() {
            return Ok(Self(PhantomData));
        }
        let reason = "the process has another dispatcher of global tensors".to_owned();
        Err(Error::Libtorch { operation: OPERATION, reason })
    }

    /// Returns the tensors of a dispatcher that the caller does not know; None if no dispatcher of
    /// this spec is registered.
    pub fn registered() -> Option<Self> {
        let registered = REGISTERED.get()?.as_ref().ok()?;
        (registered.spec == TypeId::of::<S>()).then_some(Self(PhantomData))
    }

    /// Returns a global tensor of these logical sizes. `local` is what this rank has; `like` has
    /// its kind, device, and conj and neg bits, on a rank that has nothing too. If all ranks have
    /// all of the tensor (`shares`), its memory is the local's.
    ///
    /// # Errors
    /// libtorch's.
    pub fn wrap(
        self,
        local: Option<&Tensor>,
        like: &Tensor,
        spec: Arc<S>,
        sizes: &[i64],
        shares: bool,
    ) -> Result<Tensor, Error> {
        let local = local.map_or(null(), |local| local.as_ptr());
        let dims = sizes.len();
        let sizes = sizes.as_ptr();
        let spec = Arc::into_raw(spec).cast();
        let mut result = null_mut();
        // SAFETY: the tensors and the sizes are alive; the spec is given away; the result is owned.
        unsafe {
            let text =
                ffi::flow_global_wrap(local, like.as_ptr(), spec, sizes, dims, shares, &mut result);
            check("Globals::wrap", text)?;
            Ok(Tensor::from_ptr(result))
        }
    }

    /// Returns a result of these logical sizes on a rank that has nothing of it; `like` has its
    /// kind, device, and conj and neg bits.
    ///
    /// # Errors
    /// libtorch's.
    pub fn outside(
        self,
        like: &Tensor,
        sizes: &[i64],
        output: &Wrapping<'_, S>,
    ) -> Result<Tensor, Error> {
        let mut result = null_mut();
        // SAFETY: the tensor, the sizes and the output are alive; the result is owned.
        unsafe {
            let dims = sizes.len();
            let sizes = sizes.as_ptr();
            let text =
                ffi::flow_global_outside(like.as_ptr(), sizes, dims, output.view(), &mut result);
            check("Globals::outside", text)?;
            Ok(Tensor::from_ptr(result))
        }
    }

    /// Returns the spec of a global tensor; None if the tensor is not global.
    pub fn spec(self, tensor: &Tensor) -> Option<Arc<S>> {
        // SAFETY: the tensor is alive; all specs are `Arc<S>`, and the tensor keeps its own.
        unsafe {
            let spec = ffi::flow_global_spec(tensor.as_ptr()).cast::<S>();
            (!spec.is_null()).then(|| {
                Arc::increment_strong_count(spec);
                Arc::from_raw(spec)
            })
        }
    }

    /// Returns this rank's local of a global tensor; None on a rank that has nothing.
    pub fn local(self, tensor: &Tensor) -> Option<Tensor> {
        // SAFETY: the tensor is alive; the result is a handle of our own, or null.
        unsafe {
            let local = ffi::flow_global_local(tensor.as_ptr());
            (!local.is_null()).then(|| Tensor::from_ptr(local))
        }
    }

    /// Returns a number of a global tensor's own, which it keeps when it is written in place; None
    /// if the tensor is plain.
    pub fn id(self, tensor: &Tensor) -> Option<u64> {
        // SAFETY: the tensor is alive.
        let id = unsafe { ffi::flow_global_id(tensor.as_ptr()) };
        (id != 0).then_some(id)
    }

    /// Makes a global tensor, for all who hold it, what `other` is.
    ///
    /// # Errors
    /// libtorch's.
    pub fn assign(self, tensor: &Tensor, other: &Tensor) -> Result<(), Error> {
        // SAFETY: both are alive.
        unsafe {
            check("Globals::assign", ffi::flow_global_assign(tensor.as_ptr(), other.as_ptr()))
        }
    }
}

/// # Safety
///
/// `view` must be valid during the call, with a spec in an `Arc<D::Spec>`, and `done` be writable.
unsafe extern "C" fn call_fast<D: Dispatcher>(
    view: *const FastCallView,
    done: *mut bool,
) -> *mut c_char {
    report("an operation on global tensors", || {
        // SAFETY: the caller's promise.
        unsafe { *done = D::run_known(&mut FastCall::new(&*view))? };
        Ok(())
    })
}

/// # Safety
///
/// `view` must be valid during the call, with specs that are `Arc<D::Spec>`.
unsafe extern "C" fn call_dispatch<D: Dispatcher>(view: *const CallView) -> *mut c_char {
    report("an operation on global tensors", || {
        // SAFETY: the caller's promise.
        let mut call = unsafe { Call::new(&*view) };
        D::dispatch(&mut call)
    })
}

/// # Safety
///
/// The tensors must be valid during the call, and `boxed` and `taken` be writable.
unsafe extern "C" fn call_gradient<D: Dispatcher>(
    leaf: *const C_tensor,
    gradient: *const C_tensor,
    may_take: bool,
    exclusive: bool,
    boxed: *mut *mut C_tensor,
    taken: *mut bool,
) -> *mut c_char {
    report("the gradient of a global tensor", || {
        // SAFETY: the caller's promise.
        let (leaf, gradient) = unsafe { (borrow(leaf), borrow(gradient)) };
        match D::gradient(&leaf, &gradient, may_take, exclusive)? {
            LeafGradient::Same => {}
            LeafGradient::Boxed(result) => {
                let result = ManuallyDrop::new(result);
                // SAFETY: the caller's promise; the handle is given away.
                unsafe { *boxed = result.as_ptr().cast_mut() };
            }
            // SAFETY: the caller's promise.
            LeafGradient::Taken => unsafe { *taken = true },
        }
        Ok(())
    })
}

/// # Safety
///
/// `spec` must be in an `Arc<D::Spec>`.
unsafe extern "C" fn spec_id<D: Dispatcher>(spec: *const c_void) -> u64 {
    // SAFETY: the caller's promise.
    D::spec_id(unsafe { &*spec.cast() })
}

/// # Safety
///
/// `spec` must be in an `Arc<S>`.
unsafe extern "C" fn clone_spec<S>(spec: *const c_void) -> *const c_void {
    // SAFETY: the caller's promise.
    unsafe { Arc::increment_strong_count(spec.cast::<S>()) };
    spec
}

/// # Safety
///
/// `spec` must come from `Arc::<S>::into_raw` and not be used again.
unsafe extern "C" fn drop_spec<S>(spec: *const c_void) {
    // A panic of a destructor ends here: the panic hook has reported it.
    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        // SAFETY: the caller's promise.
        drop(unsafe { Arc::from_raw(spec.cast::<S>()) });
    }));
}
