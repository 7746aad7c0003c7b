//! Checkpoints of a training: model, optimizer, sampler and the program's own state. And what those
//! of global tensors (`flow-global`) are made of too.
//!
//! | file | what |
//! |---|---|
//! | `mod.rs` | [`Checkpoints`]: save, find the latest; [`Checkpoint`]: resume |
//! | `folder.rs` | [`Folder`]: checkpoints that are whole or not there, for both kinds |
//! | `agree.rs` | what one rank has come to, on all; for both kinds |
//! | `files.rs` | locks, and files that survive a loss of power; for both kinds |
//! | `error.rs` | [`CheckpointError`], for both kinds |
//! | `tensors.rs` | tensors as safetensors |
//! | `sums.rs` | the sums of files |

pub mod agree;
mod error;
pub mod files;
mod folder;
mod sums;
mod tensors;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use flow_autograd::{OptimizerState, StateDict};
use flow_comm::ProcessGroup;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tch::Tensor;
use tch::nn::VarStore;

use crate::data::sampler_state::{SamplerState, Stateful};
use crate::ddp::Ddp;
use crate::fsdp::shared_parameters;
pub use error::{CheckpointError, Result};
pub use folder::Folder;
use sums::SUMS;

/// Files of a checkpoint.
const MODEL: &str = "model.safetensors";
const OPTIMIZER: &str = "optimizer.safetensors";
/// The file of what the program, the sampler and the optimizer go on from.
const STATE: &str = "state.json";
/// Raised when files change so that versions before cannot read them.
const FORMAT: u32 = 2;

/// The checkpoints of one training, in a folder.
///
/// Rank 0 writes and reads for all ranks: the others need not see the folder. The checkpoint of
/// step 100 is the folder `step-100`:
///
/// | file | what |
/// |---|---|
/// | `model.safetensors` | the variables of the `VarStore`, by their names |
/// | `optimizer.safetensors` | momentum and the like, as [`StateDict`] names them |
/// | `state.json` | the optimizer's kind, the sampler's state, and the program's |
/// | `SHA256SUMS` | the sums of the others, as `sha256sum --check` takes them |
///
/// A checkpoint is whole or not there, even if the process is killed or the machine loses its
/// power. Its files are flushed to the disk under another name, and the folder is then renamed. The
/// last two are kept ([`keep`](Self::keep)). A damaged one that [`latest`](Self::latest) has found
/// is never removed: `save` renames it to `step-100.damaged`. A folder `step-100` that has neither
/// `SHA256SUMS` nor `state.json` is no checkpoint, and stays as it is.
///
/// ```no_run
/// use flow_ddp::{Checkpoints, Ddp, DistributedSampler, ProcessGroup};
/// # use tch::nn::{self, OptimizerConfig};
///
/// # fn main() -> anyhow::Result<()> {
/// # let group = ProcessGroup::from_env()?;
/// # let vs = nn::VarStore::new(tch::Device::Cpu);
/// # let model = Ddp::new(nn::linear(vs.root(), 784, 10, Default::default()), &vs, &group)?;
/// # let mut optimizer = nn::Sgd::default().build(&vs, 0.1)?;
/// # let mut sampler = DistributedSampler::new(1000, &group);
/// let mut checkpoints = Checkpoints::open("checkpoints", &group)?;
/// let mut step = 0; // the program's state: any type that serde can write and read
/// if let Some(checkpoint) = checkpoints.latest()? {
///     checkpoint.resume(&vs, &mut optimizer, &mut sampler)?;
///     step = checkpoint.state;
/// }
/// // ... and after a step:
/// checkpoints.save(step, &model, &vs, &optimizer, &sampler, &step)?;
/// # Ok(()) }
/// ```
pub struct Checkpoints {
    folder: Folder,
    group: ProcessGroup,
}

/// A checkpoint to resume from.
pub struct Checkpoint<S> {
    /// The program's own state.
    pub state: S,
    path: PathBuf,
    world_size: usize,
    threads: i32,
    sampler: SamplerState,
    model: HashMap<String, Tensor>,
    optimizer: StateDict,
    group: ProcessGroup,
}

/// `state.json`.
#[derive(Serialize, Deserialize)]
struct SavedState<S> {
    format: u32,
    world_size: usize,
    /// The threads of each rank.
    threads: i32,
    /// [`StateDict::parameters`].
    optimizer: Vec<String>,
    sampler: SamplerState,
    state: S,
}

