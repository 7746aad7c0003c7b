//! The shim's functions, and errors on their way between Rust and C++.

use std::any::Any;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};

use tch::Tensor;
use torch_sys::{C_optimizer, C_tensor};

use crate::error::{BoxError, Error};

pub mod global;

/// A closure for C++ to own: `call` returns an error's text (see [`report`]) or null, `drop` is
/// called once.
#[repr(C)]
pub struct Closure {
    pub data: *mut c_void,
    pub call: unsafe extern "C" fn(data: *mut c_void, argument: *const C_tensor) -> *mut c_char,
    pub drop: unsafe extern "C" fn(data: *mut c_void),
}

/// Tensors that are only read during a call; null stands for an undefined one.
#[repr(C)]
pub struct TensorSlice {
    pub tensors: *const *const C_tensor,
    pub count: usize,
}

/// Values that are only read during a call.
#[repr(C)]
pub struct BoolSlice {
    pub values: *const bool,
    pub count: usize,
}

/// A list of tensors that C++ owns; [`flow_push_tensor`] appends to it.
#[repr(C)]
pub struct TensorList {
    _opaque: [u8; 0],
}

/// The forward or backward of a custom function: see `function.cpp`.
#[repr(C)]
pub struct FunctionClosure {
    pub data: *mut c_void,
    pub call: unsafe extern "C" fn(
        data: *mut c_void,
        first: TensorSlice,
        second: TensorSlice,
        results: *mut TensorList,
        saved: *mut TensorList,
        needed: BoolSlice,
    ) -> *mut c_char,
    pub drop: unsafe extern "C" fn(data: *mut c_void),
}

/// A count of allocated bytes: see `allocated.cpp`.
#[repr(C)]
pub struct MeasurementHandle {
    _opaque: [u8; 0],
}

/// Where a backward begins: see `graph.cpp`.
#[repr(C)]
pub struct GraphHandle {
    _opaque: [u8; 0],
}

/// Changes a gradient: see `gradient.cpp`.
#[repr(C)]
pub struct GradientClosure {
    pub data: *mut c_void,
    pub call: unsafe extern "C" fn(
        data: *mut c_void,
        gradient: *const C_tensor,
        result: *mut *mut C_tensor,
    ) -> *mut c_char,
    pub drop: unsafe extern "C" fn(data: *mut c_void),
}

/// Memory for a tensor, freed by dropping its owner.
#[repr(C)]
pub struct RawBlock {
    pub data: *mut c_void,
    pub owner: *mut c_void,
}

/// Where a tensor's elements are.
#[repr(C)]
#[derive(Default)]
pub struct TensorMemory {
    pub data: Option<std::ptr::NonNull<u8>>,
    pub bytes: usize,
    pub on_cpu: bool,
    pub on_cuda: bool,
    pub dense_contiguous: bool,
}

pub type TakeBlock = unsafe extern "C" fn(bytes: usize, block: *mut RawBlock) -> bool;
pub type DropOwner = unsafe extern "C" fn(owner: *mut c_void);
pub type VisitTensor =
    unsafe extern "C" fn(data: *mut c_void, name: *const c_char, tensor: *mut C_tensor);

pub type VisitText = unsafe extern "C" fn(data: *mut c_void, text: *const c_char);

pub type PushTensor = unsafe extern "C" fn(tensors: *mut c_void, tensor: *mut C_tensor);

