//! An operation, on its way.

use std::ffi::{CStr, c_void};
use std::marker::PhantomData;
use std::ptr::null;

use tch::{Kind, Tensor};
use torch_sys::C_tensor;

use super::node::Node;
use super::value::{Argument, LocalResult, Scalar, Wrapping};
use crate::error::Error;
use crate::ffi::global::{self as ffi, ArgumentView, CallView, ScalarView, TensorView};
use crate::ffi::{borrow, check, slice};

/// An operation of libtorch on global tensors, on its way.
pub struct Call<'a, S> {
    /// The operation's name, as in `aten::add`.
    pub name: &'a str,
    /// The overload, as in `add.Tensor`; empty for the default one.
    pub overload: &'a str,
    /// The number of values that the operation returns.
    pub returns: usize,
    /// Whether results are views of an input.
    pub is_view: bool,
    /// Whether the operation changes the sizes of the tensor that it writes, as `transpose_`.
    pub reshapes: bool,
    /// Whether the operation draws random numbers.
    pub is_random: bool,
    /// Whether the shapes of results depend on values.
    pub is_dynamic: bool,
    /// Whether all results are tensors, or lists of them.
    pub gives_tensors: bool,
    /// Whether gradients are asked for, where the operation is called.
    pub grad_mode: bool,
    view: &'a CallView,
    specs: PhantomData<S>,
}

