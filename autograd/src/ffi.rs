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
    /// The closure itself.
    pub data: *mut c_void,
    /// Calls the closure with a tensor.
    pub call: unsafe extern "C" fn(data: *mut c_void, argument: *const C_tensor) -> *mut c_char,
    /// Frees the closure.
    pub drop: unsafe extern "C" fn(data: *mut c_void),
}

/// Tensors that are only read during a call; null stands for an undefined one.
#[repr(C)]
pub struct TensorSlice {
    /// The first pointer.
    pub tensors: *const *const C_tensor,
    /// The number of pointers.
    pub count: usize,
}

/// Values that are only read during a call.
#[repr(C)]
pub struct BoolSlice {
    /// The first value.
    pub values: *const bool,
    /// The number of values.
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
    /// The closure itself.
    pub data: *mut c_void,
    /// Calls the closure: inputs and nothing forward, saved tensors and gradients backward.
    pub call: unsafe extern "C" fn(
        data: *mut c_void,
        first: TensorSlice,
        second: TensorSlice,
        results: *mut TensorList,
        saved: *mut TensorList,
        needed: BoolSlice,
    ) -> *mut c_char,
    /// Frees the closure.
    pub drop: unsafe extern "C" fn(data: *mut c_void),
}

/// A count of allocated bytes: see `allocated.cpp`.
#[repr(C)]
pub struct MeasurementHandle {
    _opaque: [u8; 0],
}

/// Tensors in whose place others are taken: see `replace.cpp`.
#[repr(C)]
pub struct ReplacementsHandle {
    _opaque: [u8; 0],
}

/// The edges at which a backward begins: see `graph.cpp`.
#[repr(C)]
pub struct GraphHandle {
    _opaque: [u8; 0],
}

/// Changes a gradient: see `gradient.cpp`.
#[repr(C)]
pub struct GradientClosure {
    /// The closure itself.
    pub data: *mut c_void,
    /// Calls the closure with a gradient; `result` is null to leave it as it is.
    pub call: unsafe extern "C" fn(
        data: *mut c_void,
        gradient: *const C_tensor,
        result: *mut *mut C_tensor,
    ) -> *mut c_char,
    /// Frees the closure.
    pub drop: unsafe extern "C" fn(data: *mut c_void),
}

/// A batch norm in training: see `batch_norm.cpp`. Null stands for a tensor that it does not have.
#[repr(C)]
pub struct BatchNormView {
    /// The batch, never null.
    pub input: *const C_tensor,
    /// The factor of each channel.
    pub weight: *const C_tensor,
    /// What is added to each channel.
    pub bias: *const C_tensor,
    /// The mean over past batches.
    pub running_mean: *const C_tensor,
    /// The variance over past batches.
    pub running_var: *const C_tensor,
    /// The weight of this batch in the running statistics.
    pub momentum: f64,
    /// What is added to the variance.
    pub eps: f64,
}

/// Computes batch norms: see `batch_norm.cpp`.
#[repr(C)]
pub struct BatchNormClosure {
    /// The closure itself.
    pub data: *mut c_void,
    /// Calls the closure; `result` is C++'s from then on.
    pub call: unsafe extern "C" fn(
        data: *mut c_void,
        norm: *const BatchNormView,
        result: *mut *mut C_tensor,
    ) -> *mut c_char,
    /// Frees the closure.
    pub drop: unsafe extern "C" fn(data: *mut c_void),
}

/// Memory for a tensor, freed by dropping its owner.
#[repr(C)]
pub struct RawBlock {
    /// The first byte.
    pub data: *mut c_void,
    /// The owner, for [`DropOwner`].
    pub owner: *mut c_void,
}

/// The memory of a tensor's elements.
#[repr(C)]
#[derive(Default)]
pub struct TensorMemory {
    /// The first byte; None without memory.
    pub data: Option<std::ptr::NonNull<u8>>,
    /// The number of bytes.
    pub bytes: usize,
    /// Whether the memory is the host's.
    pub on_cpu: bool,
    /// Whether the memory is a GPU's.
    pub on_cuda: bool,
    /// Whether the elements lie row-major without gaps, and are the tensor's values.
    pub dense_contiguous: bool,
}

