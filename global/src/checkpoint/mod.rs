//! Sharded checkpoints: each rank saves its own parts of tensors, and reads what it needs under any
//! other placement and SBP. From a folder, no rank ever has the whole model in its memory.
//!
//! | file | what |
//! |---|---|
//! | `mod.rs` | [`ShardedCheckpoints`]: save, find the latest |
//! | `resume.rs` | [`ShardedCheckpoint`]: resume |
//! | `contents.rs` | `index.json` |
//! | `shards.rs` | each rank's file: plan it, read regions of any |
//! | `entries.rs` | the variables of a `VarStore` and an optimizer's state as entries |
//! | `index.rs` | which file has which region of which tensor |
//! | `opened.rs` | the tensors of a checkpoint of either kind, for tools |
//! | `merge.rs` | plain files for PyTorch |
//! | `diff.rs` | what a checkpoint has, and how two differ |
//!
//! `flow_ddp::checkpoint` has what `Ddp`'s checkpoints are made of too: folders that are whole or
//! not there, ranks that agree, and [`CheckpointError`].

mod contents;
mod diff;
mod entries;
pub mod index;
mod merge;
mod opened;
mod resume;

mod shards;
#[cfg(test)]
mod tests;

use std::fs;
use std::path::Path;

use flow_autograd::OptimizerState;
use flow_comm::digest;
use flow_ddp::checkpoint::agree::{agree, from_rank_0};
use flow_ddp::checkpoint::in_memory;
use flow_ddp::checkpoint::plan::Plan;
use flow_ddp::checkpoint::saving::{LastFile, Partial, Saving, saved_after};
use flow_ddp::checkpoint::storage::{Found, Storage};
use flow_ddp::checkpoint::sums::Sums;
use flow_ddp::checkpoint::{Result, json};
use flow_tensor::ProcessGroup;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tch::nn::{Optimizer, VarStore};

use contents::{Contents, FORMAT, INDEX};
pub use diff::{diff, inspect};
use entries::{entries, named, variables};
pub use flow_ddp::CheckpointError;
use index::Index;
pub use merge::{merge, merge_into_folder};
pub use opened::verify;
pub use resume::ShardedCheckpoint;
use shards::{Entry, add_files, file_name};

use crate::create::rng_state;
use crate::placement::Placement;

/// The checkpoints of one training, in a folder that all machines share.
///
/// Each rank writes and reads its own parts. The checkpoint of step 100 is the folder `step-100`:
///
/// | file | what |
/// |---|---|
/// | `rank-00000.safetensors` | parts of the variables of the `VarStore`, as `model.` and their names, and of the optimizer's state, as `optimizer.` and what [`StateDict`](flow_autograd::StateDict) names them. What several ranks have, as many of them as it has MiB save together: each a share of it, or one of them all |
/// | `index.json` | which file has which part, and the program's state |
///
/// A checkpoint is whole or not there, even if ranks are killed or a machine loses its power. Its
/// files are flushed to the disk under another name, and the folder is then renamed. The last two
/// are kept ([`keep`](Self::keep)). One that has lost a file, as [`latest`](Self::latest) has
/// found, is never removed: `save` renames it to `step-100.damaged`.
///
/// ```no_run
/// use flow_global::checkpoint::ShardedCheckpoints;
/// use flow_tensor::ProcessGroup;
/// # use tch::nn::{self, OptimizerConfig};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let group = ProcessGroup::from_env()?;
/// # let vs = nn::VarStore::new(tch::Device::Cpu);
/// # let mut optimizer = nn::Adam::default().build(&vs, 0.1)?;
/// let mut checkpoints = ShardedCheckpoints::open("checkpoints", &group)?;
/// let mut step = 0; // the program's state: any type that serde can write and read
/// if let Some(checkpoint) = checkpoints.latest()? {
///     checkpoint.resume(&vs, Some(&mut optimizer))?; // under any placement and SBP
///     step = checkpoint.state;
/// }
/// // ... and after a step:
/// checkpoints.save(step, &vs, Some(&optimizer), &step)?;
/// # Ok(()) }
/// ```
pub struct ShardedCheckpoints {
    storage: Storage,
    group: ProcessGroup,
}