impl<'a, S: Send + Sync + 'static> Call<'a, S> {
    /// # Safety
    ///
    /// What `view` points to must be alive as long as this, and its specs be `Arc<S>`.
    pub(super) unsafe fn new(view: &'a CallView) -> Self {
        // SAFETY: the names are C strings that live as long as the view.
        let [name, overload] =
            unsafe { [view.name, view.overload].map(|text| CStr::from_ptr(text)) };
        Self {
            name: name.to_str().unwrap_or("?"),
            overload: overload.to_str().unwrap_or("?"),
            returns: view.return_count,
            is_view: view.is_view,
            reshapes: view.reshapes,
            is_random: view.is_random,
            is_dynamic: view.is_dynamic,
            gives_tensors: view.gives_tensors,
            grad_mode: view.grad_mode,
            view,
            specs: PhantomData,
        }
    }

    fn raw_arguments(&self) -> &[ArgumentView] {
        // SAFETY: the list outlives the call.
        unsafe { slice(self.view.arguments, self.view.argument_count) }
    }

    fn views(&self) -> &[TensorView] {
        // SAFETY: the list outlives the call.
        unsafe { slice(self.view.tensors, self.view.tensor_count) }
    }

    /// Returns the arguments, in the order of the schema.
    pub fn arguments(&self) -> Vec<Argument<'_>> {
        // SAFETY: the arguments' lists outlive the call.
        self.raw_arguments().iter().map(|raw| unsafe { Argument::of(raw) }).collect()
    }

    /// Returns whether the operation writes the tensors of an argument.
    pub fn is_written(&self, argument: usize) -> bool {
        self.raw_arguments()[argument].written
    }

    /// Returns whether an argument only receives a result, as `out`.
    pub fn is_out(&self, argument: usize) -> bool {
        self.raw_arguments()[argument].out
    }

    /// Returns the number of tensors among the arguments.
    pub fn tensors(&self) -> usize {
        self.view.tensor_count
    }

    /// Returns whether a tensor is defined, and not an optional one that is not there.
    pub fn is_defined(&self, tensor: usize) -> bool {
        self.views()[tensor].defined
    }

    /// Returns the logical sizes.
    pub fn sizes(&self, tensor: usize) -> &[i64] {
        let view = &self.views()[tensor];
        // SAFETY: the sizes outlive the call.
        unsafe { slice(view.sizes, view.dims as usize) }
    }

    /// Returns the kind of the elements of a tensor that is defined.
    pub fn kind(&self, tensor: usize) -> Option<Kind> {
        self.tensor(tensor).map(|tensor| tensor.kind())
    }

    /// Returns the spec of a tensor; None if it is plain.
    pub fn spec(&self, tensor: usize) -> Option<&S> {
        let spec = self.views()[tensor].spec.cast::<S>();
        // SAFETY: specs are `Arc<S>`, which the tensor keeps; that tensor is replaced by methods only
        // that borrow the call mutably.
        unsafe { spec.as_ref() }
    }

    /// Returns whether a tensor should be a view of another one, and does not share its memory.
    pub fn is_detached_view(&self, tensor: usize) -> bool {
        self.views()[tensor].detached_view
    }

    /// Returns the tensor itself; None if it is not defined.
    pub fn tensor(&self, tensor: usize) -> Option<Tensor> {
        let view = &self.views()[tensor];
        // SAFETY: the tensor outlives the call; the handle is C++'s, and not dropped here.
        view.defined.then(|| unsafe { borrow(view.tensor) }.shallow_clone())
    }

    /// Returns the words that decide how the operation is carried out: the operator, kinds, sizes
    /// and specs of tensors (and strides, for views), and arguments. Of numbers with a fraction
    /// only whether they are zero, and whether they are finite.
    pub fn key(&self) -> &[u64] {
        // SAFETY: the key outlives the call.
        unsafe { slice(self.view.key, self.view.key_count) }
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

    /// Returns the tensor that the operation runs on in place of this one.
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
        let count = values.len();
        let values = values.as_ptr();
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

    /// Runs the operation on tensors of the logical sizes that have no elements; [`Call::result`] has what
    /// it gives. Returns whether libtorch can do so. To be asked before [`Call::run`].
    ///
    /// # Errors
    /// The operation's own: the sizes do not fit.
    pub fn run_on_meta(&self) -> Result<bool, Error> {
        let mut is_known = false;
        // SAFETY: the call is alive, and the flag outlives this.
        unsafe {
            check("a call", ffi::flow_call_run_on_meta(self.view.call, &mut is_known))?;
        }
        Ok(is_known)
    }

    /// Checks the arguments, other than tensors, of an operation that draws random numbers.
    ///
    /// # Errors
    /// The operation's own, such as of a probability of 2.
    pub fn check_arguments(&self) -> Result<(), Error> {
        // SAFETY: the call is alive.
        unsafe { check("a call", ffi::flow_call_check_arguments(self.view.call)) }
    }

    /// Carries out the operation with these tensors in place of the call's, as a call of its own: the
    /// caller gets its results.
    ///
    /// # Errors
    /// The operation's own.
    pub fn run_with(&mut self, tensors: &[Option<Tensor>]) -> Result<(), Error> {
        assert!(tensors.len() == self.view.tensor_count, "the call has other tensors");
        let tensors: Vec<_> =
            tensors.iter().map(|tensor| tensor.as_ref().map_or(null(), Tensor::as_ptr)).collect();
        let count = tensors.len();
        let tensors = tensors.as_ptr();
        // SAFETY: the call and the tensors are alive.
        unsafe { check("a call", ffi::flow_call_run_with(self.view.call, tensors, count)) }
    }

    /// Returns a result of [`Call::run`].
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

    /// Returns the tensors that the caller gets as result `index`; None for an undefined one.
    pub fn returned(&self, index: usize) -> Vec<Option<Tensor>> {
        let mut tensors = Vec::<Option<Tensor>>::new();
        // SAFETY: the call is alive, and the list outlives this.
        unsafe {
            let data = (&raw mut tensors).cast();
            ffi::flow_call_returned(self.view.call, index, data, push_result);
        }
        tensors
    }

    /// Returns autograd's node of this operation. To be asked before [`Call::run`].
    pub fn node(&self) -> Node {
        // SAFETY: the function only reads the thread's state.
        let is_noted = unsafe { ffi::flow_grad_mode() };
        let mut tensors = (0..self.tensors()).filter_map(|index| self.tensor(index));
        Node::now(is_noted && tensors.any(|tensor| tensor.requires_grad()))
    }

    /// Returns the argument that a return is, if the operation writes and returns it.
    pub fn written(&self, index: usize) -> Option<usize> {
        // SAFETY: the call is alive.
        usize::try_from(unsafe { ffi::flow_call_writes(self.view.call, index) }).ok()
    }

    /// Returns result `index` of [`Call::run`] to the caller: as a global tensor, or all tensors of a
    /// list so, or a number as it is.
    ///
    /// # Errors
    /// libtorch's.
    pub fn output(&mut self, index: usize, output: &Wrapping<'_, S>) -> Result<(), Error> {
        // SAFETY: the call, the spec and the lists are alive.
        unsafe { check("a call", ffi::flow_call_output(self.view.call, index, output.view())) }
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
        let count = tensors.len();
        let tensors = tensors.as_ptr();
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
        let view = scalar.view();
        // SAFETY: the call is alive.
        unsafe { check("a call", ffi::flow_call_output_scalar(self.view.call, view)) }
    }
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
