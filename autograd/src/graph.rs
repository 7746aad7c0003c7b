//! Backwards of several tensors at once, as a whole or in two halves.

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{null, null_mut};

use tch::Tensor;
use torch_sys::C_tensor;

use crate::error::Error;
use crate::ffi::{self, GraphHandle, TensorSlice};

/// The graph of a backward of some tensors: the operations that computed them, without the tensors,
/// whose memory may be freed meanwhile.
///
/// ```
/// use flow_autograd::Graph;
/// use tch::Tensor;
///
/// let weight = Tensor::from_slice(&[2.0]).set_requires_grad(true);
/// let x = Tensor::from_slice(&[3.0]).set_requires_grad(true);
/// let y = &x * &weight;
/// let (gradients, weights) =
///     Graph::of(&[y])?.backward_inputs(&[Some(Tensor::from_slice(&[10.0]))], &[&x])?;
/// assert_eq!(gradients[0].as_ref().map(|gradient| gradient.double_value(&[0])), Some(20.0));
/// assert!(!weight.grad().defined());
/// weights.backward()?;
/// assert_eq!(weight.grad().double_value(&[0]), 30.0);
/// # Ok::<(), flow_autograd::Error>(())
/// ```
pub struct Graph(Handle);

/// The rest of a [`Graph`] for the second half of its backward.
#[must_use = "backward() computes the gradients of the weights"]
pub struct WeightGraph(Handle);

struct Handle(*mut GraphHandle);

// SAFETY: libtorch's graphs may be run, and freed, on any thread, one at a time.
unsafe impl Send for Handle {}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: the handle is ours, and not used again.
        unsafe { ffi::flow_graph_drop(self.0) }
    }
}

impl Graph {
    /// Finds the operations that computed these tensors.
    ///
    /// # Errors
    ///
    /// libtorch's.
    pub fn of(outputs: &[Tensor]) -> Result<Self, Error> {
        let outputs: Vec<*const C_tensor> = outputs.iter().map(|output| output.as_ptr()).collect();
        let mut graph = null_mut();
        // SAFETY: the tensors are alive, and `graph` is writable.
        unsafe { ffi::check("Graph::of", ffi::flow_graph_new(slice(&outputs), &mut graph))? };
        Ok(Self(Handle(graph)))
    }

    /// Accumulates gradients in `.grad` of all leaves, given a gradient of each output, or `None`:
    /// `torch.autograd.backward`. Hooks run as in any backward. Gradients of outputs that require
    /// none are left out.
    ///
    /// # Errors
    ///
    /// Not one gradient for each output, or one of another shape or kind; those of hooks, with
    /// their text; libtorch's.
    pub fn backward(self, gradients: &[Option<Tensor>]) -> Result<(), Error> {
        let gradients = pointers(gradients);
        // SAFETY: the graph and the tensors are alive.
        unsafe { ffi::check("backward", ffi::flow_graph_backward(self.0.0, slice(&gradients))) }
    }

    /// Runs the first half of a backward, and returns the gradients of the inputs, which are
    /// leaves. An input that the outputs do not depend on has `None`. No gradient is accumulated.
    /// The other half, [`WeightGraph::backward`], accumulates those of all other leaves. It
    /// computes nothing twice but some custom functions on the way to the inputs. Their backward
    /// runs in both halves if they also have a branch to other leaves;
    /// [`recompute`](crate::recompute()) then gives each half what belongs to it. (Qi et al. 2023,
    /// "Zero Bubble Pipeline Parallelism", section 2.)
    ///
    /// # Errors
    ///
    /// As [`Graph::backward`]; an input that requires no gradient.
    pub fn backward_inputs(
        self,
        gradients: &[Option<Tensor>],
        inputs: &[&Tensor],
    ) -> Result<(Vec<Option<Tensor>>, WeightGraph), Error> {
        let gradients = pointers(gradients);
        let inputs: Vec<*const C_tensor> = inputs.iter().map(|input| input.as_ptr()).collect();
        let mut results = Vec::<Option<Tensor>>::new();
        // SAFETY: the graph and the tensors are alive, and `results` outlives the call.
        unsafe {
            let data = (&raw mut results).cast();
            let gradients = slice(&gradients);
            let inputs = slice(&inputs);
            ffi::check(
                "backward_inputs",
                ffi::flow_graph_backward_inputs(self.0.0, gradients, inputs, data, push),
            )?;
        }
        Ok((results, WeightGraph(self.0)))
    }
}

impl WeightGraph {
    /// Accumulates gradients in `.grad` of the leaves that are not the inputs. Hooks run as in any
    /// backward; those of operations that lead to inputs and to weights run in both halves.
    ///
    /// # Errors
    ///
    /// Those of hooks, with their text; libtorch's.
    pub fn backward(self) -> Result<(), Error> {
        // SAFETY: the graph is alive.
        unsafe { ffi::check("backward", ffi::flow_graph_backward_weights(self.0.0)) }
    }
}

fn slice(tensors: &[*const C_tensor]) -> TensorSlice {
    TensorSlice { tensors: tensors.as_ptr(), count: tensors.len() }
}

fn pointers(tensors: &[Option<Tensor>]) -> Vec<*const C_tensor> {
    tensors.iter().map(|tensor| tensor.as_ref().map_or(null(), |tensor| tensor.as_ptr())).collect()
}

/// # Safety
///
/// `results` must point to a `Vec<Option<Tensor>>` that nothing else uses during the call, and
/// `tensor` be null or the caller's, to give away.
unsafe extern "C" fn push(results: *mut c_void, tensor: *mut C_tensor) {
    // SAFETY: the caller's promise.
    let (results, tensor) = unsafe {
        let tensor = (!tensor.is_null()).then(|| Tensor::from_ptr(tensor));
        (&mut *results.cast::<Vec<Option<Tensor>>>(), tensor)
    };
    // Only a failed allocation panics here.
    let _ = catch_unwind(AssertUnwindSafe(|| results.push(tensor)));
}
