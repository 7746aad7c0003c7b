//! Checkpoints of a training: model, optimizer, sampler and the program's own state. And what those
//! of global tensors (`flow-global`) are made of too.
//!
//! | file | what |
//! |---|---|
//! | `mod.rs` | [`Checkpoints`]: save, find the latest |
//! | `model.rs` | [`CheckpointModel`] |
//! | `resume.rs` | [`Checkpoint`]: resume |
//! | `variables.rs` | the variables that a rank has, and its parts of those that ranks share |
//! | `parts.rs` | what each rank writes; for both kinds |
//! | `storage.rs` | where checkpoints are: in a folder, in memory, or in both; for both kinds |
//! | `saving.rs` | a checkpoint that is written at once, or beside the training; for both kinds |
//! | `memory.rs` | the memory of a copy; for both kinds |
//! | `in_memory.rs` | checkpoints in memory that outlives this process; for both kinds |
//! | `plan.rs` | all files that are written, and where this rank's parts go; for both kinds |
//! | `layout.rs` | which file has which tensor; for both kinds |
//! | `laid_out.rs` | how the tensors of the last checkpoint were laid out |
//! | `write.rs` | how a rank writes its parts; for both kinds |
//! | `saved_file.rs` | a file, wherever its bytes are; for both kinds |
//! | `saved.rs` | the tensors of files, which are read as they are needed; for both kinds |
//! | `sums.rs` | the sums of files; for both kinds |
//! | `state.rs` | `state.json`, and what files are called |
//! | `sharers.rs` | which ranks see rank 0's disk, and files for the others |
//! | `folder.rs` | `Folder`: checkpoints that are whole or not there, for both kinds |
//! | `agree.rs` | what one rank has come to, on all; for both kinds |
//! | `files.rs` | locks, and files that survive a loss of power; for both kinds |
//! | `safetensors.rs` | the head of a safetensors file; for both kinds |
//! | `error.rs` | [`CheckpointError`], for both kinds |

pub mod agree;
mod error;
pub mod files;
mod folder;
pub mod in_memory;
mod laid_out;
pub mod layout;
pub mod memory;
mod model;
pub mod parts;
pub mod plan;
mod resume;
pub mod safetensors;
pub mod saved;
pub mod saved_file;
pub mod saving;
mod sharers;
mod state;
pub mod storage;
pub mod sums;
mod variables;
pub mod write;

use std::path::Path;

use flow_autograd::{OptimizerState, StateDict, StatePart, StateParts};
use flow_comm::ProcessGroup;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tch::nn::VarStore;

use crate::data::sampler_state::Stateful;
pub use crate::model_check::gather_texts;
use agree::{agree, exchange};
use error::WRITABLE;
pub use error::{CheckpointError, Result};
use laid_out::{LaidOut, STEMS};
pub use model::CheckpointModel;
use model::check_own_parameters;
use parts::{Part, Whole, divide};
use plan::{Plan, write_sums};
pub use resume::Checkpoint;
use saving::{LastFile, Partial, Saving, saved_after};
use state::{FORMAT, SavedState, check_format};
pub use state::{MODEL, OPTIMIZER, STATE, json};
use storage::{Found, Storage};
use sums::{SUMS, read_checked};
use variables::variables;

/// Bytes of tensors in a file: as many as Hugging Face's files have.
pub const FILE_BYTES: u64 = 5_000_000_000;

/// The checkpoints of one training, in a folder.
///
/// All ranks that see rank 0's disk write and read; the others need not see the folder. The checkpoint
/// of step 100 is the folder `step-100`:
///
/// | file | what |
/// |---|---|
/// | `model.safetensors` | the variables of the `VarStore`, by their names |
/// | `optimizer.safetensors` | momentum and the like, as [`StateDict`](flow_autograd::StateDict) names them |
/// | `state.json` | the optimizer's kind, the sampler's state, and the program's |
/// | `sums.json` | the sums of the others |
///
/// A model of more than 5 GB is in several files and an index, as Hugging Face lays them out
/// ([`file_bytes`](Self::file_bytes)). So is the optimizer's state.
///
/// A checkpoint is whole or not there, even if the process is killed or the machine loses its
/// power. Its files are flushed to the disk under another name, and the folder is then renamed. The
/// last two are kept ([`keep`](Self::keep)). A damaged one that [`latest`](Self::latest) has found
/// is never removed: `save` renames it to `step-100.damaged`. A folder `step-100` that has neither
/// `sums.json` nor `state.json` is no checkpoint, and stays as it is.
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
    storage: Storage,
    group: ProcessGroup,
    file_bytes: u64,
    laid_out: LaidOut,
}

