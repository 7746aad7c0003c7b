//! A module's parameters, which ranks gather for its forward and its backward.

use std::sync::{Mutex, MutexGuard, PoisonError};

use flow_autograd::Replacements;
use flow_comm::{ProcessGroup, ReduceOp, digest};
use flow_tensor::{TensorCollectives, Work};
use tch::Tensor;

use super::flat::{FlatParameters, Precision};
use super::options::ShardOptions;
use crate::error::{Error, Result};

/// The parameters of a module: what PyTorch's `fully_shard` makes of one.
pub(super) struct Unit {
    /// The unit's number, in the order in which modules were made.
    pub number: usize,
    /// The first of its parameters, by which errors call the module.
    pub name: String,
    pub options: ShardOptions,
    /// It has what is in no other module.
    pub is_root: bool,
    state: Mutex<State>,
}

pub(super) struct State {
    pub flats: Vec<FlatParameters>,
    gathered: Gathered,
}

/// Where the gathered parameters are.
enum Gathered {
    /// Nowhere.
    No,
    /// On their way to the memory.
    Coming(Vec<Work>),
    /// In the memory, and the module does not reach them.
    Kept,
    /// In the module's parameters.
    Yes(Precision),
}

/// Gradients on their way: of which flat parameters, and which of these have come.
pub(super) struct Reduction {
    flat: usize,
    pub have_come: Vec<bool>,
    work: Work,
}

impl Unit {
    /// Makes the unit of parameters that are sharded already.
    pub fn new(
        number: usize,
        name: String,
        options: ShardOptions,
        is_root: bool,
        flats: Vec<FlatParameters>,
    ) -> Self {
        let state = Mutex::new(State { flats, gathered: Gathered::No });
        Self { number, name, options, is_root, state }
    }

    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the input of the module's forward.
    pub fn input(&self, input: &Tensor) -> Tensor {
        match self.options.mixed_precision.param.filter(|_| input.is_floating_point()) {
            Some(kind) => input.to_kind(kind),
            None => input.shallow_clone(),
        }
    }

    /// Returns what operations of the module's forward take in place of its parameters, if it computes in
    /// half precision.
    pub fn replacements(&self) -> std::result::Result<Option<Replacements>, flow_autograd::Error> {
        let state = self.lock();
        let slots = state.flats.iter().flat_map(|flat| &flat.slots);
        let pairs: Vec<(&Tensor, &Tensor)> =
            slots.filter_map(|slot| Some((&slot.tensor, slot.low.as_ref()?))).collect();
        if pairs.is_empty() {
            return Ok(None);
        }
        // A module around this one has others.
        match Replacements::current() {
            Some(outer) => outer.with(&pairs).map(Some),
            None => Replacements::new(&pairs).map(Some),
        }
    }

    /// Starts to gather the parameters in `group`, if they are nowhere, and returns whether it did.
    pub fn start_gather(&self, group: &ProcessGroup, precision: Precision) -> Result<bool> {
        let state = &mut *self.lock();
        if matches!(state.gathered, Gathered::Yes(own) if own != precision) {
            let reason = "a module cannot run in with_full_parameters or write: run it before \
                          or after";
            return Err(Error::fully_shard(group, reason));
        }
        if !matches!(state.gathered, Gathered::No) {
            return Ok(false);
        }
        let group = group.with_digest(digest(&self.number));
        let mut works = Vec::with_capacity(state.flats.len());
        for flat in &state.flats {
            match flat.start_gather(&group, precision) {
                Ok(work) => works.push(work),
                Err(error) => {
                    // The memory is in use until then.
                    let _ = wait_for_all(works);
                    state.free(&group)?;
                    return Err(error);
                }
            }
        }
        state.gathered = Gathered::Coming(works);
        Ok(true)
    }

    /// Waits for the parameters, which come in this precision, and gives them to the module.
    pub fn finish_gather(&self, group: &ProcessGroup, precision: Precision) -> Result<()> {
        let state = &mut *self.lock();
        state.wait(group)?;
        if let Gathered::Kept = state.gathered {
            let placed = state.flats.iter().try_for_each(|flat| flat.place(precision));
            placed.map_err(|error| Error::fully_shard(group, error))?;
            state.gathered = Gathered::Yes(precision);
        }
        Ok(())
    }

    /// Takes the parameters from the module, and keeps them.
    pub fn withdraw(&self, group: &ProcessGroup) -> Result<()> {
        let state = &mut *self.lock();
        if let Gathered::Yes(_) = state.gathered {
            let withdrawn = state.flats.iter().try_for_each(FlatParameters::withdraw);
            withdrawn.map_err(|error| Error::fully_shard(group, error))?;
            state.gathered = Gathered::Kept;
        }
        Ok(())
    }

