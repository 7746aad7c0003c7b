//! The results of a step.

use std::collections::BTreeMap;

use flow_autograd::{BoxError, Graph};
use flow_global::GlobalTensor;
use tch::Tensor;

use crate::micro_batch::{MicroBatch, join};

/// The results of a step on this rank.
#[derive(Default)]
pub struct Results {
    /// The mean loss of the batch, if this rank has the last stage.
    pub loss: Option<Tensor>,
    /// The last stage's outputs for each micro-batch, if there is no loss.
    pub outputs: BTreeMap<usize, (MicroBatch, Vec<Tensor>)>,
    /// The gradients of the first stage's inputs for each micro-batch.
    pub(super) input_gradients: BTreeMap<usize, (MicroBatch, Vec<Option<Tensor>>)>,
}

impl Results {
    /// Adds the loss of a micro-batch, weighted by its rows.
    pub(super) fn add_loss(&mut self, loss: &Tensor, micro_batch: MicroBatch) {
        let term = tch::no_grad(|| loss.detach() * micro_batch.weight());
        self.loss = Some(match self.loss.take() {
            None => term,
            Some(sum) => sum + term,
        });
    }

    /// Gives the tensors of the batch the gradients of the first stage's inputs.
    pub(super) fn backward_of(&mut self, batch: &[Tensor]) -> Result<(), BoxError> {
        let parts = std::mem::take(&mut self.input_gradients);
        let mut tensors = Vec::new();
        let mut gradients_of_tensors = Vec::new();
        for (number, tensor) in batch.iter().enumerate() {
            let has_gradient = parts
                .values()
                .any(|(_, gradients)| gradients.get(number).is_some_and(Option::is_some));
            if !tensor.requires_grad() || !has_gradient {
                continue;
            }
            let _no_grad = tch::no_grad_guard();
            let mut gradients_of_rows = Vec::new();
            for (micro_batch, gradients) in parts.values() {
                let gradient = match gradients.get(number).and_then(Option::as_ref) {
                    Some(gradient) if gradient.is_global() => gradient.to_sbp(tensor.sbp()?)?,
                    Some(gradient) => gradient.shallow_clone(),
                    None => micro_batch.try_of(tensor)?.f_zeros_like()?,
                };
                gradients_of_rows.push((*micro_batch, gradient));
            }
            tensors.push(tensor.shallow_clone());
            gradients_of_tensors.push(Some(join(&gradients_of_rows)?));
        }
        Ok(Graph::of(&tensors)?.backward(&gradients_of_tensors)?)
    }
}
