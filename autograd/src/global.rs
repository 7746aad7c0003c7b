//! Global tensors: ordinary tensors with a dispatch key of ours, whose operations come to Rust.
//!
//! A global tensor has the logical sizes, this rank's local tensor (none on ranks outside its
//! placement), and a spec: a value of the caller's type that says how its elements lie on the ranks.
//! Autograd, optimizers and modules see a tensor like any other.

use std::any::TypeId;
use std::ffi::{c_char, c_void, CStr};
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ptr::{null, null_mut};
use std::sync::{Arc, Mutex, PoisonError};

use tch::{Kind, Tensor};
use torch_sys::C_tensor;

use crate::error::{BoxError, Error};
use crate::ffi::global::{
    self as ffi, Argument as RawArgument, CallView, Callbacks, OutputView, ScalarView, TensorView,
};
use crate::ffi::{check, report};

/// What happens to operations on global tensors.
pub trait Dispatcher: 'static {
    /// How a tensor lies on the ranks.
    type Spec: Send + Sync + 'static;

    /// Carries out an operation: gives as many outputs as it has returns.
    ///
    /// # Errors
    /// Whatever is wrong with the operation: the caller of the operation gets the text.
    fn dispatch(call: &mut Call<'_, Self::Spec>) -> Result<(), BoxError>;

    /// In backward: what becomes of the gradient of a leaf. `may_take`: it is to be accumulated, and
    /// not returned to the caller, so that it may be [taken](LeafGradient::Taken). `exclusive`:
    /// nothing else uses the memory of the gradient's local.
    ///
    /// # Errors
    /// They end the backward.
    fn gradient(
        leaf: &Tensor,
        gradient: &Tensor,
        may_take: bool,
        exclusive: bool,
    ) -> Result<LeafGradient, BoxError>;
}

/// What is accumulated in `.grad` of a leaf.
#[derive(Debug)]
pub enum LeafGradient {
    /// The gradient that has come.
    Same,
    /// This one instead.
    Boxed(Tensor),
    /// Nothing: the dispatcher sets `.grad` itself, later.
    Taken,
}

/// Whether a tensor is global.
pub fn is_global(tensor: &Tensor) -> bool {
    // SAFETY: the tensor is alive.
    unsafe { !ffi::flow_global_spec(tensor.as_ptr()).is_null() }
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
        static REGISTERED: Mutex<Option<TypeId>> = Mutex::new(None);
        let mut registered = REGISTERED.lock().unwrap_or_else(PoisonError::into_inner);
        match *registered {
            Some(id) if id == TypeId::of::<D>() => {}
            Some(_) => {
                let reason = "the process has another dispatcher of global tensors".to_owned();
                return Err(Error::Libtorch { operation: OPERATION, reason });
            }
            None => {
                let callbacks = Callbacks {
                    dispatch: call_dispatch::<D>,
                    gradient: call_gradient::<D>,
                    drop_spec: drop_spec::<S>,
                };
                // SAFETY: the functions fit the specs, which are `Arc<S>`: all come from this type.
                unsafe { check(OPERATION, ffi::flow_global_register(callbacks))? };
                *registered = Some(TypeId::of::<D>());
            }
        }
        Ok(Self(PhantomData))
    }

    /// A global tensor of these logical sizes. `local` is what this rank has; `like` has its kind and
    /// device, on a rank that has nothing too. If all ranks have all of the tensor (`shares`), its
    /// memory is the local's.
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
        let (sizes, dims) = (sizes.as_ptr(), sizes.len());
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

    /// The spec of a global tensor; None if the tensor is not global.
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

    /// What this rank has of a global tensor; None on a rank that has nothing.
    pub fn local(self, tensor: &Tensor) -> Option<Tensor> {
        // SAFETY: the tensor is alive; the result is a handle of our own, or null.
        unsafe {
            let local = ffi::flow_global_local(tensor.as_ptr());
            (!local.is_null()).then(|| Tensor::from_ptr(local))
        }
    }

    /// A number of a global tensor's own, which it keeps when it is written in place; None if the
    /// tensor is plain.
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

/// An operation of libtorch on global tensors, on its way.
pub struct Call<'a, S> {
    view: &'a CallView,
    specs: PhantomData<S>,
}

/// An argument of an operation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Argument<'a> {
    /// An optional argument that is not there, with the index of its undefined tensor if it would be
    /// one.
    None(Option<usize>),
    /// The index of a tensor.
    Tensor(usize),
    /// A list of tensors: the index of the first, and how many.
    Tensors(usize, usize),
    /// A number, also of an enum.
    Int(i64),
    /// A number.
    Float(f64),
    /// A flag.
    Bool(bool),
    /// Sizes, dimensions and the like.
    Ints(&'a [i64]),
    /// Of another type.
    Other,
}