/// A checkpoint in a folder has one of these at least.
const MARKS: &[&str] = &[SUMS, STATE];

impl Checkpoints {
    /// Opens the checkpoints in `folder`, which is made if it is missing. All ranks call this.
    ///
    /// # Errors
    ///
    /// On all ranks, when rank 0 cannot write there, or another job does.
    pub fn open(folder: impl AsRef<Path>, group: &ProcessGroup) -> Result<Self> {
        Ok(Self::new(Storage::in_folder(folder.as_ref(), group, MARKS)?, group))
    }

    /// Opens the checkpoints in the memory that flow-launch has for its workers. It outlives them, however
    /// they end: a job that `--max-restarts` restarts resumes from there, without a disk. All ranks call
    /// this.
    ///
    /// [`save`](Self::save) and [`async_save`](Self::async_save) copy the state there, beside the last
    /// checkpoint. That stays until all ranks have the new one, with its sums. So [`latest`](Self::latest)
    /// finds one or the other, whole, whenever ranks are killed. Each rank needs twice as much memory as its
    /// part of the files has bytes. It is free once flow-launch ends.
    ///
    /// On several machines rank 0's machine has all: if it is lost, so are the checkpoints, unless they are
    /// [in a folder too](Self::and_folder).
    ///
    /// # Errors
    ///
    /// On all ranks, when a rank was not started by flow-launch, or another `Checkpoints` of this process
    /// has the memory.
    pub fn in_memory(group: &ProcessGroup) -> Result<Self> {
        Ok(Self::new(Storage::in_memory(in_memory::open(), group, MARKS)?, group))
    }

    fn new(storage: Storage, group: &ProcessGroup) -> Self {
        Self { storage, group: group.clone(), file_bytes: FILE_BYTES, laid_out: LaidOut::default() }
    }

    /// Writes checkpoints to `folder`, too, as those that [`open`](Self::open) opens: what is in memory is
    /// written. [`latest`](Self::latest) then returns the newest, wherever it is. All ranks call this.
    ///
    /// # Errors
    ///
    /// Those of [`open`](Self::open).
    pub fn and_folder(mut self, folder: impl AsRef<Path>) -> Result<Self> {
        self.storage = self.storage.and_folder(folder.as_ref())?;
        Ok(self)
    }

    /// Keeps the last `count` checkpoints in the folder, one at least (default: 2).
    pub fn keep(mut self, count: usize) -> Self {
        self.storage.keep(count);
        self
    }

    /// Puts tensors of at most so many bytes into a file, but a tensor that has more (default: 5 GB). All ranks give
    /// the same.
    pub fn file_bytes(mut self, most: u64) -> Self {
        self.file_bytes = most;
        self.laid_out.forget_files();
        self
    }

    /// Writes the checkpoint of `step`, which counts up over the whole training, and removes those
    /// before the last few. All ranks call this, and return when it is whole.
    ///
    /// Each rank writes its part of what ranks share: the parameters of an [`Fsdp`](crate::Fsdp) or a
    /// [`FullySharded`](crate::FullySharded), and the
    /// state of its optimizer or of a [`ZeroRedundancyOptimizer`](crate::ZeroRedundancyOptimizer). All else
    /// is rank 0's. [Ignored](crate::FsdpBuilder::ignored_parameters) parameters are equal on all ranks.
    ///
    /// `state` is what else the program needs to go on, as JSON, which has no NaN and no infinity;
    /// rank 0's counts.
    ///
    /// # Errors
    ///
    /// On all ranks: when the last backward has failed ([`CheckpointModel::synchronize`]), a tensor cannot be kept,
    /// such as a sparse one, or the checkpoint cannot be written; those before it are then still there.
    /// Also when the folder has checkpoints and [`latest`](Self::latest) was not called. The error of a
    /// checkpoint that was written [beside the training](Self::async_save) meanwhile, whose folder it names:
    /// this one is saved then.
    pub fn save<S: Serialize + DeserializeOwned>(
        &mut self,
        step: usize,
        model: &impl CheckpointModel,
        vs: &VarStore,
        optimizer: &dyn OptimizerState,
        sampler: &dyn Stateful,
        state: &S,
    ) -> Result<()> {
        let before = self.wait();
        let saving = self.begin(step, (model, vs), optimizer, sampler, state);
        let saved = saving.and_then(|saving| self.storage.save(saving));
        saved_after(before, saved)
    }