impl Checkpoints {
    /// Opens the checkpoints in `folder`, which is made if it is missing. All ranks call this.
    ///
    /// # Errors
    ///
    /// On all ranks, when rank 0 cannot write there, or another job does.
    pub fn open(folder: impl AsRef<Path>, group: &ProcessGroup) -> Result<Self> {
        let folder = Folder::open(folder.as_ref(), group, &[SUMS, STATE])?;
        Ok(Self { folder, group: group.clone() })
    }

    /// Keeps the last `count` checkpoints, one at least (default: 2).
    pub fn keep(mut self, count: usize) -> Self {
        self.folder.keep = count;
        self
    }

    /// Writes the checkpoint of `step`, which counts up over the whole training, and removes those
    /// before the last few. All ranks call this; rank 0 writes, and the others go on.
    ///
    /// `state` is what else the program needs to go on, as JSON, which has no NaN and no infinity.
    ///
    /// # Errors
    ///
    /// When the last backward has failed ([`Ddp::synchronize`]), or a tensor cannot be kept, such as a
    /// complex one, on all ranks. On rank 0, when the checkpoint cannot be written; those before it are
    /// then still there. Also when the folder has checkpoints and [`latest`](Self::latest) was not
    /// called.
    pub fn save<M, S: Serialize + DeserializeOwned>(
        &mut self,
        step: usize,
        model: &Ddp<M>,
        vs: &VarStore,
        optimizer: &dyn OptimizerState,
        sampler: &dyn Stateful,
        state: &S,
    ) -> Result<()> {
        model.synchronize()?;
        let path = self.folder.checkpoint(step);
        let mut variables: Vec<_> = vs.variables().into_iter().collect();
        variables.sort_by(|(left, _), (right, _)| left.cmp(right));
        let check = |tensors: &[_]| {
            tensors::check(tensors).map_err(|(what, reason)| unfit(&what, &path, reason))
        };
        // All ranks find what cannot be kept: those that write nothing would wait for rank 0 later.
        check(&variables)?;
        optimizer
            .consolidate_state_dict(0)
            .map_err(|error| unfit("the optimizer", &path, error.to_string()))?;
        let optimizer = optimizer.state();
        if let Ok(optimizer) = &optimizer {
            check(&optimizer.tensors)?;
        }
        if self.group.rank() != 0 {
            return Ok(());
        }
        let optimizer =
            optimizer.map_err(|error| unfit("the optimizer", &path, error.to_string()))?;
        let state = SavedState {
            format: FORMAT,
            world_size: self.group.world_size(),
            threads: tch::get_num_threads(),
            optimizer: optimizer.parameters,
            sampler: sampler.state(),
            state,
        };
        let state = json::<SavedState<S>>(&state)
            .map_err(|reason| unfit("the program's state", &path, reason))?;
        let partial = self.folder.begin(step)?;
        write(&partial, &path, &variables, &optimizer.tensors, &state)
            .and_then(|()| self.folder.commit(step))
            .inspect_err(|_| self.folder.abandon())
    }

    /// Returns the latest checkpoint that is whole, the same on all ranks; None where there is none
    /// at all. A damaged one is a warning in the log. All ranks call this.
    ///
    /// # Errors
    ///
    /// On all ranks, when the disk cannot be read, or there are only damaged checkpoints or those
    /// of another program. Also when rank 0 does not see what another rank sees.
    pub fn latest<S: DeserializeOwned>(&mut self) -> Result<Option<Checkpoint<S>>> {
        let mut contents = [const { Vec::new() }; 3];
        let found = self.folder.latest(|path| {
            contents = sums::read(path, [STATE, MODEL, OPTIMIZER])?;
            Ok(())
        })?;
        let Some((step, ())) = found else { return Ok(None) };
        for bytes in &mut contents {
            agree::broadcast(&self.group, 0, bytes)?;
        }
        self.parse(self.folder.checkpoint(step), contents).map(Some)
    }

    fn parse<S: DeserializeOwned>(
        &self,
        path: PathBuf,
        [state, model, optimizer]: [Vec<u8>; 3],
    ) -> Result<Checkpoint<S>> {
        let state: SavedState<S> =
            parse_state(&state).map_err(|reason| of_other("program", &path, reason))?;
        let SavedState { world_size, threads, optimizer: parameters, sampler, state, .. } = state;
        let model = tensors::read(&model).map_err(|reason| of_other("program", &path, reason))?;
        let model = model.into_iter().collect();
        let tensors =
            tensors::read(&optimizer).map_err(|reason| of_other("program", &path, reason))?;
        let optimizer = StateDict { parameters, tensors };
        let group = self.group.clone();
        Ok(Checkpoint { state, path, world_size, threads, sampler, model, optimizer, group })
    }
}

