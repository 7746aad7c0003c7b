//! The functions of `shim/global/`.

use std::ffi::{c_char, c_int, c_void};

use torch_sys::C_tensor;

/// C++'s object for a running operation.
#[repr(C)]
pub struct RawCall {
    _opaque: [u8; 0],
}

/// A tensor among an operation's arguments.
#[repr(C)]
pub struct TensorView {
    /// The tensor; null for an undefined one.
    pub tensor: *const C_tensor,
    /// The logical sizes.
    pub sizes: *const i64,
    /// The logical strides.
    pub strides: *const i64,
    /// The spec; null for a plain tensor.
    pub spec: *const c_void,
    /// The number of dimensions.
    pub dims: i32,
    /// libtorch's number of the kind.
    pub kind: i8,
    /// Whether the tensor is defined.
    pub defined: bool,
    /// Whether it should be a view, and does not share the other tensor's memory.
    pub detached_view: bool,
}

/// The tag of no value.
pub const NONE: u8 = 0;
/// The tag of a tensor.
pub const TENSOR: u8 = 1;
/// The tag of a list of tensors.
pub const TENSORS: u8 = 2;
/// The tag of a whole number.
pub const INT: u8 = 3;
/// The tag of a number with a fraction.
pub const FLOAT: u8 = 4;
/// The tag of a truth value.
pub const BOOL: u8 = 5;
/// The tag of a list of whole numbers.
pub const INTS: u8 = 6;

/// An argument of an operation; `tag` says what it is.
#[repr(C)]
pub struct ArgumentView {
    /// The whole number, or 0 and 1.
    pub integer: i64,
    /// The number with a fraction.
    pub number: f64,
    /// The list of whole numbers.
    pub integers: *const i64,
    /// The index of the first tensor.
    pub first: u32,
    /// The length of a list.
    pub count: u32,
    /// The tag.
    pub tag: u8,
    /// Whether the operation writes it.
    pub written: bool,
    /// Whether it only receives a result.
    pub out: bool,
}

/// A number; `tag` says what it is.
#[repr(C)]
#[derive(Default)]
pub struct ScalarView {
    /// The tag.
    pub tag: u8,
    /// The whole number, or 0 and 1.
    pub integer: i64,
    /// The number with a fraction.
    pub number: f64,
}

/// C++'s object for a running operation that may be known.
#[repr(C)]
pub struct RawFastCall {
    _opaque: [u8; 0],
}

/// The key of an operation, which is known once it was dispatched.
#[repr(C)]
pub struct FastCallView {
    /// The object of C++.
    pub call: *mut RawFastCall,
    /// The words that decide how it is carried out.
    pub key: *const u64,
    /// The number of words.
    pub key_count: usize,
    /// The spec of the first global tensor.
    pub spec: *const c_void,
}

/// A running operation.
#[repr(C)]
pub struct CallView {
    /// The object of C++.
    pub call: *mut RawCall,
    /// The words that decide how it is carried out.
    pub key: *const u64,
    /// The number of words.
    pub key_count: usize,
    /// The name of the operator.
    pub name: *const c_char,
    /// The name of the overload.
    pub overload: *const c_char,
    /// The arguments.
    pub arguments: *const ArgumentView,
    /// The tensors among the arguments.
    pub tensors: *const TensorView,
    /// The number of arguments.
    pub argument_count: usize,
    /// The number of tensors.
    pub tensor_count: usize,
    /// The number of results.
    pub return_count: usize,
    /// Whether results are views of an input.
    pub is_view: bool,
    /// Whether it changes the sizes of the tensor that it writes.
    pub reshapes: bool,
    /// Whether it draws random numbers.
    pub is_random: bool,
    /// Whether the shapes of results depend on values.
    pub is_dynamic: bool,
    /// Whether all results are tensors, or lists of them.
    pub gives_tensors: bool,
    /// Whether gradients are asked for, where it is called.
    pub grad_mode: bool,
}

/// The way in which a result of the local operation is wrapped.
#[repr(C)]
pub struct OutputView {
    /// The spec of the global tensor.
    pub spec: *const c_void,
    /// The dimensions that are split.
    pub split_dims: *const i32,
    /// Their logical sizes.
    pub split_sizes: *const i64,
    /// The number of these dimensions.
    pub splits: usize,
    /// The logical strides; none for a contiguous tensor.
    pub strides: *const i64,
    /// The number of strides.
    pub stride_count: usize,
    /// Whether all ranks have all of it, so that the local's memory is the tensor's.
    pub shares: bool,
    /// Whether it should be a view of an input, and does not share that one's memory.
    pub detached_view: bool,
}

/// The functions that C++ calls.
#[repr(C)]
pub struct Callbacks {
    /// Runs an operation if it is known.
    pub fast: unsafe extern "C" fn(call: *const FastCallView, done: *mut bool) -> *mut c_char,
    /// Carries out an operation.
    pub dispatch: unsafe extern "C" fn(call: *const CallView) -> *mut c_char,
    /// Decides what becomes of the gradient of a leaf.
    pub gradient: unsafe extern "C" fn(
        leaf: *const C_tensor,
        gradient: *const C_tensor,
        may_take: bool,
        exclusive: bool,
        boxed: *mut *mut C_tensor,
        taken: *mut bool,
    ) -> *mut c_char,
    /// Returns the number of a spec.
    pub spec_id: unsafe extern "C" fn(spec: *const c_void) -> u64,
    /// Returns another handle of a spec.
    pub clone_spec: unsafe extern "C" fn(spec: *const c_void) -> *const c_void,
    /// Drops a handle of a spec.
    pub drop_spec: unsafe extern "C" fn(spec: *const c_void),
}