/// What the operation gave on the local tensors.
#[derive(Debug)]
pub enum LocalResult {
    /// A tensor; None for an undefined one.
    Tensor(Option<Tensor>),
    /// A list of tensors.
    Tensors(Vec<Tensor>),
    /// A number.
    Scalar(Scalar),
}

/// A number that an operation returns.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scalar {
    /// A number.
    Int(i64),
    /// A number.
    Float(f64),
    /// A flag.
    Bool(bool),
}

/// Where autograd is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Node {
    /// It runs backward.
    pub is_backward: bool,
    /// The node that it runs, or the one that it has made of this operation of forward: the same
    /// number for both. None if there is no node.
    pub number: Option<u64>,
}

impl Node {
    /// On this thread. If `is_made`, and no backward runs, the last node that was made.
    pub fn now(is_made: bool) -> Self {
        let (mut number, mut is_backward) = (0, false);
        // SAFETY: both are written before they are read.
        let is_there = unsafe { ffi::flow_autograd_node(is_made, &mut number, &mut is_backward) };
        Self { is_backward, number: is_there.then_some(number) }
    }
}

/// What a result of the local operation is part of.
#[derive(Debug)]
pub struct Output<'a, S> {
    /// How the logical tensor lies.
    pub spec: &'a Arc<S>,
    /// Dimensions that are split.
    pub split_dims: &'a [i32],
    /// Their logical sizes.
    pub split_sizes: &'a [i64],
    /// Of the logical tensor; empty if it is contiguous.
    pub strides: &'a [i64],
    /// All ranks have all of it.
    pub shares: bool,
    /// It should be a view of an input, and does not share that one's memory.
    pub is_detached_view: bool,
}

impl<S: Send + Sync + 'static> Call<'_, S> {
    /// As in `aten::add`.
    pub fn name(&self) -> &str {
        // SAFETY: the name is a C string that outlives the call.
        unsafe { CStr::from_ptr(self.view.name) }.to_str().unwrap_or("?")
    }

    /// As in `add.Tensor`; empty for the default overload.
    pub fn overload(&self) -> &str {
        // SAFETY: the name is a C string that outlives the call.
        unsafe { CStr::from_ptr(self.view.overload) }.to_str().unwrap_or("?")
    }

    /// How many values the operation returns.
    pub fn returns(&self) -> usize {
        self.view.return_count
    }

    /// Whether results are views of an input.
    pub fn is_view(&self) -> bool {
        self.view.is_view
    }

    /// Whether the operation changes the sizes of the tensor that it writes, as `transpose_`.
    pub fn reshapes(&self) -> bool {
        self.view.reshapes
    }

    /// Whether the operation draws random numbers.
    pub fn is_random(&self) -> bool {
        self.view.is_random
    }

    /// Whether the shapes of results depend on values.
    pub fn is_dynamic(&self) -> bool {
        self.view.is_dynamic
    }

    fn raw_arguments(&self) -> &[RawArgument] {
        // SAFETY: the list outlives the call.
        unsafe { slice(self.view.arguments, self.view.argument_count) }
    }

    fn views(&self) -> &[TensorView] {
        // SAFETY: the list outlives the call.
        unsafe { slice(self.view.tensors, self.view.tensor_count) }
    }