impl ShardedCheckpoints {
    /// Opens the checkpoints in `folder`, which is made if it is missing. All ranks call this.
    ///
    /// # Errors
    /// On all ranks, when rank 0 cannot write there, or another job does.
    pub fn open(folder: impl AsRef<Path>, group: &ProcessGroup) -> Result<Self> {
        let storage = Storage::in_folder(folder.as_ref(), group, &[INDEX])?;
        Ok(Self { storage, group: group.clone() })
    }

    /// Opens the checkpoints in the memory that flow-launch has for its workers. It outlives them, however
    /// they end: a job that `--max-restarts` restarts resumes from there, without a disk, also with another number
    /// of ranks. So does an [`InProcessRestart`](flow_ddp::InProcessRestart). All ranks call this.
    ///
    /// [`save`](Self::save) and [`async_save`](Self::async_save) copy each rank's parts there, beside the last
    /// checkpoint. That stays until all ranks have the new one, with its sums. So [`latest`](Self::latest)
    /// finds one or the other, whole, whenever ranks are killed. Each rank needs twice as much memory as it saves.
    /// It is free once flow-launch ends.
    ///
    /// Each machine has the parts of its ranks. If one is lost, so are the checkpoints, unless they are
    /// [in a folder too](Self::and_folder). To resume, a machine keeps the files of other machines that its ranks
    /// need, until all is loaded. All machines receive what one of them needs.
    ///
    /// # Errors
    /// On all ranks, when a rank was not started by flow-launch, or other checkpoints of this process have the
    /// memory.
    pub fn in_memory(group: &ProcessGroup) -> Result<Self> {
        let storage = Storage::in_memory(in_memory::open(), group, &[INDEX])?;
        Ok(Self { storage, group: group.clone() })
    }

    /// Writes checkpoints to `folder`, too, as those that [`open`](Self::open) opens: what is in memory is
    /// written. [`latest`](Self::latest) then returns the newest, wherever it is. All ranks call this.
    ///
    /// # Errors
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

    /// Writes the checkpoint of `step`, which counts up over the whole training, and removes those
    /// before the last few. All ranks call this, and return when it is whole.
    ///
    /// `state` is what else the program needs to go on, as JSON, which has no NaN and no infinity;
    /// rank 0's counts. The state of global random numbers is saved too. A plain tensor of the
    /// `VarStore` counts as B: rank 0's is saved.
    ///
    /// # Errors
    /// On all ranks, when one of them cannot write, a tensor or the state cannot be kept, or ranks
    /// have different tensors. The checkpoints before are then still there. Also when the folder
    /// has checkpoints and [`latest`](Self::latest) was not called. The error of a checkpoint that was written
    /// [beside the training](Self::async_save) meanwhile, whose file it names: this one is saved then.
    pub fn save<S: Serialize + DeserializeOwned>(
        &mut self,
        step: usize,
        vs: &VarStore,
        optimizer: Option<&Optimizer>,
        state: &S,
    ) -> Result<()> {
        let before = self.wait();
        let saving = self.lay_out(step, vs, optimizer, state);
        let saved = saving.and_then(|saving| self.storage.save(saving));
        saved_after(before, saved)
    }

    /// Writes a checkpoint as [`save`](Self::save) does, beside the training: PyTorch's `async_save`. When it
    /// returns, each rank has copied what it writes, and all of it may change. A thread writes the copy. The
    /// copy needs as much memory as this rank's file has bytes, and keeps it for the next one.
    ///
    /// The checkpoint is whole once [`wait`](Self::wait) has returned: call that at the end of the program, as
    /// a drop waits, but only logs an error. The next `async_save`, `save` or `latest` waits as well. All ranks
    /// call this.
    ///
    /// # Errors
    /// On all ranks: those of [`save`](Self::save) before anything is written; too little memory for the
    /// copies of a machine's ranks. The error of the checkpoint before, whose file it names: this one is being
    /// written then.
    pub fn async_save<S: Serialize + DeserializeOwned>(
        &mut self,
        step: usize,
        vs: &VarStore,
        optimizer: Option<&Optimizer>,
        state: &S,
    ) -> Result<()> {
        let before = self.wait();
        let saving = self.lay_out(step, vs, optimizer, state);
        let begun = saving.and_then(|saving| self.storage.start(saving));
        saved_after(before, begun)
    }

