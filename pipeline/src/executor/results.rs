//! What a step leaves.

use std::collections::BTreeMap;

use flow_autograd::{BoxError, Graph};
use flow_global::GlobalTensor;
use tch::Tensor;

use crate::micro_batch::{join, MicroBatch};

/// What a step has at its end.
#[derive(Default)]
pub struct Results {
    /// Of the last stage: the mean loss of the batch.
    pub loss: Option<Tensor>,
    /// Of the last stage, without a loss: of each micro-batch.
    pub outputs: BTreeMap<usize, (MicroBatch, Vec<Tensor>)>,
    /// Of the first stage: of each micro-batch.
    pub(super) input_gradients: BTreeMap<usize, (MicroBatch, Vec<Option<Tensor>>)>,
}

impl Results {
    /// Adds what a micro-batch contributes to the loss.
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
        let mut with_gradients = (Vec::new(), Vec::new());
        for (number, tensor) in batch.iter().enumerate() {
            let of = |(_, gradients): &(MicroBatch, Vec<Option<Tensor>>)| {
                gradients.get(number).is_some_and(Option::is_some)
            };
            if !tensor.requires_grad() || !parts.values().any(of) {
                continue;
            }
            let _no_grad = tch::no_grad_guard();
            let mut own = Vec::new();
            for (micro_batch, gradients) in parts.values() {
                let gradient = match gradients.get(number).and_then(Option::as_ref) {
                    Some(gradient) if gradient.is_global() => gradient.to_sbp(tensor.sbp()?)?,
                    Some(gradient) => gradient.shallow_clone(),
                    None => micro_batch.try_of(tensor)?.f_zeros_like()?,
                };
                own.push((*micro_batch, gradient));
            }
            with_gradients.0.push(tensor.shallow_clone());
            with_gradients.1.push(Some(join(&own)?));
        }
        Ok(Graph::of(&with_gradients.0)?.backward(&with_gradients.1)?)
    }
}
