//! Sharded checkpoints: each rank saves its own parts of tensors, and reads what it needs under any
//! other placement and SBP. No rank ever has the whole model in its memory.
//!
//! | file | what |
//! |---|---|
//! | `mod.rs` | [`ShardedCheckpoints`]: save, find the latest |
//! | `resume.rs` | [`ShardedCheckpoint`]: resume |
//! | `contents.rs` | `index.json` |
//! | `shards.rs` | each rank's file: write it, read regions of any |
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
use std::path::{Path, PathBuf};

use flow_autograd::OptimizerState;
use flow_comm::digest;
use flow_ddp::checkpoint::agree::{agree, from_rank_0};
use flow_ddp::checkpoint::sums::{Piece, Sums};
use flow_ddp::checkpoint::{Folder, Result, gather_texts, json};
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
use shards::{Entry, file_name};

use crate::create::rng_state;
use crate::placement::Placement;

/// The checkpoints of one training, in a folder that all machines share.
///
/// Each rank writes and reads its own parts. The checkpoint of step 100 is the folder `step-100`:
///
/// | file | what |
/// |---|---|
/// | `rank-00000.safetensors` | parts of the variables of the `VarStore`, as `model.` and their names, and of the optimizer's state, as `optimizer.` and what [`StateDict`](flow_autograd::StateDict) names them. Of ranks that have the same, the first saves it |
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
    folder: Folder,
    group: ProcessGroup,
}

impl ShardedCheckpoints {
    /// Opens the checkpoints in `folder`, which is made if it is missing. All ranks call this.
    ///
    /// # Errors
    /// On all ranks, when rank 0 cannot write there, or another job does.
    pub fn open(folder: impl AsRef<Path>, group: &ProcessGroup) -> Result<Self> {
        let folder = Folder::open(folder.as_ref(), group, &[INDEX])?;
        Ok(Self { folder, group: group.clone() })
    }

    /// Keeps the last `count` checkpoints, one at least (default: 2).
    pub fn keep(mut self, count: usize) -> Self {
        self.folder.keep = count;
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
    /// has checkpoints and [`latest`](Self::latest) was not called.
    pub fn save<S: Serialize + DeserializeOwned>(
        &mut self,
        step: usize,
        vs: &VarStore,
        optimizer: Option<&Optimizer>,
        state: &S,
    ) -> Result<()> {
        let prepared = self.prepare(step, vs, optimizer, state);
        let (contents, entries) = agree(&self.group, prepared)?;
        self.save_entries(contents, &entries)
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
            .and_then(|text| serde_json::from_slice(&text).map_err(|error| error.to_string()))
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

    /// Writes what the ranks have of the entries. `contents` is without index and files.
    fn save_entries(&mut self, mut contents: Contents, entries: &[Entry]) -> Result<()> {
        let begun = self.begin(&mut contents, entries);
        let saved = begun.and_then(|partial| self.write(contents, entries, &partial));
        saved.inspect_err(|_| self.folder.abandon())
    }

    /// Writes the files into the folder `partial`, and makes that the checkpoint.
    fn write(&mut self, mut contents: Contents, entries: &[Entry], partial: &Path) -> Result<()> {
        let written = shards::write(partial, self.group.rank(), &contents.index, entries);
        let own = agree(&self.group, written)?;
        let own = serde_json::to_string(&own).unwrap_or_default();
        for (rank, text) in gather_texts(&self.group, &own)?.into_iter().enumerate() {
            let pieces: Vec<Piece> = serde_json::from_str(&text).unwrap_or_default();
            let bytes = pieces.iter().map(|piece| piece.length as u64).sum();
            contents.files.push(bytes);
            if bytes > 0 {
                contents.sums.insert(file_name(rank), pieces);
            }
        }
        let finished = self.finish(&contents, partial);
        agree(&self.group, finished)
    }

    /// Rank 0 completes the checkpoint.
    fn finish(&mut self, contents: &Contents, partial: &Path) -> Result<()> {
        if self.group.rank() == 0 {
            check_shared(partial, &contents.files)?;
            contents.write(partial)?;
        }
        self.folder.commit(contents.step)
    }

    /// Gives `contents` the index of the entries, and returns the folder to write into.
    fn begin(&mut self, contents: &mut Contents, entries: &[Entry]) -> Result<PathBuf> {
        let tensors = entries.iter().map(|entry| Ok((entry.name.clone(), entry.saved()?)));
        let tensors = agree(&self.group, tensors.collect())?;
        contents.index = Index { tensors };
        check_same(&self.group, &contents.index)?;
        agree(&self.group, self.folder.begin(contents.step))
    }

    /// Returns the latest checkpoint that is whole, the same on all ranks; None where there is none at all.
    /// A damaged one is a warning in the log. All ranks call this.
    ///
    /// # Errors
    /// On all ranks, when the disk cannot be read, or there are only damaged checkpoints or those
    /// of another program. Also when rank 0 does not see what another rank sees.
    pub fn latest<S: DeserializeOwned>(&mut self) -> Result<Option<ShardedCheckpoint<S>>> {
        let found = self.folder.latest(None, |path| {
            let contents = Contents::read(path)?;
            contents.check_files(path)?;
            Ok(contents)
        })?;
        let Some((step, contents)) = found else { return Ok(None) };
        let path = self.folder.checkpoint(step);
        let group = self.group.clone();
        match serde_json::from_value(contents.state.clone()) {
            Ok(state) => Ok(Some(ShardedCheckpoint { state, path, group, contents })),
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
