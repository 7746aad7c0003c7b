//! The bytes that a step holds for its backwards.

use std::collections::HashMap;

use flow_autograd::allocated_by;
use tch::Tensor;

use super::{Outcome, Place, Step};
use crate::message::local_of;

/// Bytes that a stage allocates in a forward and keeps, by the stage and the shapes of its inputs.
pub type Allocated = HashMap<(usize, Vec<Vec<i64>>), usize>;

impl Step<'_, '_> {
    /// Runs `run`, and returns its result and the bytes that it keeps. The bytes are measured once for
    /// each shape of the inputs.
    pub(super) fn run_counting_bytes<T>(
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

    /// Returns the bytes of a stage's inputs. Parts of the batch do not count, nor do outputs that another
    /// stage of this rank holds, whose backward is later.
    pub(super) fn bytes_of_inputs(&self, stage: usize, inputs: &[Tensor]) -> Outcome<usize> {
        let Some(before) = stage.checked_sub(1) else { return Ok(0) };
        let is_here = self.executor.stages.contains_key(&before);
        if is_here && !self.recomputed.contains(&before) {
            return Ok(0);
        }
        inputs.iter().map(bytes_of).sum()
    }

    /// Counts bytes that are held for a backward.
    pub(super) fn hold(&mut self, place: Place, bytes: usize) {
        *self.held.entry(place).or_default() += bytes;
        self.measured.hold(&self.held);
    }
}

/// Returns the bytes of this rank's part of a tensor.
fn bytes_of(tensor: &Tensor) -> Outcome<usize> {
    let local = local_of(tensor)?;
    Ok(local.numel() * local.f_kind()?.elt_size_in_bytes())
}
