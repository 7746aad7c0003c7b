//! Steps of scaled losses: all ranks leave out the same ones.

use flow_comm::ProcessGroup;
use tch::Tensor;

use super::ZeroRedundancyOptimizer;
use super::setting::JoinedSteps;
use crate::error::{Error, Result};
use crate::grad_scaler::{Found, ScaledOptimizer};

/// The code of a notice in a join that ranks are about to tell what they have found. Those of steps
/// are 0 or more.
pub(super) const TELLS: i64 = -1;

/// What ranks tell each other. Those that have ended in a join tell [`ENDED`].
const NOTHING: i64 = 0;
const FINITE: i64 = 1;
const OVERFLOW: i64 = 2;
pub(super) const ENDED: i64 = 3;

impl ScaledOptimizer for ZeroRedundancyOptimizer {
    type Error = Error;

    fn variables_to_step(&self) -> Result<Vec<Tensor>> {
        self.parameters_to_unscale()
    }

    fn agree(&self, found: Result<Found>) -> Result<Found> {
        self.agree_on_gradients(found)
    }

    fn take_step(&mut self) -> Result<()> {
        self.step()
    }

    fn skip_step(&mut self) -> Result<()> {
        Ok(())
    }
}

/// In a [`join`](crate::join()), which has a reference to the optimizer.
impl ScaledOptimizer for &ZeroRedundancyOptimizer {
    type Error = Error;

    fn variables_to_step(&self) -> Result<Vec<Tensor>> {
        self.parameters_to_unscale()
    }

    fn agree(&self, found: Result<Found>) -> Result<Found> {
        self.agree_on_gradients(found)
    }

    fn take_step(&mut self) -> Result<()> {
        self.step()
    }

    fn skip_step(&mut self) -> Result<()> {
        Ok(())
    }
}

impl ZeroRedundancyOptimizer {
    /// Returns all parameters, also those that other ranks step: clipping needs all gradients. Those of
    /// a sharded model are this rank's parts.
    fn parameters_to_unscale(&self) -> Result<Vec<Tensor>> {
        self.parts.group.check("unscale")?;
        if self.parts.is_in_backward() {
            return Err(self.parts.failed(
                "a Ddp steps it in backward, with the gradients of the scaled loss: build the Ddp \
                 without hook_with_zero_step, or use bf16 without a GradScaler",
            ));
        }
        let shards = self.parts.shards();
        if let Some(kept) = &shards.kept {
            // The others wait for what this rank finds.
            return kept.parts().inspect_err(|error| self.parts.group.abort(&error.to_string()));
        }
        Ok(shards.parameters.iter().map(|parameter| parameter.tensor.shallow_clone()).collect())
    }

    /// Returns what all ranks have found together. All ranks call this.
    fn agree_on_gradients(&self, found: Result<Found>) -> Result<Found> {
        // The others wait for what this rank has found.
        let found = found.inspect_err(|error| self.parts.group.abort(&error.to_string()))?;
        if let Some(JoinedSteps { context, .. }) = &*self.joined.borrow() {
            context.notify(TELLS)?;
        }
        let found = self.gather_found(match found {
            Found::Nothing => NOTHING,
            Found::Finite => FINITE,
            Found::Overflow => OVERFLOW,
        })?;
        let has_overflow = found.contains(&OVERFLOW);
        if !has_overflow && !found.contains(&FINITE) {
            return Ok(Found::Nothing);
        }
        let without = ranks_with_nothing(&self.parts.group, &found);
        if !without.is_empty() {
            return Err(self.parts.failed(format!(
                "GradScaler: the ranks {without:?} have no gradients, and others have some: let all \
                 ranks run the same backward, and zero_grad() before it"
            )));
        }
        Ok(if has_overflow { Found::Overflow } else { Found::Finite })
    }

    /// Tells all ranks what this one has found, and returns what each has.
    pub(super) fn gather_found(&self, own: i64) -> Result<Vec<i64>> {
        let mut found = vec![0; self.parts.group.world_size()];
        self.parts.group.all_gather(&[own], &mut found)?;
        Ok(found)
    }
}

/// Returns the ranks in the job that have no gradients.
fn ranks_with_nothing(group: &ProcessGroup, found: &[i64]) -> Vec<usize> {
    let ranks = group.ranks().iter().zip(found);
    ranks.filter(|&(_, &found)| found == NOTHING).map(|(&rank, _)| rank).collect()
}