    /// Waits until the checkpoint of the last [`async_save`](Self::async_save) is whole. All ranks call this.
    ///
    /// # Errors
    /// On all ranks, when it could not be written; those before it are then still there.
    pub fn wait(&mut self) -> Result<()> {
        self.storage.wait()
    }

    /// Finds what is to be saved: contents without index and files, and the tensors.
    fn prepare<S: Serialize + DeserializeOwned>(
        &self,
        step: usize,
        vs: &VarStore,
        optimizer: Option<&Optimizer>,
        state: &S,
    ) -> Result<(Contents, Vec<Entry>)> {
        let mut tensors = variables(vs);
        let state_parts = optimizer
            .map(OptimizerState::parts)
            .transpose()
            .map_err(|error| CheckpointError::unfit("save", "the optimizer", error))?;
        let parameters = state_parts.map(|state| {
            tensors.extend(named(state.parts.into_iter().map(|part| (part.name, part.tensor))));
            state.parameters
        });
        let state = json::<S>(state)
            .and_then(|text| serde_json::from_str(&text).map_err(|error| error.to_string()))
            .map_err(|reason| CheckpointError::unfit("save", "the program's state", reason))?;
        let contents = Contents {
            format: FORMAT,
            step,
            files: Vec::new(),
            sums: Sums::new(),
            optimizer: parameters,
            generator: rng_state(&Placement::all(&self.group)?)?,
            state,
            index: Index::default(),
        };
        Ok((contents, entries(&tensors, &self.group)?))
    }

    /// Begins a checkpoint on all ranks, or on none: its files are made, and what each rank writes is known.
    fn lay_out<S: Serialize + DeserializeOwned>(
        &self,
        step: usize,
        vs: &VarStore,
        optimizer: Option<&Optimizer>,
        state: &S,
    ) -> Result<Saving> {
        let (contents, entries) = agree(&self.group, self.prepare(step, vs, optimizer, state))?;
        self.begin(contents, &entries)
    }

    /// Lays out what the ranks have of the entries, and makes their files. `contents` is without index and
    /// files.
    fn begin(&self, mut contents: Contents, entries: &[Entry]) -> Result<Saving> {
        let tensors = entries.iter().map(|entry| Ok((entry.name.clone(), entry.saved()?)));
        let tensors = agree(&self.group, tensors.collect())?;
        contents.index = Index { tensors };
        check_same(&self.group, &contents.index)?;
        let partial = self.storage.begin(contents.step)?;
        let saving = self.plan(partial, contents, entries);
        saving.inspect_err(|_| self.storage.abandon())
    }

    fn plan(
        &self,
        partial: Option<Partial>,
        mut contents: Contents,
        entries: &[Entry],
    ) -> Result<Saving> {
        let step = contents.step;
        let path = self.storage.path(step);
        let own = self.own_plan(partial.as_ref(), &path, &contents, entries);
        let plan = agree(&self.group, own)?;
        let names = plan.names().to_vec();
        let last: LastFile = Box::new(move |partial, _, pieces| {
            contents.add_files(&names, pieces)?;
            check_shared(partial, &contents.files)?;
            contents.write(partial)
        });
        Ok(Saving { plan, group: self.group.clone(), step, path, files: partial, last })
    }

