//! The checkpoint that a program goes on from.

use std::path::PathBuf;

use flow_autograd::{OptimizerState, StateDict};
use flow_ddp::checkpoint::agree::agree;
use flow_ddp::checkpoint::in_memory::FoundInMemory;
use flow_ddp::checkpoint::{CheckpointError, Result};
use flow_tensor::ProcessGroup;
use tch::nn::{Optimizer, VarStore};

use super::contents::{Contents, MODEL};
use super::entries::{blank_state, entries, named, variables};
use super::shards::{Entry, Reader, needed_files};
use crate::create::set_rng_state;
use crate::placement::Placement;

/// A checkpoint that is whole.
pub struct ShardedCheckpoint<S> {
    /// The program's own state.
    pub state: S,
    pub(super) path: PathBuf,
    pub(super) group: ProcessGroup,
    pub(super) contents: Contents,
    /// Where it was found, if it is in memory.
    pub(super) in_memory: Option<FoundInMemory>,
}

impl<S> ShardedCheckpoint<S> {
    /// Returns the step that it was saved with.
    pub fn step(&self) -> usize {
        self.contents.step
    }

    /// Gives the model, the global random numbers, and the optimizer if there is one, what they
    /// had, whatever the placements and SBPs were. Each rank reads its own parts. All ranks call
    /// this.
    ///
    /// # Errors
    /// On all ranks, when one of them is of another kind, or a file is missing or damaged; none of
    /// them is of use then.
    pub fn resume(&self, vs: &VarStore, optimizer: Option<&mut Optimizer>) -> Result<()> {
        let mut wanted = agree(&self.group, self.prepare_model(vs))?;
        let mut saved = None;
        if optimizer.is_some() {
            let (state, dict) = agree(&self.group, self.prepare_optimizer(vs))?;
            wanted.extend(state);
            saved = Some(dict);
        }
        self.load_entries(&mut wanted)?;
        let Some((optimizer, dict)) = optimizer.zip(saved) else { return Ok(()) };
        let loaded = optimizer.load_state(&dict);
        agree(&self.group, loaded.map_err(|error| self.other("optimizer", error.to_string())))
    }

    /// Gives the random numbers their state, and returns the tensors of the model, to be read.
    fn prepare_model(&self, vs: &VarStore) -> Result<Vec<Entry>> {
        let entries = entries(&variables(vs), &self.group)?;
        self.check_model(&entries)?;
        set_rng_state(&Placement::all(&self.group)?, self.contents.generator)?;
        Ok(entries)
    }

    /// Returns the tensors of the optimizer's state, to be read, and the state that has them.
    fn prepare_optimizer(&self, vs: &VarStore) -> Result<(Vec<Entry>, StateDict)> {
        let Some(parameters) = self.contents.optimizer.clone() else {
            return Err(self.other("optimizer", "it was saved without one".into()));
        };
        let tensors = blank_state(&self.contents.index, vs)
            .map_err(|reason| self.other("optimizer", reason))?;
        let handles = tensors.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone()));
        let entries = entries(&named(handles), &self.group)?;
        Ok((entries, StateDict { parameters, tensors }))
    }

    fn other(&self, what: &'static str, reason: String) -> CheckpointError {
        CheckpointError::Other { path: self.path.clone(), what, reason }
    }

    /// Checks that it has these tensors, and no others, of the model.
    fn check_model(&self, entries: &[Entry]) -> Result<()> {
        let tensors = &self.contents.index.tensors;
        for entry in entries {
            let name = &entry.name[MODEL.len()..];
            let Some(found) = tensors.get(&entry.name) else {
                return Err(self.other("model", format!("it has no {name}")));
            };
            let wanted = entry.saved()?;
            if (&found.dtype, &found.shape) != (&wanted.dtype, &wanted.shape) {
                let found = format!("{} {:?}", found.dtype, found.shape);
                let wanted = format!("{} {:?}", wanted.dtype, wanted.shape);
                let reason = format!("its {name} is {found}, not {wanted}");
                return Err(self.other("model", reason));
            }
        }
        for name in tensors.keys() {
            let Some(variable) = name.strip_prefix(MODEL) else { continue };
            if !entries.iter().any(|entry| entry.name == *name) {
                let reason = format!("it has {variable}, and this model has not");
                return Err(self.other("model", reason));
            }
        }
        Ok(())
    }

    /// Reads what this rank needs of the entries into their locals.
    pub(super) fn load_entries(&self, entries: &mut [Entry]) -> Result<()> {
        let rank = self.group.rank();
        let files = match &self.in_memory {
            Some(found) => {
                let needed = needed_files(&self.contents.index, entries, rank);
                let needed = agree(&self.group, needed)?;
                found.open(&self.group, |name| needed.contains(name))?
            }
            None => Vec::new(),
        };
        let mut reader = Reader::new(&self.path, &self.contents.index, files);
        let loaded = entries.iter_mut().try_for_each(|entry| reader.load(entry, rank));
        // What was saved over it may look damaged.
        let held = self.in_memory.as_ref().map_or(Ok(()), FoundInMemory::check_held);
        agree(&self.group, held.and(loaded))
    }
}