    /// Writes a checkpoint as [`save`](Self::save) does, beside the training: PyTorch's `async_save`. When it
    /// returns, each rank has copied what it writes, and all of it may change. A thread writes the copy. The
    /// copy needs as much memory as this rank's part of the files has bytes, and keeps it for the next one.
    ///
    /// The checkpoint is whole once [`wait`](Self::wait) has returned: call that at the end of the program, as
    /// a drop waits, but only logs an error. The next `async_save`, `save` or `latest` waits as well. All ranks
    /// call this.
    ///
    /// # Errors
    ///
    /// On all ranks: those of [`save`](Self::save) before anything is written; too little memory for the
    /// copies of a machine's ranks. The error of the checkpoint before, whose folder it names: this one is
    /// being written then.
    pub fn async_save<S: Serialize + DeserializeOwned>(
        &mut self,
        step: usize,
        model: &impl CheckpointModel,
        vs: &VarStore,
        optimizer: &dyn OptimizerState,
        sampler: &dyn Stateful,
        state: &S,
    ) -> Result<()> {
        let before = self.wait();
        let saving = self.begin(step, (model, vs), optimizer, sampler, state);
        let begun = saving.and_then(|saving| self.storage.start(saving));
        saved_after(before, begun)
    }

    /// Waits until the checkpoint of the last [`async_save`](Self::async_save) is whole. All ranks call this.
    ///
    /// # Errors
    ///
    /// On all ranks, when it could not be written; those before it are then still there.
    pub fn wait(&mut self) -> Result<()> {
        self.storage.wait()
    }

    /// Makes the files of a checkpoint.
    fn begin<S: Serialize + DeserializeOwned>(
        &mut self,
        step: usize,
        (model, vs): (&impl CheckpointModel, &VarStore),
        optimizer: &dyn OptimizerState,
        sampler: &dyn Stateful,
        state: &S,
    ) -> Result<Saving> {
        model.synchronize()?;
        let partial = self.storage.begin(step)?;
        let saving = self.lay_out(step, partial, (model, vs), optimizer, sampler, state);
        saving.inspect_err(|_| self.storage.abandon())
    }

    /// Lays out what the ranks write, and makes the files. Each time that ranks wait for each other stalls the training,
    /// so they exchange all that they need at once.
    fn lay_out<S: Serialize + DeserializeOwned>(
        &mut self,
        step: usize,
        partial: Option<Partial>,
        (model, vs): (&impl CheckpointModel, &VarStore),
        optimizer: &dyn OptimizerState,
        sampler: &dyn Stateful,
        state: &S,
    ) -> Result<Saving> {
        let writers = match &partial {
            Some(partial) => sharers::ranks(&self.group, &partial.path)?,
            None => self.group.ranks_on_machine_of(0),
        };
        let parts = self.parts(&writers, step, (model, vs), optimizer);
        let rank = self.group.rank();
        let own = parts.and_then(|Parts { parameters, of_files }| {
            if rank > 0 {
                return Ok((String::new(), of_files));
            }
            let state = SavedState {
                format: FORMAT,
                world_size: self.group.world_size(),
                threads: tch::get_num_threads(),
                optimizer: parameters,
                sampler: sampler.state(),
                state,
            };
            let state = json::<SavedState<S>>(&state)
                .map_err(|reason| self.unfit("the program's state", step, reason))?;
            Ok((state, of_files))
        });
        let ((state, parts), news) = exchange(&self.group, own, |(_, of_files)| {
            let listed = of_files.each_ref().map(|parts| parts.iter().map(Part::listed).collect());
            self.laid_out.news(rank, listed)
        })?;
        let path = self.storage.path(step);
        let name = format!("its files in {}", path.display());
        self.laid_out.update(news, self.file_bytes, |reason| {
            CheckpointError::unfit("save", &name, reason)
        })?;
        let mut plan = Plan::new(rank == 0);
        plan.add(STATE.to_owned(), state.into_bytes());
        for ((stem, files), parts) in STEMS.into_iter().zip(&self.laid_out.files).zip(parts) {
            plan.add_tensors(stem, files, parts);
        }
        if let Some(partial) = &partial {
            agree(&self.group, plan.create(&partial.path, &path, WRITABLE))?;
        }
        let names = plan.names().to_vec();
        let last: LastFile =
            Box::new(move |partial, path, pieces| write_sums(partial, path, &names, pieces));
        Ok(Saving { plan, group: self.group.clone(), step, path, files: partial, last })
    }

