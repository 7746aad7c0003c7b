//! Steps that are done, or not done at all.

use flow_comm::ProcessGroup;
use tch::Tensor;
use tch::nn::Optimizer;

use super::buffers::Buffers;
use super::newcomers::{Looks, look_for_newcomers};
use crate::ddp::Ddp;
use crate::error::{Error, Result, job_rank};

/// The steps of a group after which it is looked whether the closure alone has changed parameters. To look costs
/// a wait for the GPU.
const CHECKED: u64 = 3;

/// A training while its ranks stay the same: see [`Elastic::run`](crate::Elastic::run).
pub struct Training<'t, M, S> {
    /// The model.
    pub model: Ddp<M>,
    /// The optimizer. A rank that comes gets its state, but not its learning rate and other options: set
    /// those from [`state`](Self::state), as after a change of the ranks.
    pub optimizer: &'t mut Optimizer,
    /// Where the program goes on, should the ranks change now. Change it right after a step, before
    /// anything that can fail.
    pub state: &'t mut S,
    pub(super) group: ProcessGroup,
    pub(super) steps: &'t mut u64,
    /// A small parameter that is trained, which a step that fails must leave alone, as all others.
    pub(super) watched: Option<Tensor>,
    pub(super) buffers: &'t mut Buffers,
    /// The steps that these ranks have done.
    pub(super) done: u64,
    pub(super) looks: Looks,
}

impl<M, S> Training<'_, M, S> {
    /// Returns the group of all ranks.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Returns the number of steps that the weights have had in this job.
    pub fn steps(&self) -> u64 {
        *self.steps
    }

    /// Makes a step: zeroes the gradients, calls `gradients`, which is to run forward and backward, and
    /// steps the optimizer. All ranks call this.
    ///
    /// If `gradients` fails, parameters and buffers are as they were before. Return the error to
    /// [`Elastic::run`](crate::Elastic::run), so that all ranks repeat the step. On GPUs the host waits for
    /// the gradients.
    ///
    /// # Errors
    ///
    /// What `gradients` returns; parameters that it has changed, as [`optimizer_in_backward`] does; a
    /// failure of another rank; [`Error::Newcomers`].
    ///
    /// [`optimizer_in_backward`]: crate::DdpBuilder::optimizer_in_backward
    pub fn step<T, E: From<Error>>(
        &mut self,
        gradients: impl FnOnce(&Ddp<M>, &mut Optimizer) -> Result<T, E>,
    ) -> Result<T, E> {
        self.look_for_newcomers()?;
        self.buffers.keep();
        self.optimizer.zero_grad();
        let before = self.watched.as_ref().map(|parameter| parameter.detach().copy());
        let result = gradients(&self.model, self.optimizer);
        let value = result.and_then(|value| {
            // On a GPU gradients may still be on their way.
            self.model.synchronize()?;
            Ok(value)
        });
        // Optimizers do not count up the versions of parameters, so that these tell nothing.
        if value.is_err() || self.done < CHECKED {
            let watched = self.watched.as_ref().zip(before);
            if watched.is_some_and(|(now, before)| !now.detach().allclose(&before, 0.0, 0.0, true))
            {
                let reason = "the step's closure has changed parameters, which a step that fails must not: it \
                              computes gradients, and the step of the optimizer follows";
                let rank = job_rank(&self.group);
                return Err(Error::Elastic { rank, reason: reason.into() }.into());
            }
        }
        let value = value.inspect_err(|_| self.buffers.restore())?;
        self.done += 1;
        self.optimizer.step();
        *self.steps += 1;
        Ok(value)
    }

    /// Ends the step on rank 0 if somebody waits to join.
    fn look_for_newcomers(&self) -> Result<()> {
        if self.group.rank() != 0 || !self.looks.take_due(&self.group) {
            return Ok(());
        }
        // Else the others, which are in this step, would first see this rank leave, and wait for its end.
        look_for_newcomers(&self.group).inspect_err(|error| self.model.abort(&error.to_string()))
    }
}