unsafe extern "C" {
    pub fn flow_push_tensor(tensors: *mut TensorList, tensor: *const C_tensor) -> *mut c_char;
    pub fn flow_apply_function(
        inputs: TensorSlice,
        forward: FunctionClosure,
        backward: FunctionClosure,
        outputs: *mut c_void,
        push: PushTensor,
    ) -> *mut c_char;
    pub fn flow_grad_hook(parameter: *const C_tensor, data: *mut *mut c_void) -> *mut c_char;
    pub fn flow_set_grad_hook(parameter: *const C_tensor, closure: Closure) -> *mut c_char;
    pub fn flow_grad_is_exclusive(parameter: *const C_tensor, exclusive: *mut bool) -> *mut c_char;
    pub fn flow_at_end_of_backward(closure: Closure) -> *mut c_char;
    pub fn flow_on_backward(tensor: *const C_tensor, closure: Closure) -> *mut c_char;
    pub fn flow_map_gradient(tensor: *const C_tensor, closure: GradientClosure) -> *mut c_char;
    pub fn flow_graph_new(outputs: TensorSlice, graph: *mut *mut GraphHandle) -> *mut c_char;
    pub fn flow_graph_drop(graph: *mut GraphHandle);
    pub fn flow_graph_backward(graph: *mut GraphHandle, gradients: TensorSlice) -> *mut c_char;
    pub fn flow_graph_backward_inputs(
        graph: *mut GraphHandle,
        gradients: TensorSlice,
        inputs: TensorSlice,
        results: *mut c_void,
        push: PushTensor,
    ) -> *mut c_char;
    pub fn flow_graph_backward_weights(graph: *mut GraphHandle) -> *mut c_char;
    pub fn flow_measure_allocated(measurement: *mut *mut MeasurementHandle) -> *mut c_char;
    pub fn flow_end_measurement(measurement: *mut MeasurementHandle) -> usize;
    pub fn flow_rng_state(like: *const C_tensor, state: *mut *mut C_tensor) -> *mut c_char;
    pub fn flow_set_rng_state(like: *const C_tensor, state: *const C_tensor) -> *mut c_char;
    pub fn flow_use_count(tensor: *const C_tensor) -> usize;
    pub fn flow_set_grad(parameter: *const C_tensor, grad: *const C_tensor) -> *mut c_char;
    pub fn flow_check_plain(tensor: *const C_tensor) -> *mut c_char;
    pub fn flow_identity(tensor: *const C_tensor) -> *const c_void;
    pub fn flow_memory(tensor: *const C_tensor, memory: *mut TensorMemory) -> *mut c_char;
    pub fn flow_load_cuda() -> *mut c_char;
    pub fn flow_current_stream(device: c_int, stream: *mut *mut c_void) -> *mut c_char;
    pub fn flow_optimizer_parameters(
        optimizer: *const C_optimizer,
        data: *mut c_void,
        visit: VisitText,
    ) -> *mut c_char;
    pub fn flow_optimizer_state(
        optimizer: *const C_optimizer,
        data: *mut c_void,
        visit: VisitTensor,
    ) -> *mut c_char;
    pub fn flow_set_optimizer_state(
        optimizer: *mut C_optimizer,
        names: *const *const c_char,
        tensors: *const *const C_tensor,
        count: usize,
    ) -> *mut c_char;
    pub fn flow_own_memory(
        tensor: *const C_tensor,
        owner: *mut c_void,
        drop: DropOwner,
    ) -> *mut c_char;
    pub fn flow_set_cpu_allocator(
        take: TakeBlock,
        drop: DropOwner,
        min_bytes: usize,
    ) -> *mut c_char;
}

/// Makes a `Result` of what a function of the shim returned.
///
/// # Safety
///
/// `text` must be null or a C string from `malloc`, and is freed.
pub unsafe fn check(operation: &'static str, text: *mut c_char) -> Result<(), Error> {
    if text.is_null() {
        return Ok(());
    }
    // SAFETY: not null, so a C string, which is not used after it is freed.
    let reason = unsafe {
        let reason = CStr::from_ptr(text).to_string_lossy().into_owned();
        libc::free(text.cast());
        reason
    };
    Err(Error::Libtorch { operation, reason })
}

/// Runs `body` for C++: its error or panic as a text that C++ frees, or null. `who` is named in the
/// text of a panic.
pub fn report(who: &str, body: impl FnOnce() -> Result<(), BoxError>) -> *mut c_char {
    let text = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => return std::ptr::null_mut(),
        Ok(Err(error)) => error.to_string(),
        Err(payload) => format!("{who} panicked: {}", panic_text(payload.as_ref())),
    };
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    // SAFETY: `text` is a C string.
    unsafe { libc::strdup(text.as_ptr()) }
}

/// The text of a panic.
pub fn panic_text(payload: &(dyn Any + Send)) -> &str {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("no text")
}

/// A list of C++'s.
///
/// # Safety
///
/// `data` must point to `count` values that outlive the result, if there are any.
pub unsafe fn slice<'a, T>(data: *const T, count: usize) -> &'a [T] {
    match count {
        0 => &[],
        // SAFETY: the caller's promise.
        _ => unsafe { std::slice::from_raw_parts(data, count) },
    }
}

/// A handle that the result does not drop.
///
/// # Safety
///
/// `tensor` must be valid as long as the result.
pub unsafe fn borrow(tensor: *const C_tensor) -> ManuallyDrop<Tensor> {
    // SAFETY: the caller's promise; the handle is not dropped here.
    ManuallyDrop::new(unsafe { Tensor::from_ptr(tensor.cast_mut()) })
}

/// Drops the `Box<T>` behind `data`, for C++. The panic of a destructor ends here: the panic hook
/// has reported it.
///
/// # Safety
///
/// `data` must come from `Box::<T>::into_raw` and not be used again.
pub unsafe extern "C" fn drop_box<T>(data: *mut c_void) {
    // SAFETY: the caller's promise.
    let _ = catch_unwind(AssertUnwindSafe(|| drop(unsafe { Box::from_raw(data.cast::<T>()) })));
}
