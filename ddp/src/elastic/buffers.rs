//! Buffers as they were before a step that failed: its forward may have changed them.

use std::sync::PoisonError;

use flow_autograd::identity;
use tch::Tensor;
use tch::nn::VarStore;

/// The buffers of a model, such as running statistics, and copies of them.
pub struct Buffers {
    pub buffers: Vec<Tensor>,
    copies: Vec<Tensor>,
}

impl Buffers {
    /// Copies the variables that were not made to be trained. Frozen parameters are no buffers.
    pub fn of(vs: &VarStore) -> Self {
        let variables = vs.variables_.lock().unwrap_or_else(PoisonError::into_inner);
        let trainable: Vec<usize> = variables
            .trainable_variables
            .iter()
            .map(|variable| identity(&variable.tensor))
            .collect();
        let buffers: Vec<Tensor> = variables
            .named_variables
            .values()
            .filter(|tensor| !trainable.contains(&identity(tensor)))
            .map(Tensor::shallow_clone)
            .collect();
        let copies = buffers.iter().map(Tensor::copy).collect();
        Self { buffers, copies }
    }

    /// Copies the buffers as they are now.
    pub fn keep(&mut self) {
        for (buffer, copy) in self.buffers.iter().zip(&mut self.copies) {
            copy.copy_(&buffer.detach());
        }
    }

    /// Makes the buffers again as they were when they were copied last.
    pub fn restore(&self) {
        for (buffer, copy) in self.buffers.iter().zip(&self.copies) {
            buffer.data().copy_(copy);
        }
    }
}