/// Takes a tensor, which stays the caller's; null for an undefined one.
pub type VisitResult = unsafe extern "C" fn(data: *mut c_void, tensor: *const C_tensor);

unsafe extern "C" {
    /// Registers the functions that C++ calls.
    pub fn flow_global_register(callbacks: Callbacks) -> *mut c_char;
    /// Returns a handle of a tensor's spec; null if it is plain.
    pub fn flow_global_spec(tensor: *const C_tensor) -> *const c_void;
    /// Returns the local of a global tensor; null where there is none.
    pub fn flow_global_local(tensor: *const C_tensor) -> *mut C_tensor;
    /// Makes a global tensor of a local.
    pub fn flow_global_wrap(
        local: *const C_tensor,
        like: *const C_tensor,
        spec: *const c_void,
        sizes: *const i64,
        dims: usize,
        shares: bool,
        result: *mut *mut C_tensor,
    ) -> *mut c_char;
    /// Makes a global tensor without a local.
    pub fn flow_global_outside(
        like: *const C_tensor,
        sizes: *const i64,
        dims: usize,
        output: OutputView,
        result: *mut *mut C_tensor,
    ) -> *mut c_char;
    /// Has a tensor become another one, with its sizes and spec.
    pub fn flow_global_assign(tensor: *const C_tensor, other: *const C_tensor) -> *mut c_char;
    /// Replaces a list among the arguments.
    pub fn flow_fast_set_integers(
        call: *mut RawFastCall,
        argument: usize,
        values: *const i64,
        count: usize,
    ) -> *mut c_char;
    /// Runs the operation on the locals.
    pub fn flow_fast_run(call: *mut RawFastCall) -> *mut c_char;
    /// Returns a result to the caller as a global tensor.
    pub fn flow_fast_output(
        call: *mut RawFastCall,
        index: usize,
        output: OutputView,
    ) -> *mut c_char;
    /// Sets the tensor that the operation runs on in place of an argument.
    pub fn flow_call_set_local(
        call: *mut RawCall,
        index: usize,
        local: *const C_tensor,
    ) -> *mut c_char;
    /// Returns the tensor that the operation runs on in place of an argument.
    pub fn flow_call_local(call: *const RawCall, index: usize) -> *mut C_tensor;
    /// Replaces a list among the arguments.
    pub fn flow_call_set_integers(
        call: *mut RawCall,
        argument: usize,
        values: *const i64,
        count: usize,
    ) -> *mut c_char;
    /// Runs the operation on the locals.
    pub fn flow_call_run(call: *mut RawCall) -> *mut c_char;
    /// Carries out the operation with other tensors, as a call of its own.
    pub fn flow_call_run_with(
        call: *mut RawCall,
        tensors: *const *const C_tensor,
        count: usize,
    ) -> *mut c_char;
    /// Visits the tensors of a result, or writes its number.
    pub fn flow_call_result(
        call: *const RawCall,
        index: usize,
        data: *mut c_void,
        visit: VisitResult,
        is_list: *mut bool,
        scalar: *mut ScalarView,
    ) -> *mut c_char;
    /// Runs the operation on tensors of the logical sizes that have no elements; says whether libtorch
    /// can do so.
    pub fn flow_call_run_on_meta(call: *mut RawCall, is_known: *mut bool) -> *mut c_char;
    /// Runs an operation that draws random numbers on tensors without elements, for its other arguments.
    pub fn flow_call_check_arguments(call: *const RawCall) -> *mut c_char;
    /// Returns the number of a global tensor; 0 if it has none.
    pub fn flow_global_id(tensor: *const C_tensor) -> u64;
    /// Visits the tensors that the caller gets as a result.
    pub fn flow_call_returned(
        call: *const RawCall,
        index: usize,
        data: *mut c_void,
        visit: VisitResult,
    );
    /// Finds where autograd is on this thread.
    pub fn flow_autograd_node(is_made: bool, number: *mut u64, is_backward: *mut bool) -> bool;
    /// Returns whether gradients are asked for on this thread.
    pub fn flow_grad_mode() -> bool;
    /// Returns the argument that a result is; -1 if it is none.
    pub fn flow_call_writes(call: *const RawCall, index: usize) -> c_int;
    /// Returns a result to the caller as a global tensor.
    pub fn flow_call_output(call: *mut RawCall, index: usize, output: OutputView) -> *mut c_char;
    /// Returns a tensor to the caller.
    pub fn flow_call_output_tensor(call: *mut RawCall, tensor: *const C_tensor) -> *mut c_char;
    /// Returns a list of tensors to the caller.
    pub fn flow_call_output_tensors(
        call: *mut RawCall,
        tensors: *const *const C_tensor,
        count: usize,
    ) -> *mut c_char;
    /// Returns the argument that the operation writes to the caller.
    pub fn flow_call_output_written(call: *mut RawCall, index: usize) -> *mut c_char;
    /// Returns a number to the caller.
    pub fn flow_call_output_scalar(call: *mut RawCall, scalar: ScalarView) -> *mut c_char;
}
