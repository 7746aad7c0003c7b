//! Memory that tensors have for a time only.

use std::ffi::CString;
use std::ptr::null_mut;

use tch::{Device, Kind, Tensor};

use crate::error::Error;
use crate::ffi;

/// Memory for tensors that comes and goes, while the tensors stay: what PyTorch's FSDP does by resizing
/// the storage of parameters. Views that autograd has saved come and go with it.
///
/// ```
/// use flow_autograd::TransientMemory;
/// use tch::{Device, Kind, Tensor};
///
/// let weight = Tensor::zeros([2, 2], (Kind::Float, Device::Cpu));
/// let memory = TransientMemory::new(Kind::Float, Device::Cpu, 4, "the weight is not there")?;
/// memory.withdraw(&weight, 0)?;
/// assert!(weight.f_sum(Kind::Float).unwrap_err().to_string().contains("not there"));
/// memory.allocate()?;
/// let _ = memory.tensor().shallow_clone().fill_(3.0);
/// memory.place(&weight, 0)?;
/// assert_eq!(weight.double_value(&[1, 1]), 3.0);
/// # Ok::<(), flow_autograd::Error>(())
/// ```
#[derive(Debug)]
pub struct TransientMemory {
    memory: Tensor,
    absent: Tensor,
}

impl TransientMemory {
    /// Describes memory for so many elements, which is not there yet. `text` is the error of whoever
    /// uses a tensor that was [withdrawn](Self::withdraw).
    ///
    /// # Errors
    ///
    /// libtorch's; a text with a zero byte.
    pub fn new(kind: Kind, device: Device, elements: usize, text: &str) -> Result<Self, Error> {
        let like = Tensor::f_empty([0], (kind, device)).map_err(failed)?;
        let text = CString::new(text).map_err(failed)?;
        let mut memory = null_mut();
        let mut absent = null_mut();
        // SAFETY: the tensor and the text are alive, and the results writable. They are ours then.
        unsafe {
            ffi::check(
                "TransientMemory::new",
                ffi::flow_transient_new(
                    like.as_ptr(),
                    elements as i64,
                    text.as_ptr(),
                    &mut memory,
                    &mut absent,
                ),
            )?;
            Ok(Self { memory: Tensor::from_ptr(memory), absent: Tensor::from_ptr(absent) })
        }
    }

    /// Returns all of the memory as a tensor of one dimension.
    pub fn tensor(&self) -> &Tensor {
        &self.memory
    }

    /// Allocates the memory. What is in it is undefined.
    ///
    /// # Errors
    ///
    /// libtorch has no memory left.
    pub fn allocate(&self) -> Result<(), Error> {
        // SAFETY: the tensor is alive, and its storage has an allocator.
        unsafe {
            ffi::check(
                "TransientMemory::allocate",
                ffi::flow_transient_allocate(self.memory.as_ptr()),
            )
        }
    }

    /// Frees the memory. Until the next [`allocate`](Self::allocate) no tensor that lies in it may be
    /// read: libtorch would read at address 0. [Withdraw](Self::withdraw) those that others can reach
    /// before. What autograd has saved of them may stay.
    pub fn free(&self) {
        // SAFETY: the tensor is alive.
        unsafe { ffi::flow_transient_free(self.memory.as_ptr()) }
    }

    /// Has a tensor of the same kind lie in the memory, contiguously from element `start` on. Autograd
    /// does not count this as a change.
    ///
    /// # Errors
    ///
    /// The tensor does not fit.
    pub fn place(&self, tensor: &Tensor, start: usize) -> Result<(), Error> {
        place(tensor, &self.memory, start)
    }

    /// Takes the memory from a tensor, whose shape stays. Each use of its elements is an error of
    /// libtorch then.
    ///
    /// # Errors
    ///
    /// The tensor does not fit.
    pub fn withdraw(&self, tensor: &Tensor, start: usize) -> Result<(), Error> {
        place(tensor, &self.absent, start)
    }
}

/// Makes this crate's error of another's.
fn failed(error: impl ToString) -> Error {
    Error::Libtorch { operation: "TransientMemory::new", reason: error.to_string() }
}

fn place(tensor: &Tensor, memory: &Tensor, start: usize) -> Result<(), Error> {
    // SAFETY: both tensors are alive.
    unsafe {
        ffi::check(
            "TransientMemory",
            ffi::flow_transient_place(tensor.as_ptr(), memory.as_ptr(), start as i64),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Gives values to the memory, and `weight` its place.
    fn fill(memory: &TransientMemory, values: &Tensor, weight: &Tensor) {
        memory.allocate().unwrap();
        memory.tensor().shallow_clone().copy_(values);
        memory.place(weight, 2).unwrap();
    }

    #[test]
    fn what_autograd_has_saved_comes_back() {
        let weight = Tensor::zeros([3, 2], (Kind::Double, Device::Cpu)).set_requires_grad(true);
        let values = Tensor::arange(8, (Kind::Double, Device::Cpu));
        let memory = TransientMemory::new(Kind::Double, Device::Cpu, 8, "absent").unwrap();
        fill(&memory, &values, &weight);
        let x = Tensor::ones([1, 3], (Kind::Double, Device::Cpu)).set_requires_grad(true);
        let y =
            x.matmul(&weight) * weight.sum(Kind::Double) + (&weight * &weight).sum(Kind::Double);
        memory.withdraw(&weight, 2).unwrap();
        memory.free();
        assert_eq!(weight.size(), [3, 2]);
        assert!(weight.f_neg().unwrap_err().to_string().contains("absent"));
        fill(&memory, &values, &weight);
        y.sum(Kind::Double).backward();
        let own = values.narrow(0, 2, 6).view([3, 2]).detach().set_requires_grad(true);
        let z = Tensor::ones([1, 3], (Kind::Double, Device::Cpu)).set_requires_grad(true);
        let expected = z.matmul(&own) * own.sum(Kind::Double) + (&own * &own).sum(Kind::Double);
        expected.sum(Kind::Double).backward();
        assert_eq!(weight.grad(), own.grad());
        assert_eq!(x.grad(), z.grad());
    }

    #[test]
    fn memory_is_there_only_between_allocate_and_free() {
        let elements = 1 << 20;
        let memory = TransientMemory::new(Kind::Float, Device::Cpu, elements, "absent").unwrap();
        let (_, allocated) = crate::allocated_by(|| memory.allocate().unwrap()).unwrap();
        assert_eq!(allocated, 4 * elements);
        let ((), allocated) = crate::allocated_by(|| {
            memory.free();
            memory.allocate().unwrap();
            memory.free();
        })
        .unwrap();
        assert_eq!(allocated, 0);
    }

    #[test]
    fn what_does_not_fit_is_an_error() {
        let memory = TransientMemory::new(Kind::Float, Device::Cpu, 4, "absent").unwrap();
        let five = Tensor::zeros([5], (Kind::Float, Device::Cpu));
        assert!(memory.place(&five, 0).is_err());
        let double = Tensor::zeros([2], (Kind::Double, Device::Cpu));
        assert!(memory.withdraw(&double, 0).is_err());
        assert_eq!(double.sum(Kind::Double).double_value(&[]), 0.0);
    }
}
