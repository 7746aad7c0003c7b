//! How many bytes a step holds for its backwards.

use std::collections::HashMap;

use flow_autograd::allocated_by;
use tch::Tensor;

use super::{Outcome, Place, Step};
use crate::message::local_of;

/// Bytes that a stage allocates in a forward and keeps, by the stage and the shapes of its inputs.
pub type Allocated = HashMap<(usize, Vec<Vec<i64>>), usize>;

impl Step<'_, '_> {
    /// What `run` gives, and the bytes that it keeps: measured once for each shape of the inputs.
    pub(super) fn measured<T>(
        &mut self,
        stage: usize,
        inputs: &[Tensor],
        run: impl FnOnce(&mut Self) -> Outcome<T>,
    ) -> Outcome<(T, usize)> {
        let key = (stage, inputs.iter().map(Tensor::size).collect());
        let allocated = self.executor.allocated;
        let known = allocated.borrow().get(&key).copied();
        if let Some(bytes) = known {
            return Ok((run(self)?, bytes));
        }
        let (ran, bytes) = allocated_by(|| run(self))?;
        allocated.borrow_mut().insert(key, bytes);
        Ok((ran?, bytes))
    }

    /// The bytes of a stage's inputs, but for parts of the batch and for outputs that another stage of
    /// this rank holds, whose backward is later.
    pub(super) fn bytes_of_inputs(&self, stage: usize, inputs: &[Tensor]) -> Outcome<usize> {
        let is_held = |before: usize| {
            self.executor.stages.contains_key(&before) && !self.recomputed.contains(&before)
        };
        match stage.checked_sub(1).is_none_or(is_held) {
            true => Ok(0),
            false => inputs.iter().map(bytes_of).sum(),
        }
    }

    /// So many bytes more are held for the backward.
    pub(super) fn hold(&mut self, place: Place, bytes: usize) {
        *self.held.entry(place).or_default() += bytes;
        self.measured.hold(&self.held);
    }
}

/// What this rank has of a tensor.
fn bytes_of(tensor: &Tensor) -> Outcome<usize> {
    let local = local_of(tensor)?;
    Ok(local.numel() * local.f_kind()?.elt_size_in_bytes())
}
