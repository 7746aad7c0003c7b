//! The parts of the optimizer that it shares with the [`Ddp`](crate::Ddp) in whose backward it steps.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use flow_autograd::{StateDict, identity};
use flow_comm::ProcessGroup;
use flow_tensor::cuda_group;
use tch::Tensor;

use super::error::failed;
use super::gather::Gather;
use super::shards::Shards;
use crate::error::{Error, Result, job_rank};

/// What ranks step, and how they gather it.
pub(crate) struct Parts {
    /// The optimizer's own group.
    pub group: ProcessGroup,
    /// What was chosen, in a line.
    pub chosen: String,
    shards: Mutex<Shards>,
    /// None where a model keeps gradients in parts: its parameters are not gathered here.
    gather: Mutex<Option<Gather>>,
    /// The whole state, if this rank has gathered it since the last step.
    consolidated: Mutex<Option<StateDict>>,
    /// A `Ddp` steps it.
    is_in_backward: AtomicBool,
}

impl Parts {
    /// Makes the parts of an optimizer, `chosen`, over the ranks of `group`.
    pub fn new(
        group: ProcessGroup,
        chosen: String,
        shards: Shards,
        gather: Option<Gather>,
    ) -> Self {
        Self {
            group,
            chosen,
            shards: Mutex::new(shards),
            gather: Mutex::new(gather),
            consolidated: Mutex::default(),
            is_in_backward: AtomicBool::new(false),
        }
    }

    /// Locks this rank's shards.
    pub fn shards(&self) -> MutexGuard<'_, Shards> {
        self.shards.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the whole state.
    pub fn consolidated(&self) -> MutexGuard<'_, Option<StateDict>> {
        self.consolidated.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether it is the optimizer of a model that keeps gradients in parts.
    pub fn keeps_gradients(&self) -> bool {
        self.shards().kept.is_some()
    }

    /// Returns whether a `Ddp` steps it.
    pub fn is_in_backward(&self) -> bool {
        self.is_in_backward.load(Ordering::Relaxed)
    }

    /// Gives each rank what all have stepped. All ranks call this.
    pub fn gather(&self) -> Result<()> {
        if self.group.world_size() == 1 {
            return Ok(());
        }
        match &mut *self.gather.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(gather) => gather.run(&self.group),
            None => Ok(()),
        }
    }

    /// Makes an error of this optimizer.
    pub fn failed(&self, reason: impl ToString) -> Error {
        failed(job_rank(&self.group), reason)
    }
}

/// An optimizer that the backward of a [`Ddp`](crate::Ddp) steps.
pub(crate) struct ZeroInBackward {
    parts: Arc<Parts>,
    /// Where the optimizer has each parameter of the model.
    places: Vec<usize>,
}

impl fmt::Debug for ZeroInBackward {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ZeroInBackward").finish_non_exhaustive()
    }
}

impl ZeroInBackward {
    /// Takes the optimizer's steps over, of a model with these parameters.
    pub fn new(parts: &Arc<Parts>, parameters: &[(String, Tensor)]) -> Result<Self> {
        if parts.keeps_gradients() {
            return Err(
                parts.failed("it is the optimizer of a sharded model: call step after backward")
            );
        }
        let known: HashMap<usize, usize> = {
            let shards = parts.shards();
            let tensors = shards.parameters.iter().map(|parameter| identity(&parameter.tensor));
            tensors.enumerate().map(|(place, tensor)| (tensor, place)).collect()
        };
        let mut places = Vec::with_capacity(parameters.len());
        for (name, tensor) in parameters {
            let Some(place) = known.get(&identity(tensor)) else {
                return Err(parts.failed(format!(
                    "it has no {name}, which the model has: make the optimizer of the VarStore that has \
                     all parameters of the model"
                )));
            };
            places.push(*place);
        }
        if places.len() < known.len() {
            return Err(parts.failed(format!(
                "it has {} parameters and the model {}: wrap all that is in the optimizer's VarStore",
                known.len(),
                places.len()
            )));
        }
        if parts.is_in_backward.swap(true, Ordering::Relaxed) {
            return Err(parts.failed("another Ddp steps it in backward: drop that one first"));
        }
        Ok(Self { parts: Arc::clone(parts), places })
    }

    /// Returns the optimizer's group, in which ranks wait for each other.
    pub fn group(&self) -> &ProcessGroup {
        &self.parts.group
    }

    /// Begins the step of a backward.
    pub fn begin(&self) -> Result<()> {
        self.parts.consolidated().take();
        self.parts.shards().check().map_err(|reason| self.parts.failed(reason))
    }

    /// Applies the gradient of the parameter at this place of the model to this rank's part, and frees
    /// it.
    pub fn step(&self, position: usize) -> Result<()> {
        let stepped = self.parts.shards().step_one(self.places[position]);
        stepped.map_err(|reason| self.parts.failed(reason))
    }

    /// Ends the step: gives each rank what all have stepped.
    pub fn finish(&self) -> Result<()> {
        self.parts.gather()
    }

    /// Waits until all parts are there, which on a GPU may be after the step.
    pub fn synchronize(&self) -> Result<()> {
        let like = self.parts.shards().parameters[0].tensor.shallow_clone();
        if let Some(cuda) = cuda_group(&self.parts.group, &like)? {
            cuda.synchronize()?;
        }
        Ok(())
    }
}

impl Drop for ZeroInBackward {
    fn drop(&mut self) {
        self.parts.is_in_backward.store(false, Ordering::Relaxed);
    }
}