    /// The arguments, in the order of the schema.
    pub fn arguments(&self) -> Vec<Argument<'_>> {
        let argument = |raw: &RawArgument| match raw.tag {
            ffi::NONE => Argument::None((raw.count > 0).then_some(raw.first as usize)),
            ffi::TENSOR => Argument::Tensor(raw.first as usize),
            ffi::TENSORS => Argument::Tensors(raw.first as usize, raw.count as usize),
            ffi::INT => Argument::Int(raw.integer),
            ffi::FLOAT => Argument::Float(raw.number),
            ffi::BOOL => Argument::Bool(raw.integer != 0),
            // SAFETY: the list outlives the call.
            ffi::INTS => Argument::Ints(unsafe { slice(raw.integers, raw.count as usize) }),
            _ => Argument::Other,
        };
        self.raw_arguments().iter().map(argument).collect()
    }

    /// Whether the operation writes the tensors of an argument.
    pub fn is_written(&self, argument: usize) -> bool {
        self.raw_arguments()[argument].written
    }

    /// How many tensors there are among the arguments.
    pub fn tensors(&self) -> usize {
        self.view.tensor_count
    }

    /// Whether a tensor is defined, and not an optional one that is not there.
    pub fn is_defined(&self, tensor: usize) -> bool {
        self.views()[tensor].defined
    }

    /// Logical sizes.
    pub fn sizes(&self, tensor: usize) -> &[i64] {
        let view = &self.views()[tensor];
        // SAFETY: the sizes outlive the call.
        unsafe { slice(view.sizes, view.dims as usize) }
    }

    /// The kind of the elements of a tensor that is defined.
    pub fn kind(&self, tensor: usize) -> Option<Kind> {
        self.tensor(tensor).map(|tensor| tensor.kind())
    }

    /// The spec of a tensor; None if it is plain.
    pub fn spec(&self, tensor: usize) -> Option<&S> {
        let spec = self.views()[tensor].spec.cast::<S>();
        // SAFETY: specs are `Arc<S>`, which the tensor keeps; that tensor is replaced by methods only
        // that borrow the call mutably.
        unsafe { spec.as_ref() }
    }

    /// The same, to keep.
    pub fn owned_spec(&self, tensor: usize) -> Option<Arc<S>> {
        self.spec(tensor).map(|spec| {
            // SAFETY: the reference is to what is in an `Arc<S>`.
            unsafe {
                Arc::increment_strong_count(spec);
                Arc::from_raw(spec)
            }
        })
    }

    /// Whether a tensor should be a view of another one, and does not share its memory.
    pub fn is_detached_view(&self, tensor: usize) -> bool {
        self.views()[tensor].detached_view
    }

    /// The tensor itself; None if it is not defined.
    pub fn tensor(&self, tensor: usize) -> Option<Tensor> {
        let view = &self.views()[tensor];
        // SAFETY: the tensor outlives the call; the handle is C++'s, and not dropped here.
        view.defined.then(|| unsafe { borrow(view.tensor) }.shallow_clone())
    }

    /// Appends what decides how the operation is carried out: the operator, kinds, sizes and specs
    /// of tensors (and strides, for views), and arguments. Of numbers with a fraction only whether
    /// they are zero.
    pub fn key(&self, id: impl Fn(&S) -> u64, key: &mut Vec<u64>) {
        key.push(self.view.id as u64);
        for (index, view) in self.views().iter().enumerate() {
            let flags = u64::from(view.defined) | u64::from(view.detached_view) << 1;
            let kind = u64::from(view.kind as u8) << 8;
            key.push(flags | kind | (view.dims as u64) << 16);
            key.push(self.spec(index).map_or(0, &id));
            key.extend(self.sizes(index).iter().map(|&size| size as u64));
            if self.view.is_view {
                // SAFETY: the strides outlive the call.
                let strides: &[i64] = unsafe { slice(view.strides, view.dims as usize) };
                key.extend(strides.iter().map(|&stride| stride as u64));
            }
        }
        for raw in self.raw_arguments() {
            key.push(u64::from(raw.tag) | u64::from(raw.count) << 8);
            match raw.tag {
                ffi::INT | ffi::BOOL => key.push(raw.integer as u64),
                ffi::FLOAT => key.push(u64::from(raw.number == 0.0)),
                ffi::INTS => {
                    // SAFETY: the list outlives the call.
                    let values: &[i64] = unsafe { slice(raw.integers, raw.count as usize) };
                    key.extend(values.iter().map(|&value| value as u64));
                }
                _ => {}
            }
        }
    }

    /// Has the operation run on this instead of the tensor's own local.
    ///
    /// # Errors
    /// libtorch's.
    pub fn set_local(&mut self, tensor: usize, local: Option<&Tensor>) -> Result<(), Error> {
        assert!(tensor < self.view.tensor_count, "the call has no tensor {tensor}");
        let local = local.map_or(null(), |local| local.as_ptr());
        // SAFETY: the call and the tensor are alive.
        unsafe { check("a call", ffi::flow_call_set_local(self.view.call, tensor, local)) }
    }

    /// What the operation runs on as this tensor.
    pub fn local(&self, tensor: usize) -> Option<Tensor> {
        assert!(tensor < self.view.tensor_count, "the call has no tensor {tensor}");
        // SAFETY: the call is alive; the result is a handle of our own, or null.
        unsafe {
            let local = ffi::flow_call_local(self.view.call, tensor);
            (!local.is_null()).then(|| Tensor::from_ptr(local))
        }
    }

    /// Has the operation run with this list as an argument.
    ///
    /// # Errors
    /// libtorch's.
    pub fn set_ints(&mut self, argument: usize, values: &[i64]) -> Result<(), Error> {
        assert!(argument < self.view.argument_count, "the call has no argument {argument}");
        let (values, count) = (values.as_ptr(), values.len());
        // SAFETY: the call and the list are alive.
        unsafe {
            check("a call", ffi::flow_call_set_integers(self.view.call, argument, values, count))
        }
    }

    /// Runs the operation on the locals.
    ///
    /// # Errors
    /// The operation's own.
    pub fn run(&mut self) -> Result<(), Error> {
        // SAFETY: the call is alive.
        unsafe { check("a call", ffi::flow_call_run(self.view.call)) }
    }

    /// The results of [`Call::run`].
    ///
    /// # Errors
    /// A result is of another type.
    pub fn results(&self) -> Result<Vec<LocalResult>, Error> {
        (0..self.view.return_count).map(|index| self.result(index)).collect()
    }

    /// A result of [`Call::run`].
    ///
    /// # Errors
    /// It is of another type, or the operation was not run.
    pub fn result(&self, index: usize) -> Result<LocalResult, Error> {
        let mut tensors = Vec::<Option<Tensor>>::new();
        let mut scalar = ScalarView::default();
        let mut is_list = false;
        // SAFETY: the call is alive, and the rest outlives this.
        unsafe {
            let data = (&raw mut tensors).cast();
            check(
                "a call",
                ffi::flow_call_result(
                    self.view.call,
                    index,
                    data,
                    push_result,
                    &mut is_list,
                    &mut scalar,
                ),
            )?;
        }
        Ok(match scalar.tag {
            ffi::INT => LocalResult::Scalar(Scalar::Int(scalar.integer)),
            ffi::FLOAT => LocalResult::Scalar(Scalar::Float(scalar.number)),
            ffi::BOOL => LocalResult::Scalar(Scalar::Bool(scalar.integer != 0)),
            _ if is_list => LocalResult::Tensors(tensors.into_iter().flatten().collect()),
            _ => LocalResult::Tensor(tensors.pop().flatten()),
        })
    }

    /// The strides of the first tensor that a view operation makes of the logical tensors; None if
    /// libtorch cannot tell.
    pub fn view_strides(&self) -> Option<Vec<i64>> {
        let mut strides = vec![0; 64];
        let mut count = 0;
        // SAFETY: the call is alive; there is room for as many as is said.
        let is_known = unsafe {
            ffi::flow_call_view_strides(
                self.view.call,
                strides.as_mut_ptr(),
                strides.len(),
                &mut count,
            )
        };
        strides.truncate(count);
        is_known.then_some(strides)
    }

    /// The tensors that the caller gets as result `index`; None for an undefined one.
    pub fn returned(&self, index: usize) -> Vec<Option<Tensor>> {
        let mut tensors = Vec::<Option<Tensor>>::new();
        // SAFETY: the call is alive, and the list outlives this.
        unsafe {
            let data = (&raw mut tensors).cast();
            ffi::flow_call_returned(self.view.call, index, data, push_result);
        }
        tensors
    }

    /// Autograd's node of this operation. To be asked before [`Call::run`].
    pub fn node(&self) -> Node {
        let requires_grad =
            |tensor: Option<Tensor>| tensor.is_some_and(|tensor| tensor.requires_grad());
        // SAFETY: the function only reads the thread's state.
        let is_noted = unsafe { ffi::flow_grad_mode() };
        Node::now(is_noted && (0..self.tensors()).any(|tensor| requires_grad(self.tensor(tensor))))
    }

    /// The argument that a return is, if the operation writes and returns it.
    pub fn written(&self, index: usize) -> Option<usize> {
        // SAFETY: the call is alive.
        usize::try_from(unsafe { ffi::flow_call_writes(self.view.call, index) }).ok()
    }

    /// Returns result `index` of [`Call::run`] to the caller: as a global tensor, or all tensors of a
    /// list so, or a number as it is.
    ///
    /// # Errors
    /// libtorch's.
    pub fn output(&mut self, index: usize, output: &Output<'_, S>) -> Result<(), Error> {
        assert!(
            output.split_dims.len() == output.split_sizes.len(),
            "each dimension that is split has a size"
        );
        let view = OutputView {
            spec: Arc::into_raw(output.spec.clone()).cast(),
            split_dims: output.split_dims.as_ptr(),
            split_sizes: output.split_sizes.as_ptr(),
            splits: output.split_dims.len(),
            strides: output.strides.as_ptr(),
            stride_count: output.strides.len(),
            shares: output.shares,
            detached_view: output.is_detached_view,
        };
        // SAFETY: the call and the lists are alive; the spec is given away.
        unsafe {
            check("a call", ffi::flow_call_output(self.view.call, index, view, clone_spec::<S>))
        }
    }

    /// Returns a tensor to the caller; None for an undefined one.
    ///
    /// # Errors
    /// libtorch's.
    pub fn output_tensor(&mut self, tensor: Option<&Tensor>) -> Result<(), Error> {
        let tensor = tensor.map_or(null(), |tensor| tensor.as_ptr());
        // SAFETY: the call and the tensor are alive.
        unsafe { check("a call", ffi::flow_call_output_tensor(self.view.call, tensor)) }
    }

    /// Returns a list of tensors to the caller.
    ///
    /// # Errors
    /// libtorch's.
    pub fn output_tensors(&mut self, tensors: &[Tensor]) -> Result<(), Error> {
        let tensors: Vec<_> = tensors.iter().map(|tensor| tensor.as_ptr()).collect();
        let (tensors, count) = (tensors.as_ptr(), tensors.len());
        // SAFETY: the call and the tensors are alive.
        unsafe { check("a call", ffi::flow_call_output_tensors(self.view.call, tensors, count)) }
    }

    /// Returns the argument that the operation has written.
    ///
    /// # Errors
    /// Return `index` is no such argument.
    pub fn output_written(&mut self, index: usize) -> Result<(), Error> {
        // SAFETY: the call is alive.
        unsafe { check("a call", ffi::flow_call_output_written(self.view.call, index)) }
    }

    /// Returns a number to the caller.
    ///
    /// # Errors
    /// libtorch's.
    pub fn output_scalar(&mut self, scalar: Scalar) -> Result<(), Error> {
        let view = match scalar {
            Scalar::Int(integer) => ScalarView { tag: ffi::INT, integer, number: 0.0 },
            Scalar::Float(number) => ScalarView { tag: ffi::FLOAT, integer: 0, number },
            Scalar::Bool(flag) => {
                ScalarView { tag: ffi::BOOL, integer: i64::from(flag), number: 0.0 }
            }
        };
        // SAFETY: the call is alive.
        unsafe { check("a call", ffi::flow_call_output_scalar(self.view.call, view)) }
    }
}

