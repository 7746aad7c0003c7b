//! What a program goes on from.

use std::path::PathBuf;

use flow_autograd::{OptimizerState, StateDict};
use flow_ddp::checkpoint::agree::agree;
use flow_ddp::checkpoint::{CheckpointError, Result};
use flow_tensor::ProcessGroup;
use tch::nn::{Optimizer, VarStore};

use super::contents::{Contents, MODEL};
use super::entries::{blank_state, entries, named, variables};
use super::shards::{Entry, Reader};
use crate::create::set_rng_state;
use crate::placement::Placement;

/// A checkpoint that is whole.
pub struct ShardedCheckpoint<S> {
    /// The program's own state.
    pub state: S,
    pub(super) path: PathBuf,
    pub(super) group: ProcessGroup,
    pub(super) contents: Contents,
}

impl<S> ShardedCheckpoint<S> {
    /// The step that it was saved with.
    pub fn step(&self) -> usize {
        self.contents.step
    }

    /// Gives the model, the global random numbers, and the optimizer if there is one, what they had,
    /// whatever the placements and SBPs were: each rank reads its own parts. All ranks call this.
    ///
    /// # Errors
    /// On all ranks, when one of them is of another kind, or a file is missing or damaged; none of
    /// them is of use then.
    pub fn resume(&self, vs: &VarStore, optimizer: Option<&mut Optimizer>) -> Result<()> {
        let prepare = || {
            let entries = entries(&variables(vs), &self.group)?;
            self.check_model(&entries)?;
            set_rng_state(&Placement::all(&self.group)?, self.contents.generator)?;
            Ok(entries)
        };
        let mut model = agree(&self.group, prepare())?;
        self.load_entries(&mut model)?;
        let Some(optimizer) = optimizer else { return Ok(()) };
        let other = |reason| {
            let path = self.path.clone();
            CheckpointError::Other { path, what: "optimizer", reason }
        };
        let prepare = || {
            let Some(parameters) = self.contents.optimizer.clone() else {
                return Err(other("it was saved without one".into()));
            };
            let dict = StateDict {
                parameters,
                tensors: blank_state(&self.contents.index, vs).map_err(other)?,
            };
            let handles =
                dict.tensors.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone()));
            Ok((entries(&named(handles), &self.group)?, dict))
        };
        let (mut state, dict) = agree(&self.group, prepare())?;
        self.load_entries(&mut state)?;
        let loaded = optimizer.load_state(&dict);
        agree(&self.group, loaded.map_err(|error| other(error.to_string())))
    }

    /// Checks that it has these tensors, and no others, of the model.
    fn check_model(&self, entries: &[Entry]) -> Result<()> {
        let other = |reason| {
            let path = self.path.clone();
            CheckpointError::Other { path, what: "model", reason }
        };
        let tensors = &self.contents.index.tensors;
        for entry in entries {
            let name = &entry.name[MODEL.len()..];
            let Some(found) = tensors.get(&entry.name) else {
                return Err(other(format!("it has no {name}")));
            };
            let wanted = entry.saved()?;
            if (&found.dtype, &found.shape) != (&wanted.dtype, &wanted.shape) {
                let found = format!("{} {:?}", found.dtype, found.shape);
                let wanted = format!("{} {:?}", wanted.dtype, wanted.shape);
                return Err(other(format!("its {name} is {found}, not {wanted}")));
            }
        }
        let is_new = |name: &&String| {
            name.starts_with(MODEL) && !entries.iter().any(|entry| entry.name == **name)
        };
        match tensors.keys().find(is_new) {
            Some(name) => {
                let name = &name[MODEL.len()..];
                Err(other(format!("it has {name}, and this model has not")))
            }
            None => Ok(()),
        }
    }

    /// Reads what this rank needs of the entries into their locals.
    pub(super) fn load_entries(&self, entries: &mut [Entry]) -> Result<()> {
        let rank = self.group.rank();
        let mut reader = Reader::new(&self.path, &self.contents.index);
        agree(&self.group, entries.iter_mut().try_for_each(|entry| reader.load(entry, rank)))
    }
}