    /// Makes this rank's files, and returns what it writes.
    fn own_plan(
        &self,
        partial: Option<&Partial>,
        path: &Path,
        contents: &Contents,
        entries: &[Entry],
    ) -> Result<Plan> {
        let rank = self.group.rank();
        let mut plan = Plan::new(true);
        if self.storage.has_memory() {
            // In a folder it is written anew, with the sums.
            let text = if rank == 0 { contents.text()? } else { Vec::new() };
            plan.add(INDEX.to_owned(), text);
        }
        add_files(&mut plan, rank, &contents.index, entries)?;
        if let Some(partial) = partial {
            let remedy = "see that the disk has space, and that all machines share it";
            plan.create(&partial.path, path, remedy)?;
        }
        Ok(plan)
    }

    /// Returns the latest checkpoint that is whole, the same on all ranks; None where there is none at all.
    /// A damaged one is a warning in the log. All ranks call this.
    ///
    /// # Errors
    /// On all ranks, when the disk cannot be read, or there are only damaged checkpoints or those
    /// of another program. Also when rank 0 does not see what another rank sees. When the ranks have
    /// [changed](ProcessGroup::reconfigure), and parts of the one that is left in memory are gone.
    pub fn latest<S: DeserializeOwned>(&mut self) -> Result<Option<ShardedCheckpoint<S>>> {
        let found = self.storage.latest(|path| {
            let contents = Contents::read(path)?;
            contents.check_files(path)?;
            Ok(contents)
        })?;
        let (path, contents, in_memory) = match found {
            None => return Ok(None),
            Some(Found::InFolder(path, contents)) => (path, contents, None),
            Some(Found::InMemory(found)) => {
                let path = found.path();
                let files = found.open(&self.group, |name| name == INDEX)?;
                let contents = agree(&self.group, Contents::read_from(&path, &files))?;
                (path, contents, Some(found))
            }
        };
        let group = self.group.clone();
        match serde_json::from_value(contents.state.clone()) {
            Ok(state) => Ok(Some(ShardedCheckpoint { state, path, group, contents, in_memory })),
            Err(error) => {
                let reason = error.to_string();
                Err(CheckpointError::Other { path, what: "program", reason })
            }
        }
    }
}

/// Checks that each rank saves what rank 0 does, whose index counts. A name that only one has would
/// make a checkpoint that no rank, or only some, could read.
fn check_same(group: &ProcessGroup, own: &Index) -> Result<()> {
    let mut digests = vec![0i64; group.world_size()];
    group.all_gather(&[digest(&own.tensors) as i64], &mut digests)?;
    if digests.iter().all(|&digest| digest == digests[0]) {
        return Ok(());
    }
    let of_rank_0: Index = from_rank_0(group, (group.rank() == 0).then(|| Ok(own.clone())))?;
    let mut names = of_rank_0.tensors.keys().chain(own.tensors.keys());
    let differing = names.find(|&name| of_rank_0.tensors.get(name) != own.tensors.get(name));
    let Some(name) = differing else { return agree(group, Ok(())) };
    let has = match (of_rank_0.tensors.get(name), own.tensors.get(name)) {
        (Some(_), None) => "rank 0 has it, and this rank has not",
        (None, _) => "this rank has it, and rank 0 has not",
        _ => "its type, shape or layout is not that of rank 0",
    };
    let reason = format!(
        "{has}; save the same variables on all ranks, and give a variable a gradient on all of them"
    );
    agree(group, Err(CheckpointError::unfit("save", name, reason)))
}

/// Rank 0 checks that it sees what the ranks have written.
fn check_shared(folder: &Path, files: &[u64]) -> Result<()> {
    for (rank, &bytes) in files.iter().enumerate().filter(|&(_, &bytes)| bytes > 0) {
        let path = folder.join(file_name(rank));
        let length = fs::metadata(&path).map_or(0, |metadata| metadata.len());
        if length != bytes {
            let seen = format!("{bytes} bytes");
            let by_rank_0 = format!("{length} bytes");
            return Err(CheckpointError::NotShared { path, rank, seen, by_rank_0 });
        }
    }
    Ok(())
}

impl From<crate::Error> for CheckpointError {
    fn from(error: crate::Error) -> Self {
        match error {
            crate::Error::Comm(error) => error.into(),
            crate::Error::Buckets(error) => error.into(),
            error => Self::Global(Box::new(error)),
        }
    }
}
