//! Tensors as memory, and memory as tensors.

use flow_kernels::DType;
use tch::{Device, Kind, Tensor};

use crate::Error;
use crate::ffi::{self, TensorMemory};

/// Returns the dtype that collectives know this kind by, if they do.
pub fn dtype(kind: Kind) -> Option<DType> {
    match kind {
        Kind::Float => Some(DType::F32),
        Kind::Double => Some(DType::F64),
        Kind::Half => Some(DType::F16),
        Kind::BFloat16 => Some(DType::BF16),
        Kind::Int => Some(DType::I32),
        Kind::Int64 => Some(DType::I64),
        Kind::Uint8 => Some(DType::U8),
        _ => None,
    }
}

pub(crate) fn memory(tensor: &Tensor) -> TensorMemory {
    let mut memory = TensorMemory::default();
    // SAFETY: the tensor is alive and `memory` is writable.
    let result = unsafe { ffi::check("memory", ffi::flow_memory(tensor.as_ptr(), &mut memory)) };
    match result {
        Ok(()) => memory,
        Err(_) => TensorMemory::default(), // kinds of tensors that have no memory to speak of
    }
}

/// Returns the address of the tensor's first element, on whatever device; null if it has no memory
/// of its own (undefined, sparse).
pub fn data_ptr(tensor: &Tensor) -> *mut u8 {
    memory(tensor).data.map_or(std::ptr::null_mut(), |data| data.as_ptr())
}

/// Returns the reason why a tensor's elements cannot be sent to other ranks, and what would be
/// right, as in "is sparse: ...". None for one whose elements, of a kind that tch knows, lie in
/// plain memory of the CPU or a GPU.
pub fn unsendable(tensor: &Tensor) -> Option<String> {
    // SAFETY: the tensor is alive.
    let result = unsafe { ffi::check("unsendable", ffi::flow_check_plain(tensor.as_ptr())) };
    match (result, tensor.f_kind()) {
        (Err(Error::Libtorch { reason, .. }), _) => Some(reason),
        (Err(error), _) => Some(error.to_string()),
        (Ok(()), Err(error)) => Some(format!("is of a kind that cannot be sent: {error}")),
        (Ok(()), Ok(_)) => None,
    }
}

/// Returns a copy of a tensor whose elements libtorch computes only when they are read: conjugates,
/// negatives, and zeros that have no memory, as `sgn` makes them in backward. None if all elements
/// are in memory as they are.
pub fn resolved(tensor: &Tensor) -> Option<Tensor> {
    if tensor.internal_is_zerotensor() {
        return Some(tensor.zeros_like());
    }
    (tensor.is_conj() || tensor.is_neg()).then(|| tensor.resolve_conj().resolve_neg())
}

/// Returns a number that is the same for all handles to one tensor (`shallow_clone`), and different
/// for all other live tensors. A view shares the memory but is a tensor of its own.
pub fn identity(tensor: &Tensor) -> usize {
    // SAFETY: the tensor is alive.
    unsafe { ffi::flow_identity(tensor.as_ptr()) }.addr()
}

/// Start and length in bytes of a contiguous CPU tensor.
fn plain_memory(tensor: &Tensor) -> Result<(*mut u8, usize), Error> {
    let memory = memory(tensor);
    if !tensor.defined() {
        Err(Error::NotPlainMemory("undefined".into()))
    } else if !memory.on_cpu {
        Err(Error::NotPlainMemory(format!("on {:?}", tensor.device())))
    } else if memory.dense_contiguous {
        Ok(memory.data.map_or((std::ptr::dangling_mut(), 0), |data| (data.as_ptr(), memory.bytes)))
    } else if memory.data.is_none() {
        Err(Error::NotPlainMemory("of a sparse or opaque layout".into()))
    } else {
        Err(Error::NotPlainMemory(format!(
            "not contiguous (shape {:?}, strides {:?})",
            tensor.size(),
            tensor.stride()
        )))
    }
}

/// Returns the elements of a contiguous CPU tensor as bytes.
///
/// Tensors share memory (`shallow_clone`, views, `detach`): as with tch's own views of data, nobody
/// may write through another tensor while the slice is in use.
///
/// # Errors
///
/// The tensor is not dense, not contiguous or not on the CPU.
pub fn bytes(tensor: &Tensor) -> Result<&[u8], Error> {
    let (data, bytes) = plain_memory(tensor)?;
    // SAFETY: the elements lie there without gaps, and live as long as the tensor is borrowed.
    Ok(unsafe { std::slice::from_raw_parts(data, bytes) })
}

/// Returns the elements of a contiguous CPU tensor as bytes to write. See [`bytes`], also for the
/// errors; autograd does not notice such writes.
pub fn bytes_mut(tensor: &mut Tensor) -> Result<&mut [u8], Error> {
    let (data, bytes) = plain_memory(tensor)?;
    // SAFETY: as above, and the tensor is borrowed mutably.
    Ok(unsafe { std::slice::from_raw_parts_mut(data, bytes) })
}