/// Takes a block for libtorch. Returns false if there is none.
pub type TakeBlock = unsafe extern "C" fn(bytes: usize, block: *mut RawBlock) -> bool;
/// Frees what an owner owns.
pub type DropOwner = unsafe extern "C" fn(owner: *mut c_void);
/// Takes a named tensor, which is the callee's from then on.
pub type VisitTensor =
    unsafe extern "C" fn(data: *mut c_void, name: *const c_char, tensor: *mut C_tensor);

/// Takes a text.
pub type VisitText = unsafe extern "C" fn(data: *mut c_void, text: *const c_char);

/// Takes a tensor, which is the callee's from then on.
pub type PushTensor = unsafe extern "C" fn(tensors: *mut c_void, tensor: *mut C_tensor);

unsafe extern "C" {
    /// Appends a tensor to a list; null for an undefined one.
    pub fn flow_push_tensor(tensors: *mut TensorList, tensor: *const C_tensor) -> *mut c_char;
    /// Runs a custom function, and pushes its outputs.
    pub fn flow_apply_function(
        inputs: TensorSlice,
        forward: FunctionClosure,
        backward: FunctionClosure,
        outputs: *mut c_void,
        push: PushTensor,
    ) -> *mut c_char;
    /// Returns whether operations on this thread record a graph.
    pub fn flow_grad_enabled() -> bool;
    /// Has a closure compute the batch norms with a running mean.
    pub fn flow_replace_batch_norm(
        running_mean: *const C_tensor,
        closure: BatchNormClosure,
    ) -> *mut c_char;
    /// Returns whether a closure computes them.
    pub fn flow_replaces_batch_norm(running_mean: *const C_tensor) -> bool;
    /// Computes the gradients of a batch norm's weight and bias.
    pub fn flow_batch_norm_sums(
        gradient: *const C_tensor,
        input: *const C_tensor,
        mean: *const C_tensor,
        variance: *const C_tensor,
        eps: f64,
        of_weight: *mut *mut C_tensor,
        of_bias: *mut *mut C_tensor,
    ) -> *mut c_char;
    /// Finds the data of a parameter's hook; null if it has none.
    pub fn flow_grad_hook(parameter: *const C_tensor, data: *mut *mut c_void) -> *mut c_char;
    /// Has a closure called when a parameter's gradient was accumulated.
    pub fn flow_set_grad_hook(parameter: *const C_tensor, closure: Closure) -> *mut c_char;
    /// Finds whether nothing else uses the memory of a parameter's gradient.
    pub fn flow_grad_is_exclusive(parameter: *const C_tensor, exclusive: *mut bool) -> *mut c_char;
    /// Has a closure called at the end of the running backward.
    pub fn flow_at_end_of_backward(closure: Closure) -> *mut c_char;
    /// Has a closure called when backward reaches a tensor.
    pub fn flow_on_backward(tensor: *const C_tensor, closure: Closure) -> *mut c_char;
    /// Has a closure change a tensor's gradient.
    pub fn flow_map_gradient(tensor: *const C_tensor, closure: GradientClosure) -> *mut c_char;
    /// Makes a graph of what computed these outputs.
    pub fn flow_graph_new(outputs: TensorSlice, graph: *mut *mut GraphHandle) -> *mut c_char;
    /// Frees a graph.
    pub fn flow_graph_drop(graph: *mut GraphHandle);
    /// Runs backward through a graph, with the gradients of its outputs.
    pub fn flow_graph_backward(graph: *mut GraphHandle, gradients: TensorSlice) -> *mut c_char;
    /// Runs the half of backward that gives the gradients of inputs.
    pub fn flow_graph_backward_inputs(
        graph: *mut GraphHandle,
        gradients: TensorSlice,
        inputs: TensorSlice,
        results: *mut c_void,
        push: PushTensor,
    ) -> *mut c_char;
    /// Runs the other half of backward: the gradients of weights.
    pub fn flow_graph_backward_weights(graph: *mut GraphHandle) -> *mut c_char;
    /// Makes replacements of tensors by others, and those of `more` unless it is null.
    pub fn flow_replacements_new(
        tensors: TensorSlice,
        others: TensorSlice,
        more: *const ReplacementsHandle,
        replacements: *mut *const ReplacementsHandle,
    ) -> *mut c_char;
    /// Frees replacements.
    pub fn flow_replacements_drop(replacements: *const ReplacementsHandle);
    /// Has operations of this thread make these replacements, or none if null.
    pub fn flow_set_replacements(
        replacements: *const ReplacementsHandle,
    ) -> *const ReplacementsHandle;
    /// Begins to count the bytes that this thread has libtorch allocate.
    pub fn flow_measure_allocated(measurement: *mut *mut MeasurementHandle) -> *mut c_char;
    /// Ends a count, and returns the bytes that are still allocated.
    pub fn flow_end_measurement(measurement: *mut MeasurementHandle) -> usize;
    /// Reads the state of the generator of a tensor's device.
    pub fn flow_rng_state(like: *const C_tensor, state: *mut *mut C_tensor) -> *mut c_char;
    /// Sets the state of the generator of a tensor's device.
    pub fn flow_set_rng_state(like: *const C_tensor, state: *const C_tensor) -> *mut c_char;
    /// Counts the handles of a tensor.
    pub fn flow_use_count(tensor: *const C_tensor) -> usize;
    /// Sets the gradient of a parameter; null for none.
    pub fn flow_set_grad(parameter: *const C_tensor, grad: *const C_tensor) -> *mut c_char;
    /// Has autograd know that a tensor's values are others now.
    pub fn flow_bump_version(tensor: *const C_tensor) -> *mut c_char;
    /// Checks that a tensor's elements lie in plain memory of the CPU or a GPU.
    pub fn flow_check_plain(tensor: *const C_tensor) -> *mut c_char;
    /// Returns what all handles of a tensor have in common.
    pub fn flow_identity(tensor: *const C_tensor) -> *const c_void;
    /// Finds the memory of a tensor.
    pub fn flow_memory(tensor: *const C_tensor, memory: *mut TensorMemory) -> *mut c_char;
    /// Loads the CUDA part of libtorch.
    pub fn flow_load_cuda() -> *mut c_char;
    /// Finds the stream on which libtorch works on a GPU.
    pub fn flow_current_stream(device: c_int, stream: *mut *mut c_void) -> *mut c_char;
    /// Visits a text for each parameter of an optimizer.
    pub fn flow_optimizer_parameters(
        optimizer: *const C_optimizer,
        data: *mut c_void,
        visit: VisitText,
    ) -> *mut c_char;
    /// Visits the tensors of an optimizer's state, or copies of them.
    pub fn flow_optimizer_state(
        optimizer: *const C_optimizer,
        copy: bool,
        data: *mut c_void,
        visit: VisitTensor,
    ) -> *mut c_char;
    /// Sets the tensors of an optimizer's state, by name.
    pub fn flow_set_optimizer_state(
        optimizer: *mut C_optimizer,
        copy: bool,
        names: *const *const c_char,
        tensors: *const *const C_tensor,
        count: usize,
    ) -> *mut c_char;
    /// Gives a tensor's memory an owner, which is dropped with it.
    pub fn flow_own_memory(
        tensor: *const C_tensor,
        owner: *mut c_void,
        drop: DropOwner,
    ) -> *mut c_char;
    /// Makes a tensor whose memory comes and goes, and one that has none.
    pub fn flow_transient_new(
        like: *const C_tensor,
        elements: i64,
        text: *const c_char,
        memory: *mut *mut C_tensor,
        absent: *mut *mut C_tensor,
    ) -> *mut c_char;
    /// Gives memory to a tensor whose memory comes and goes.
    pub fn flow_transient_allocate(memory: *const C_tensor) -> *mut c_char;
    /// Takes the memory away.
    pub fn flow_transient_free(memory: *const C_tensor);
    /// Has a tensor lie in the memory of another from an element on.
    pub fn flow_transient_place(
        tensor: *const C_tensor,
        memory: *const C_tensor,
        start: i64,
    ) -> *mut c_char;
    /// Has libtorch take large CPU blocks from an allocator.
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

/// Returns the text of a panic.
pub fn panic_text(payload: &(dyn Any + Send)) -> &str {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("no text")
}

/// Returns a list of C++'s.
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

/// Returns a handle that the result does not drop.
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