    /// Returns what this rank writes. The ranks `writers` write what ranks have in common. All ranks call this. An
    /// error may be this rank's alone.
    fn parts(
        &self,
        writers: &[usize],
        step: usize,
        (model, vs): (&impl CheckpointModel, &VarStore),
        optimizer: &dyn OptimizerState,
    ) -> Result<Parts> {
        let all_write = writers.len() == self.group.world_size();
        // The ranks may meet in each of these: none leaves before the last one.
        let variables = variables(&self.group, model, vs, all_write);
        let own_parameters = check_own_parameters(model);
        let state = self.state_parts(optimizer, all_write);
        let (variables, own) = variables?;
        // All ranks find what cannot be kept, also those that write nothing.
        self.check(step, &variables)?;
        own_parameters?;
        let state = state.map_err(|error| self.unfit("the optimizer", step, error.to_string()))?;
        let mut wholes = Vec::new();
        let mut parts = Vec::new();
        for part in state.parts {
            if state.are_whole {
                let StatePart { name, tensor, .. } = part;
                wholes.push(Whole { name, tensor, is_common: false });
            } else {
                parts.push(self.part(step, part)?);
            }
        }
        self.check(step, &wholes)?;
        let of_model = own.into_iter().map(|part| self.part(step, part));
        let mut of_model = of_model.collect::<Result<Vec<_>>>()?;
        let rank = self.group.rank();
        of_model.extend(divide(rank, writers, variables)?);
        parts.extend(divide(rank, writers, wholes)?);
        Ok(Parts { parameters: state.parameters, of_files: [of_model, parts] })
    }

    fn part(&self, step: usize, part: StatePart) -> Result<Part> {
        let StatePart { name, shape, start, tensor } = part;
        Part::new(&name, &shape, start, tensor).map_err(|reason| self.unfit(&name, step, reason))
    }

    /// Returns what this rank has of the optimizer's state: rank 0 has all if not all ranks write.
    fn state_parts(
        &self,
        optimizer: &dyn OptimizerState,
        all_write: bool,
    ) -> Result<StateParts, flow_autograd::Error> {
        if all_write {
            return optimizer.parts();
        }
        optimizer.consolidate_state_dict(0)?;
        if self.group.rank() == 0 {
            return optimizer.state().map(StateParts::whole);
        }
        Ok(StateParts::whole(StateDict::default()))
    }

    /// Checks that tensors can be kept.
    fn check(&self, step: usize, tensors: &[Whole]) -> Result<()> {
        for Whole { name, tensor, .. } in tensors {
            parts::check(tensor).map_err(|reason| self.unfit(name, step, reason))?;
        }
        Ok(())
    }

    fn unfit(&self, what: &str, step: usize, reason: String) -> CheckpointError {
        let path = self.storage.path(step);
        CheckpointError::unfit("save", format!("{what} in {}", path.display()), reason)
    }

    /// Returns the latest checkpoint that is whole, the same on all ranks; None where there is none
    /// at all. A damaged one is a warning in the log. All ranks call this.
    ///
    /// # Errors
    ///
    /// On all ranks, when the disk cannot be read, or there are only damaged checkpoints or those
    /// of another program. Also when rank 0 does not see what another rank sees. When the ranks have
    /// [changed](ProcessGroup::reconfigure), and parts of the one that is left in memory are gone.
    pub fn latest<S: DeserializeOwned>(&mut self) -> Result<Option<Checkpoint<S>>> {
        let found = self.storage.latest(|path| {
            if !path.join(SUMS).exists() {
                check_format(path)?; // other formats have none
            }
            let sums = read_checked(path)?;
            check_format(path)?;
            Ok(sums)
        })?;
        let read = match found {
            None => return Ok(None),
            Some(Found::InFolder(path, sums)) => {
                let names: Vec<&String> = sums.keys().collect();
                let files = sharers::open(&self.group, &path, &names)?;
                Checkpoint::read(&self.group, path, files, None)
            }
            Some(Found::InMemory(found)) => {
                let files = found.open(&self.group, |_| true)?;
                Checkpoint::read(&self.group, found.path(), files, Some(found))
            }
        };
        agree(&self.group, read).map(Some)
    }
}

/// What a rank writes of a checkpoint.
struct Parts {
    /// [`StateDict::parameters`].
    parameters: Vec<String>,
    /// The parts of the tensors of each kind of files.
    of_files: [Vec<Part>; STEMS.len()],
}
