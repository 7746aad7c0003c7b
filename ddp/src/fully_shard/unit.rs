//! A module's parameters, which ranks gather for its forward and its backward.

use std::sync::{Mutex, MutexGuard, PoisonError};

use flow_comm::{ProcessGroup, ReduceOp, digest};
use flow_tensor::{TensorCollectives, Work};
use tch::Tensor;

use super::flat::{FlatParameters, torch};
use crate::error::Result;

/// The parameters of a module: what PyTorch's `fully_shard` makes of one.
pub(super) struct Unit {
    /// The unit's number, in the order in which modules were made.
    pub number: usize,
    /// The first of its parameters, by which errors call the module.
    pub name: String,
    pub reshard_after_forward: bool,
    /// It has what is in no other module.
    pub is_root: bool,
    state: Mutex<State>,
}

pub(super) struct State {
    pub flats: Vec<FlatParameters>,
    gathered: Gathered,
}

/// Whether the parameters have memory.
enum Gathered {
    No,
    Coming(Vec<Work>),
    Yes,
}

/// Gradients on their way: of which flat parameters, and which of these have come.
pub(super) struct Reduction {
    flat: usize,
    have_come: Vec<bool>,
    work: Work,
}

impl Unit {
    /// Makes the unit of parameters that are sharded already.
    pub fn new(
        number: usize,
        name: String,
        reshard_after_forward: bool,
        is_root: bool,
        flats: Vec<FlatParameters>,
    ) -> Self {
        let state = Mutex::new(State { flats, gathered: Gathered::No });
        Self { number, name, reshard_after_forward, is_root, state }
    }

    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts to gather the parameters in `group`, if they are not there, and returns whether it did.
    pub fn start_gather(&self, group: &ProcessGroup) -> Result<bool> {
        let state = &mut *self.lock();
        if !matches!(state.gathered, Gathered::No) {
            return Ok(false);
        }
        let group = group.with_digest(digest(&self.number));
        let mut works = Vec::with_capacity(state.flats.len());
        for flat in &state.flats {
            works.push(flat.start_gather(&group)?);
        }
        state.gathered = Gathered::Coming(works);
        Ok(true)
    }

    /// Waits for the parameters, and gives them to the module.
    pub fn finish_gather(&self, group: &ProcessGroup) -> Result<()> {
        let state = &mut *self.lock();
        if let Gathered::Coming(works) = &mut state.gathered {
            for work in std::mem::take(works) {
                let _ = work.wait()?;
            }
            let placed = state.flats.iter().try_for_each(FlatParameters::place);
            placed.map_err(|error| torch(group, error))?;
            state.gathered = Gathered::Yes;
        }
        Ok(())
    }

    /// Frees the parameters but this rank's chunk of them.
    pub fn reshard(&self, group: &ProcessGroup) -> Result<()> {
        self.finish_gather(group)?;
        let state = &mut *self.lock();
        if matches!(state.gathered, Gathered::Yes) {
            let freed = state.flats.iter().try_for_each(FlatParameters::free);
            freed.map_err(|error| torch(group, error))?;
            state.gathered = Gathered::No;
        }
        Ok(())
    }

    /// Returns whether a tensor lies in the memory of the parameters.
    pub fn has_memory_of(&self, tensor: &Tensor) -> bool {
        self.lock().flats.iter().any(|flat| flat.has_memory_of(tensor))
    }

    /// Returns whether reduced gradients are there.
    pub fn has_gradients(&self) -> bool {
        self.lock().flats.iter().any(FlatParameters::has_gradients)
    }

    /// Takes the gradients that a backward has left in the parameters.
    pub fn take_gradients(&self) -> Result<(), flow_autograd::Error> {
        let state = &mut *self.lock();
        let mut trained = state.flats.iter_mut().filter(|flat| flat.is_trained);
        trained.try_for_each(FlatParameters::take_gradients)
    }

    /// Starts to reduce the gradients that were taken, each chunk for the rank that keeps it.
    pub fn start_reduce(&self, group: &ProcessGroup) -> Result<Vec<Reduction>> {
        let mut reductions = Vec::new();
        for (number, flat) in self.lock().flats.iter_mut().enumerate() {
            let have_come = flat.have_come();
            let Some(gradients) = flat.take_unreduced() else { continue };
            flat.clear_come();
            let group = group.with_digest(digest(&(self.number, &have_come)));
            let work = group.reduce_scatter_tensor_async(gradients, ReduceOp::Avg)?;
            reductions.push(Reduction { flat: number, have_come, work });
        }
        Ok(reductions)
    }

    /// Waits for gradients, and keeps this rank's chunk.
    pub fn finish_reduce(&self, reduction: Reduction) -> Result<()> {
        let reduced = reduction.work.wait()?;
        self.lock().flats[reduction.flat].add(&reduced, &reduction.have_come);
        Ok(())
    }
}