/// # Safety
///
/// `data` must point to `count` values that outlive the result, if there are any.
unsafe fn slice<'a, T>(data: *const T, count: usize) -> &'a [T] {
    match count {
        0 => &[],
        // SAFETY: the caller's promise.
        _ => unsafe { std::slice::from_raw_parts(data, count) },
    }
}

/// # Safety
///
/// `tensor` must be valid as long as the result.
unsafe fn borrow(tensor: *const C_tensor) -> ManuallyDrop<Tensor> {
    // SAFETY: the caller's promise; the handle is not dropped here.
    ManuallyDrop::new(unsafe { Tensor::from_ptr(tensor.cast_mut()) })
}

/// # Safety
///
/// `view` must be valid during the call, with specs that are `Arc<D::Spec>`.
unsafe extern "C" fn call_dispatch<D: Dispatcher>(view: *const CallView) -> *mut c_char {
    report("an operation on global tensors", || {
        // SAFETY: the caller's promise.
        let mut call = Call { view: unsafe { &*view }, specs: PhantomData };
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
/// `spec` must come from `Arc::<S>::into_raw` and not be used again.
unsafe extern "C" fn drop_spec<S>(spec: *const c_void) {
    // A panic of a destructor ends here: the panic hook has reported it.
    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        // SAFETY: the caller's promise.
        drop(unsafe { Arc::from_raw(spec.cast::<S>()) });
    }));
}

/// # Safety
///
/// `spec` must come from `Arc::<S>::into_raw` and be alive.
unsafe extern "C" fn clone_spec<S>(spec: *const c_void) -> *const c_void {
    // SAFETY: the caller's promise.
    unsafe { Arc::increment_strong_count(spec.cast::<S>()) };
    spec
}

/// # Safety
///
/// `tensors` must point to a `Vec<Option<Tensor>>` that nothing else uses during the call, and
/// `tensor` be valid.
unsafe extern "C" fn push_result(tensors: *mut c_void, tensor: *const C_tensor) {
    // Only a failed allocation panics here.
    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        // SAFETY: the caller's promise.
        let (tensors, tensor) =
            unsafe { (&mut *tensors.cast::<Vec<Option<Tensor>>>(), borrow(tensor)) };
        tensors.push(tensor.defined().then(|| tensor.shallow_clone()));
    }));
}
