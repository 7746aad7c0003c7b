//! Tensors in whose place operations take others.

use std::cell::RefCell;
use std::ptr::null;
use std::sync::Arc;

use tch::Tensor;
use torch_sys::C_tensor;

use crate::error::Error;
use crate::ffi::{self, ReplacementsHandle, TensorSlice};

thread_local! {
    static CURRENT: RefCell<Option<Replacements>> = const { RefCell::new(None) };
}

/// Tensors, with others that operations are to take in their place: what autocast does with casts.
///
/// The graph has the others only, so that gradients come to them, and to what they were computed of.
/// What reads a tensor without an operation, such as its size, finds the tensor itself.
///
/// ```
/// use flow_autograd::Replacements;
/// use tch::Tensor;
///
/// let weight = Tensor::from_slice(&[3.0]).set_requires_grad(true);
/// let twice = &weight * 2;
/// let replacements = Replacements::new(&[(&weight, &twice)])?;
/// let output = replacements.during(|| &weight * &weight);
/// assert_eq!(output.double_value(&[0]), 36.0);
/// output.f_backward()?;
/// assert_eq!(weight.grad().double_value(&[0]), 24.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Replacements(Arc<Handle>);

struct Handle(*const ReplacementsHandle);

// SAFETY: nothing changes it, and the counts of libtorch's handles are atomic.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: it is C++'s, and no thread uses it any more.
        unsafe { ffi::flow_replacements_drop(self.0) };
    }
}

impl Replacements {
    /// Returns the replacements of the first of each pair by the second.
    ///
    /// # Errors
    ///
    /// libtorch's.
    pub fn new(pairs: &[(&Tensor, &Tensor)]) -> Result<Self, Error> {
        Self::beside(pairs, null())
    }

    /// Returns these replacements, and those of the first of each pair by the second.
    ///
    /// # Errors
    ///
    /// libtorch's.
    pub fn with(&self, pairs: &[(&Tensor, &Tensor)]) -> Result<Self, Error> {
        Self::beside(pairs, self.0.0)
    }

    /// Returns the replacements of these pairs, and those of `more` unless it is null.
    fn beside(
        pairs: &[(&Tensor, &Tensor)],
        more: *const ReplacementsHandle,
    ) -> Result<Self, Error> {
        let tensors: Vec<*const C_tensor> = pairs.iter().map(|pair| pair.0.as_ptr()).collect();
        let others: Vec<*const C_tensor> = pairs.iter().map(|pair| pair.1.as_ptr()).collect();
        let slice =
            |list: &[*const C_tensor]| TensorSlice { tensors: list.as_ptr(), count: list.len() };
        let mut handle = null();
        // SAFETY: the tensors and `more` are alive, and `handle` is writable.
        unsafe {
            let text =
                ffi::flow_replacements_new(slice(&tensors), slice(&others), more, &mut handle);
            ffi::check("Replacements::new", text)?;
        }
        Ok(Self(Arc::new(Handle(handle))))
    }

    /// Returns the replacements that operations of this thread make.
    pub fn current() -> Option<Self> {
        CURRENT.with_borrow(Clone::clone)
    }

    /// Runs `compute`, whose operations on this thread make these replacements, rather than those that
    /// were made before. One that would write into a tensor that is replaced is an error of libtorch's.
    pub fn during<T>(&self, compute: impl FnOnce() -> T) -> T {
        let _before = Before(set(Some(self.clone())));
        compute()
    }
}

/// The replacements that are made again when this is dropped, by a panic too.
struct Before(Option<Replacements>);

impl Drop for Before {
    fn drop(&mut self) {
        set(self.0.take());
    }
}

/// Sets the replacements of this thread. Returns those before.
fn set(replacements: Option<Replacements>) -> Option<Replacements> {
    let handle = replacements.as_ref().map_or(null(), |replacements| replacements.0.0);
    // SAFETY: `CURRENT` keeps them for as long as they are made.
    unsafe { ffi::flow_set_replacements(handle) };
    CURRENT.replace(replacements)
}

impl std::fmt::Debug for Replacements {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Replacements").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::{Device, Kind};

    fn vector(value: f64) -> Tensor {
        Tensor::full([2], value, (Kind::Float, Device::Cpu))
    }

    #[test]
    fn arguments_of_all_kinds_are_replaced_until_the_end() {
        let one = vector(1.0);
        let five = vector(5.0);
        let replacements = Replacements::new(&[(&one, &five)]).unwrap();
        let sum = |tensor: &Tensor| tensor.sum(Kind::Float).double_value(&[]);
        replacements.during(|| {
            assert_eq!(sum(&one), 10.0);
            assert_eq!(sum(&Tensor::cat(&[&one, &five, &vector(2.0)], 0)), 24.0);
            let index = Tensor::from_slice(&[1i64]);
            let indices = Replacements::new(&[(&index, &Tensor::from_slice(&[0i64]))]).unwrap();
            let rows = Tensor::from_slice(&[7.0, 8.0]);
            indices.during(|| {
                assert_eq!(sum(&rows.index(&[Some(index.shallow_clone())])), 7.0);
                assert_eq!(sum(&one), 2.0);
            });
            assert_eq!(sum(&one.shallow_clone()), 10.0);
        });
        assert_eq!(sum(&one), 2.0);
        let panicked = std::panic::catch_unwind(|| replacements.during(|| panic!("on purpose")));
        assert!(panicked.is_err() && Replacements::current().is_none());
        assert_eq!(sum(&one), 2.0);
    }

    #[test]
    fn more_replacements_are_made_beside_others() {
        let [one, two, three, four] = [1.0, 2.0, 3.0, 4.0].map(vector);
        let outer = Replacements::new(&[(&one, &two), (&three, &one)]).unwrap();
        let both = outer.with(&[(&three, &four)]).unwrap();
        assert_eq!(both.during(|| &one + &three), vector(6.0));
        assert_eq!(outer.during(|| &one + &three), vector(3.0));
    }

    #[test]
    fn what_is_replaced_is_not_written() {
        let mut one = vector(1.0);
        let five = vector(5.0);
        let replacements = Replacements::new(&[(&one, &five)]).unwrap();
        let error = replacements.during(|| one.f_add_(&vector(1.0)).map(drop)).unwrap_err();
        assert!(error.to_string().contains("would change a tensor"), "{error}");
        assert_eq!((one, five), (vector(1.0), vector(5.0)));
    }

    #[test]
    fn custom_functions_and_recomputation_take_replacements() {
        let weight = vector(3.0).set_requires_grad(true);
        let low = &weight * 2;
        let replacements = Replacements::new(&[(&weight, &low)]).unwrap();
        let output = replacements.during(|| {
            let factor = weight.shallow_clone();
            crate::recompute(&[&vector(1.0)], move |inputs| {
                let product = crate::custom_function(
                    &[&factor],
                    |inputs| {
                        let saved = vec![inputs[0].shallow_clone()];
                        Ok(crate::Forward { outputs: vec![inputs[0].square()], saved })
                    },
                    |saved, grads| Ok(vec![grads[0].as_ref().map(|grad| grad * &saved[0] * 2)]),
                )?;
                Ok(vec![&product[0] * &inputs[0]])
            })
        });
        let output = output.unwrap().swap_remove(0);
        assert_eq!(output, vector(36.0));
        output.sum(Kind::Float).backward();
        assert_eq!(weight.grad(), vector(24.0));
    }
}