fn unfit(what: &str, path: &Path, reason: String) -> CheckpointError {
    CheckpointError::unfit("save", format!("{what} in {}", path.display()), reason)
}

fn of_other(what: &'static str, path: &Path, reason: String) -> CheckpointError {
    CheckpointError::Other { path: path.to_path_buf(), what, reason }
}

/// Writes the files of the checkpoint `path` into the folder `partial`.
fn write(
    partial: &Path,
    path: &Path,
    model: &[(String, Tensor)],
    optimizer: &[(String, Tensor)],
    state: &[u8],
) -> Result<()> {
    for (tensors, file) in [(model, MODEL), (optimizer, OPTIMIZER)] {
        tensors::write(tensors, &partial.join(file))
            .map_err(|(what, reason)| unfit(&what, path, reason))?;
    }
    let file = partial.join(STATE);
    std::fs::write(&file, state).map_err(CheckpointError::write(file))?;
    sums::write(partial).map_err(CheckpointError::write(path))
}

/// Reads `state.json`. The format comes first: the rest may be of another one.
fn parse_state<S: DeserializeOwned>(text: &[u8]) -> Result<SavedState<S>, String> {
    let value: serde_json::Value =
        serde_json::from_slice(text).map_err(|error| error.to_string())?;
    if value.get("format").and_then(serde_json::Value::as_u64) != Some(u64::from(FORMAT)) {
        return Err(format!("it has not format {FORMAT} of Flow's checkpoints"));
    }
    serde_json::from_slice(text).map_err(|error| error.to_string())
}

impl<S> Checkpoint<S> {
    /// Gives the model, the optimizer and the sampler what they had. The number of ranks may be
    /// another one: the rest of the epoch is dealt out anew. A warning in the log then says that
    /// the weights will not be the same to the bit as those of a training without interruption.
    ///
    /// # Errors
    ///
    /// When one of them is of another kind or has other settings; none of them is of use then.
    pub fn resume(
        &self,
        vs: &VarStore,
        optimizer: &mut dyn OptimizerState,
        sampler: &mut dyn Stateful,
    ) -> Result<()> {
        sampler
            .resume(&self.sampler)
            .map_err(|cause| CheckpointError::Sampler { path: self.path.clone(), cause })?;
        self.load_model(vs).map_err(|reason| of_other("model", &self.path, reason))?;
        optimizer
            .load_state(&self.optimizer)
            .map_err(|error| of_other("optimizer", &self.path, error.to_string()))?;

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

    fn load_model(&self, vs: &VarStore) -> Result<(), String> {
        // In the order of names: all ranks, and all runs, name the same one.
        let mut variables: BTreeMap<_, _> = vs.variables().into_iter().collect();
        for (name, variable) in &variables {
            let wanted = (variable.kind(), variable.size());
            match self.model.get(name).map(|saved| (saved.kind(), saved.size())) {
                Some(found) if found == wanted => {}
                Some((kind, shape)) => {
                    let wanted = format!("{:?} {:?}", wanted.0, wanted.1);
                    return Err(format!("its {name} is {kind:?} {shape:?}, not {wanted}"));
                }
                None => return Err(format!("it has no {name}")),
            }
        }
        if let Some(name) = self.model.keys().filter(|name| !variables.contains_key(*name)).min() {
            return Err(format!("it has {name}, and this model has not"));
        }
        let tensors: Vec<Tensor> = variables.values().map(Tensor::shallow_clone).collect();
        shared_parameters::load(tensors.iter(), || {
            for (name, variable) in &mut variables {
                tch::no_grad(|| variable.f_copy_(&self.model[name]))
                    .map_err(|error| error.to_string())?;
            }
            Ok(())
        })
    }
}

/// Returns JSON that can be read back as a `T`: it has `null` where a number is NaN.
pub fn json<T: DeserializeOwned>(value: &impl Serialize) -> Result<Vec<u8>, String> {
    let bytes = serde_json::to_vec_pretty(value).map_err(|error| error.to_string())?;
    match serde_json::from_slice::<T>(&bytes) {
        Ok(_) => Ok(bytes),
        Err(error) => Err(format!("it cannot be read back: {error}; JSON has no NaN or infinity")),
    }
}