    /// Frees the parameters but this rank's chunk of them.
    pub fn reshard(&self, group: &ProcessGroup) -> Result<()> {
        let state = &mut *self.lock();
        state.wait(group)?;
        state.free(group)
    }

    /// Returns whether a tensor lies in the memory of the parameters.
    pub fn has_memory_of(&self, tensor: &Tensor) -> bool {
        self.lock().flats.iter().any(|flat| flat.has_memory_of(tensor))
    }

    /// Returns whether reduced gradients are there.
    pub fn has_gradients(&self) -> bool {
        self.lock().flats.iter().any(FlatParameters::has_gradients)
    }

    /// Returns whether gradients wait to be reduced.
    pub fn has_unreduced(&self) -> bool {
        self.lock().flats.iter().any(FlatParameters::has_unreduced)
    }

    /// Checks that parameters have no gradients of their own: see [`FlatParameters::check_gradients`].
    pub fn check_gradients(&self, group: &ProcessGroup, taken: bool) -> Result<()> {
        let state = self.lock();
        let checked = state.flats.iter().try_for_each(|flat| flat.check_gradients(taken));
        checked.map_err(|reason| Error::fully_shard(group, reason))
    }

    /// Takes the gradients that a backward has left in the parameters. `others_follow`: more will be added to
    /// them.
    pub fn take_gradients(&self, group: &ProcessGroup, others_follow: bool) -> Result<()> {
        let state = &mut *self.lock();
        for flat in &mut state.flats {
            if flat.is_trained {
                let taken = flat.take_gradients(others_follow);
                taken.map_err(|error| Error::fully_shard(group, error))?;
            }
        }
        Ok(())
    }

    /// Starts to reduce the gradients that were taken, each chunk for the rank that keeps it.
    pub fn start_reduce(&self, group: &ProcessGroup) -> Result<Vec<Reduction>> {
        let mut reductions = Vec::new();
        for (number, flat) in self.lock().flats.iter_mut().enumerate() {
            let taken = flat.take_unreduced();
            let taken = taken.map_err(|error| Error::fully_shard(group, error))?;
            let Some((gradients, have_come)) = taken else { continue };
            let group = group.with_digest(digest(&(self.number, &have_come)));
            let work = group.reduce_scatter_tensor_async(gradients, ReduceOp::Avg)?;
            reductions.push(Reduction { flat: number, have_come, work });
        }
        Ok(reductions)
    }

    /// Waits for this rank's chunk of gradients, and starts to average it over `replicas`.
    pub fn start_average(
        &self,
        replicas: &ProcessGroup,
        reduction: Reduction,
    ) -> Result<Reduction> {
        let Reduction { flat, have_come, work } = reduction;
        let replicas = replicas.with_digest(digest(&(self.number, &have_come)));
        let work = replicas.all_reduce_tensor_async(work.wait()?, ReduceOp::Avg)?;
        Ok(Reduction { flat, have_come, work })
    }

    /// Waits for gradients, and keeps this rank's chunk.
    pub fn finish_reduce(&self, group: &ProcessGroup, reduction: Reduction) -> Result<()> {
        let reduced = reduction.work.wait()?;
        let added = self.lock().flats[reduction.flat].add(&reduced, &reduction.have_come);
        added.map_err(|error| Error::fully_shard(group, error))
    }
}

impl State {
    /// Waits for the parameters that are on their way. After an error they are nowhere.
    fn wait(&mut self, group: &ProcessGroup) -> Result<()> {
        if let Gathered::Coming(works) = &mut self.gathered {
            let come = wait_for_all(std::mem::take(works));
            self.gathered = Gathered::Kept;
            if come.is_err() {
                self.free(group)?;
            }
            return come;
        }
        Ok(())
    }

    /// Frees the memory, in which nothing is on its way.
    fn free(&mut self, group: &ProcessGroup) -> Result<()> {
        let freed = self.flats.iter().try_for_each(FlatParameters::free);
        freed.map_err(|error| Error::fully_shard(group, error))?;
        self.gathered = Gathered::No;
        Ok(())
    }
}

/// Waits for all operations. The error is the first.
fn wait_for_all(works: Vec<Work>) -> Result<()> {
    let mut first = Ok(());
    for work in works {
        let done = work.wait().map(drop);
        first = first.and(done);
    }
    Ok(first?)
}