/// Makes `grad` the parameter's gradient (the tensor itself, not a copy), or leaves it without one.
///
/// # Errors
///
/// The gradient's shape, kind or device is not the parameter's.
pub fn set_grad(parameter: &Tensor, grad: Option<&Tensor>) -> Result<(), Error> {
    let grad = grad.map_or(std::ptr::null(), |grad| grad.as_ptr());
    // SAFETY: both tensors are alive, or `grad` is null.
    unsafe { ffi::check("set_grad", ffi::flow_set_grad(parameter.as_ptr(), grad)) }
}

/// Says that the tensor's values are others now, where libtorch has not noticed: its optimizers write
/// past autograd. A backward that still needs the old values then fails.
///
/// # Errors
///
/// The tensor counts no changes, as global tensors.
pub fn bump_version(tensor: &Tensor) -> Result<(), Error> {
    // SAFETY: the tensor is alive.
    unsafe { ffi::check("bump_version", ffi::flow_bump_version(tensor.as_ptr())) }
}

/// Returns a contiguous CPU tensor over `memory`, which is dropped when the last tensor that uses
/// it is gone.
///
/// # Errors
///
/// The memory is too small for the shape, or not aligned for the kind.
pub fn tensor_from_memory(
    memory: impl AsMut<[u8]> + Send + 'static,
    shape: &[i64],
    kind: Kind,
) -> Result<Tensor, Error> {
    let mut owner = Box::new(memory); // does not move from here on
    let memory = (*owner).as_mut();
    check_fit(memory.as_ptr().addr(), memory.len(), shape, kind)?;
    let data = memory.as_mut_ptr();
    // SAFETY: there is room for the shape, and the owner keeps it.
    unsafe { tensor_from_raw(data, shape, kind, Device::Cpu, owner) }
}

/// Returns the number of handles of `tensor`: its shallow clones, this one included, and libtorch's
/// own.
pub fn use_count(tensor: &Tensor) -> usize {
    // SAFETY: the tensor is alive.
    unsafe { ffi::flow_use_count(tensor.as_ptr()) }
}

/// Returns whether a contiguous tensor fits into so many bytes at `address`.
pub(crate) fn check_fit(
    address: usize,
    bytes: usize,
    shape: &[i64],
    kind: Kind,
) -> Result<(), Error> {
    let element = kind.elt_size_in_bytes();
    let needed = shape
        .iter()
        .try_fold(element, |bytes, &length| bytes.checked_mul(usize::try_from(length).ok()?))
        .ok_or_else(|| Error::UnfitMemory(format!("a tensor cannot have the shape {shape:?}")))?;
    if bytes < needed {
        let message = format!(
            "a tensor of shape {shape:?} and kind {kind:?} needs {needed} bytes, not {bytes}"
        );
        return Err(Error::UnfitMemory(message));
    }
    if !address.is_multiple_of(element) {
        return Err(Error::UnfitMemory(format!(
            "memory at {address:#x} is not aligned for kind {kind:?}"
        )));
    }
    Ok(())
}

/// Returns a contiguous tensor over the memory at `data` on `device`; `owner` is dropped, on
/// whatever thread, when the last tensor that uses it is gone.
///
/// # Errors
///
/// libtorch refuses the shape; `owner` has been dropped then.
///
/// # Safety
///
/// From `data` on there must be room for `shape` elements of `kind`, aligned for them. It is
/// readable and writable until `owner` is dropped. Others do not use it in ways that conflict with
/// the tensor's use.
pub unsafe fn tensor_from_raw(
    data: *mut u8,
    shape: &[i64],
    kind: Kind,
    device: Device,
    owner: impl Send + 'static,
) -> Result<Tensor, Error> {
    fn own<T>(tensor: Tensor, owner: T) -> Result<Tensor, Error> {
        let owner = Box::into_raw(Box::new(owner)).cast();
        // SAFETY: the tensor is alive; the function fits the owner.
        unsafe {
            ffi::check(
                "tensor_from_raw",
                ffi::flow_own_memory(tensor.as_ptr(), owner, ffi::drop_box::<T>),
            )?
        };
        Ok(tensor)
    }
    let strides: Vec<i64> = (0..shape.len())
        .map(|axis| {
            shape[axis + 1..].iter().fold(1, |stride: i64, &length| stride.wrapping_mul(length))
        })
        .collect();
    // SAFETY: the caller's promise.
    let tensor = unsafe { Tensor::f_from_blob(data, shape, &strides, kind, device) };
    own(
        tensor.map_err(|error| Error::Libtorch {
            operation: "tensor_from_raw",
            reason: error.to_string(),
        })?,
        owner,
    )
}
