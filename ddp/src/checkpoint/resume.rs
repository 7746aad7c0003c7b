//! The checkpoint that a program goes on from.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::PathBuf;

use flow_autograd::OptimizerState;
use flow_comm::ProcessGroup;
use serde::de::DeserializeOwned;
use tch::Tensor;
use tch::nn::VarStore;

use super::agree::agree;
use super::error::{CheckpointError, Result};
use super::in_memory::FoundInMemory;
use super::layout::is_of;
use super::saved::{SavedOptimizer, SavedTensors};
use super::saved_file::SavedFile;
use super::state::{MODEL, OPTIMIZER, STATE, SavedState};
use super::sums::failed_to_read;
use crate::data::sampler_state::{SamplerState, Stateful};
use crate::fsdp::shared_parameters;
use crate::fully_shard::parts::{self as sharded_parts, OwnElements};

/// A checkpoint to resume from.
pub struct Checkpoint<S> {
    /// The program's own state.
    pub state: S,
    path: PathBuf,
    group: ProcessGroup,
    world_size: usize,
    threads: i32,
    sampler: SamplerState,
    /// What the optimizer has: [`flow_autograd::StateDict::parameters`].
    parameters: Vec<String>,
    model: SavedTensors,
    optimizer: SavedTensors,
    /// Where it was found, if it is in memory.
    in_memory: Option<FoundInMemory>,
}

impl<S> Checkpoint<S> {
    /// Reads the checkpoint at `path` from its files.
    pub(super) fn read(
        group: &ProcessGroup,
        path: PathBuf,
        mut files: Vec<SavedFile>,
        in_memory: Option<FoundInMemory>,
    ) -> Result<Self>
    where
        S: DeserializeOwned,
    {
        let of_other =
            |reason| CheckpointError::Other { path: path.clone(), what: "program", reason };
        let state = take(&mut files, |name| name == STATE);
        let Some(file) = state.first() else {
            return Err(of_other(format!("it has no {STATE}")));
        };
        let mut text = vec![0; file.length() as usize];
        file.read_exact_at(&mut text, 0).map_err(failed_to_read(&file.path))?;
        let state: SavedState<S> =
            serde_json::from_slice(&text).map_err(|error| of_other(error.to_string()))?;
        let SavedState { world_size, threads, optimizer: parameters, sampler, state, .. } = state;
        let model = SavedTensors::open(take(&mut files, |name| is_of(MODEL, name)))?;
        let optimizer = SavedTensors::open(take(&mut files, |name| is_of(OPTIMIZER, name)))?;
        let group = group.clone();
        Ok(Self {
            state,
            path,
            group,
            world_size,
            threads,
            sampler,
            parameters,
            model,
            optimizer,
            in_memory,
        })
    }

    /// Gives the model, the optimizer and the sampler what they had. The number of ranks may be
    /// another one: the rest of the epoch is dealt out anew. A warning in the log then says that
    /// the weights will not be the same to the bit as those of a training without interruption. Each
    /// rank reads what it is to have. All ranks call this.
    ///
    /// # Errors
    ///
    /// On all ranks, when one of them is of another kind or has other settings, or the disk cannot be
    /// read; none of them is of use then.
    pub fn resume(
        &self,
        vs: &VarStore,
        optimizer: &mut dyn OptimizerState,
        sampler: &mut dyn Stateful,
    ) -> Result<()> {
        let resumed = sampler
            .resume(&self.sampler)
            .map_err(|cause| CheckpointError::Sampler { path: self.path.clone(), cause });
        // In the order of names: all ranks, and all runs, name the same one.
        let mut variables: BTreeMap<_, _> = vs.variables().into_iter().collect();
        let checked = resumed.and_then(|()| {
            self.check_model(&variables).map_err(|reason| self.other("model", reason))
        });
        agree(&self.group, checked)?;
        agree(&self.group, self.load_model(&mut variables))?;
        let loaded = self.load_optimizer(optimizer);
        let in_memory = self.in_memory.as_ref();
        let loaded = loaded.and_then(|()| in_memory.map_or(Ok(()), FoundInMemory::check_held));
        agree(&self.group, loaded)?;

        let here = (self.group.world_size(), tch::get_num_threads());
        if self.group.rank() == 0 && here != (self.world_size, self.threads) {
            log::warn!(
                "{} was saved by {} rank(s) of {} thread(s), and {} of {} resume: the weights will \
                 not be the same to the bit",
                self.path.display(),
                self.world_size,
                self.threads,
                here.0,
                here.1
            );
        }
        Ok(())
    }

    fn check_model(&self, variables: &BTreeMap<String, Tensor>) -> Result<(), String> {
        for (name, variable) in variables {
            let wanted = (variable.kind(), variable.size());
            match self.model.get(name).map(|saved| (saved.kind, &saved.shape)) {
                Some((kind, shape)) if (kind, shape) == (wanted.0, &wanted.1) => {}
                Some((kind, shape)) => {
                    let wanted = format!("{:?} {:?}", wanted.0, wanted.1);
                    return Err(format!("its {name} is {kind:?} {shape:?}, not {wanted}"));
                }
                None => return Err(format!("it has no {name}")),
            }
        }
        match self.model.iter().find(|(name, _)| !variables.contains_key(*name)) {
            Some((name, _)) => Err(format!("it has {name}, and this model has not")),
            None => Ok(()),
        }
    }

    fn load_model(&self, variables: &mut BTreeMap<String, Tensor>) -> Result<()> {
        sharded_parts::free(variables.values())?;
        let mut sharded = Vec::new();
        variables.retain(|name, variable| {
            let own = sharded_parts::own_elements(variable);
            let is_whole = own.is_none();
            if let Some(own) = own {
                sharded.push((name.clone(), variable.shallow_clone(), own));
            }
            is_whole
        });
        for (name, variable, own) in sharded {
            let unfit = |error: String| CheckpointError::unfit("load", &name, error);
            sharded_parts::changed(&variable).map_err(|error| unfit(error.to_string()))?;
            if let Some(OwnElements { start, mut elements }) = own {
                let read = self.model.tensor(&name, start..start + elements.numel())?;
                tch::no_grad(|| elements.f_copy_(&read))
                    .map_err(|error| unfit(error.to_string()))?;
            }
        }
        let tensors: Vec<Tensor> = variables.values().map(Tensor::shallow_clone).collect();
        shared_parameters::load(tensors.iter(), |part_of| {
            for (name, variable) in variables {
                let (part, parts) = part_of(variable);
                let elements = variable.numel();
                let own = elements * part / parts..elements * (part + 1) / parts;
                self.model.load(name, variable, own)?;
            }
            Ok(())
        })
    }

    fn load_optimizer(&self, optimizer: &mut dyn OptimizerState) -> Result<()> {
        let saved = SavedOptimizer {
            parameters: &self.parameters,
            tensors: &self.optimizer,
            failure: RefCell::default(),
        };
        let loaded = optimizer.load_from(&saved);
        match saved.failure.into_inner() {
            Some(failure) => Err(failure),
            None => loaded.map_err(|error| self.other("optimizer", error.to_string())),
        }
    }

    fn other(&self, what: &'static str, reason: String) -> CheckpointError {
        CheckpointError::Other { path: self.path.clone(), what, reason }
    }
}

/// Takes the files whose names are such.
fn take(files: &mut Vec<SavedFile>, is_one: impl Fn(&str) -> bool) -> Vec<SavedFile> {
    let named = files.extract_if(.., |file| {
        file.path.file_name().is_some_and(|name| is_one(&name.to_string_lossy()))
    });
    named.collect()
}
