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
    pub tensor: *const C_tensor,
    pub sizes: *const i64,
    pub strides: *const i64,
    pub spec: *const c_void,
    pub dims: i32,
    pub kind: i8,
    pub defined: bool,
    pub detached_view: bool,
}

pub const NONE: u8 = 0;
pub const TENSOR: u8 = 1;
pub const TENSORS: u8 = 2;
pub const INT: u8 = 3;
pub const FLOAT: u8 = 4;
pub const BOOL: u8 = 5;
pub const INTS: u8 = 6;

/// An argument of an operation; `tag` says what it is.
#[repr(C)]
pub struct Argument {
    pub integer: i64,
    pub number: f64,
    pub integers: *const i64,
    pub first: u32,
    pub count: u32,
    pub tag: u8,
    pub written: bool,
    pub out: bool,
}

/// A number; `tag` says what it is.
#[repr(C)]
#[derive(Default)]
pub struct ScalarView {
    pub tag: u8,
    pub integer: i64,
    pub number: f64,
}

/// C++'s object for a running operation that may be known.
#[repr(C)]
pub struct RawFastCall {
    _opaque: [u8; 0],
}

/// The key of an operation, which is known once it was dispatched.
#[repr(C)]
pub struct FastView {
    pub call: *mut RawFastCall,
    pub key: *const u64,
    pub key_count: usize,
    /// Of the first global tensor.
    pub spec: *const c_void,
}

/// A running operation.
#[repr(C)]
pub struct CallView {
    pub call: *mut RawCall,
    pub key: *const u64,
    pub key_count: usize,
    pub name: *const c_char,
    pub overload: *const c_char,
    pub arguments: *const Argument,
    pub tensors: *const TensorView,
    pub argument_count: usize,
    pub tensor_count: usize,
    pub return_count: usize,
    pub is_view: bool,
    pub reshapes: bool,
    pub is_random: bool,
    pub is_dynamic: bool,
    pub gives_tensors: bool,
    pub grad_mode: bool,
}

/// How a result of the local operation is wrapped.
#[repr(C)]
pub struct OutputView {
    pub spec: *const c_void,
    pub split_dims: *const i32,
    pub split_sizes: *const i64,
    pub splits: usize,
    pub strides: *const i64,
    pub stride_count: usize,
    pub shares: bool,
    pub detached_view: bool,
}

/// The functions that C++ calls.
#[repr(C)]
pub struct Callbacks {
    pub fast: unsafe extern "C" fn(call: *const FastView, done: *mut bool) -> *mut c_char,
    pub dispatch: unsafe extern "C" fn(call: *const CallView) -> *mut c_char,
    pub gradient: unsafe extern "C" fn(
        leaf: *const C_tensor,
        gradient: *const C_tensor,
        may_take: bool,
        exclusive: bool,
        boxed: *mut *mut C_tensor,
        taken: *mut bool,
    ) -> *mut c_char,
    pub spec_id: unsafe extern "C" fn(spec: *const c_void) -> u64,
    pub clone_spec: unsafe extern "C" fn(spec: *const c_void) -> *const c_void,
    pub drop_spec: unsafe extern "C" fn(spec: *const c_void),
}

pub type VisitResult = unsafe extern "C" fn(data: *mut c_void, tensor: *const C_tensor);

unsafe extern "C" {
    pub fn flow_global_register(callbacks: Callbacks) -> *mut c_char;
    pub fn flow_global_spec(tensor: *const C_tensor) -> *const c_void;
    pub fn flow_global_local(tensor: *const C_tensor) -> *mut C_tensor;
    pub fn flow_global_wrap(
        local: *const C_tensor,
        like: *const C_tensor,
        spec: *const c_void,
        sizes: *const i64,
        dims: usize,
        shares: bool,
        result: *mut *mut C_tensor,
    ) -> *mut c_char;
    pub fn flow_global_outside(
        like: *const C_tensor,
        sizes: *const i64,
        dims: usize,
        output: OutputView,
        result: *mut *mut C_tensor,
    ) -> *mut c_char;
    pub fn flow_global_assign(tensor: *const C_tensor, other: *const C_tensor) -> *mut c_char;
    pub fn flow_fast_set_integers(
        call: *mut RawFastCall,
        argument: usize,
        values: *const i64,
        count: usize,
    ) -> *mut c_char;
    pub fn flow_fast_run(call: *mut RawFastCall) -> *mut c_char;
    pub fn flow_fast_output(
        call: *mut RawFastCall,
        index: usize,
        output: OutputView,
    ) -> *mut c_char;
    pub fn flow_call_set_local(
        call: *mut RawCall,
        index: usize,
        local: *const C_tensor,
    ) -> *mut c_char;
    pub fn flow_call_local(call: *const RawCall, index: usize) -> *mut C_tensor;
    pub fn flow_call_set_integers(
        call: *mut RawCall,
        argument: usize,
        values: *const i64,
        count: usize,
    ) -> *mut c_char;
    pub fn flow_call_run(call: *mut RawCall) -> *mut c_char;
    pub fn flow_call_run_with(
        call: *mut RawCall,
        tensors: *const *const C_tensor,
        count: usize,
    ) -> *mut c_char;
    pub fn flow_call_result(
        call: *const RawCall,
        index: usize,
        data: *mut c_void,
        visit: VisitResult,
        is_list: *mut bool,
        scalar: *mut ScalarView,
    ) -> *mut c_char;
    pub fn flow_call_view_strides(
        call: *const RawCall,
        strides: *mut i64,
        capacity: usize,
        count: *mut usize,
    ) -> bool;
    pub fn flow_global_id(tensor: *const C_tensor) -> u64;
    pub fn flow_call_returned(
        call: *const RawCall,
        index: usize,
        data: *mut c_void,
        visit: VisitResult,
    );
    pub fn flow_autograd_node(is_made: bool, number: *mut u64, is_backward: *mut bool) -> bool;
    pub fn flow_grad_mode() -> bool;
    pub fn flow_call_writes(call: *const RawCall, index: usize) -> c_int;
    pub fn flow_call_output(call: *mut RawCall, index: usize, output: OutputView) -> *mut c_char;
    pub fn flow_call_output_tensor(call: *mut RawCall, tensor: *const C_tensor) -> *mut c_char;
    pub fn flow_call_output_tensors(
        call: *mut RawCall,
        tensors: *const *const C_tensor,
        count: usize,
    ) -> *mut c_char;
    pub fn flow_call_output_written(call: *mut RawCall, index: usize) -> *mut c_char;
    pub fn flow_call_output_scalar(call: *mut RawCall, scalar: ScalarView) -> *mut c_char;
}
