//! Sharded checkpoints: each rank saves its own parts of tensors, and reads what it needs under any
//! other placement and SBP. No rank ever has the whole model in its memory.
//!
//! | file | what |
//! |---|---|
//! | `mod.rs` | [`Checkpoints`]: save, find the latest; [`Checkpoint`]: resume |
//! | `folder.rs` | folders on a shared disk: whole or not there |
//! | `shards.rs` | each rank's file: write it, read regions of any |
//! | `entries.rs` | the variables of a `VarStore` and an optimizer's state as entries |
//! | `index.rs` | which file has which region of which tensor |
//! | `safetensors.rs` | the head of a safetensors file |
//! | `agree.rs` | a rank's failure is every rank's |
//! | `merge.rs` | one plain file for PyTorch |
//! | `error.rs` | [`CheckpointError`] |

mod agree;
mod entries;
mod error;
mod folder;
pub mod index;
mod merge;
mod safetensors;
mod shards;
#[cfg(test)]
mod tests;

use std::fs;
use std::path::{Path, PathBuf};

use flow_autograd::{OptimizerState, StateDict};
use flow_tensor::ProcessGroup;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tch::nn::{Optimizer, VarStore};
use tch::{Device, Tensor};

use agree::{agree, from_rank_0, gather};
use entries::{blank_state, entries, variables};
pub use error::CheckpointError;
use folder::{Folder, INDEX};
use index::{Index, Saved};
pub use merge::merge;
use shards::{file_name, Entry, Reader};

use crate::create::{rng_state, set_rng_state};
use crate::placement::Placement;

type Result<T> = std::result::Result<T, CheckpointError>;

/// Before the names of the `VarStore`'s variables.
const MODEL: &str = "model.";
/// Before the names of the optimizer's state.
const OPTIMIZER: &str = "optimizer.";

/// Raised when files change so that versions before cannot read them.
const FORMAT: u32 = 1;

/// The checkpoints of one training, in a folder that all machines share.
///
/// Each rank writes and reads its own parts. The checkpoint of step 100 is the folder `step-100`:
///
/// | file | what |
/// |---|---|
/// | `rank-00000.safetensors` | parts of the variables of the `VarStore`, as `model.` and their names, and of the optimizer's state, as `optimizer.` and what [`StateDict`] names them. Of ranks that have the same, the first saves it |
/// | `index.json` | which file has which part, and the program's state |
///
/// A checkpoint is whole or not there, even if ranks are killed or a machine loses its power: its
/// files are flushed to the disk under another name, and the folder is then renamed. The last two
/// are kept ([`keep`](Self::keep)). One that has lost a file, as [`latest`](Self::latest) has found,
/// is never removed: `save` renames it to `step-100.damaged`.
///
/// ```no_run
/// use flow_global::checkpoint::Checkpoints;
/// use flow_tensor::ProcessGroup;
/// # use tch::nn::{self, OptimizerConfig};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let group = ProcessGroup::from_env()?;
/// # let vs = nn::VarStore::new(tch::Device::Cpu);
/// # let mut optimizer = nn::Adam::default().build(&vs, 0.1)?;
/// let mut checkpoints = Checkpoints::open("checkpoints", &group)?;
/// let mut step = 0; // the program's state: any type that serde can write and read
/// if let Some(checkpoint) = checkpoints.latest()? {
///     checkpoint.resume(&vs, Some(&mut optimizer))?; // under any placement and SBP
///     step = checkpoint.state;
/// }
/// // ... and after a step:
/// checkpoints.save(step, &vs, Some(&optimizer), &step)?;
/// # Ok(()) }
/// ```
pub struct Checkpoints {
    path: PathBuf,
    group: ProcessGroup,
    /// On rank 0.
    folder: Option<Folder>,
    keep: usize,
    /// Whether the folder's checkpoints are this training's: they were looked for, or there were
    /// none.
    read: bool,
    /// The steps of those that `latest` has found to be damaged.
    damaged: Vec<usize>,
}

/// A checkpoint that is whole.
pub struct Checkpoint<S> {
    /// What the program kept.
    pub state: S,
    path: PathBuf,
    group: ProcessGroup,
    contents: Contents,
}

/// `index.json`.
#[derive(Debug, Serialize, Deserialize)]
struct Contents {
    format: u32,
    step: usize,
    /// The length of each rank's file; 0 of a rank that had nothing to save.
    files: Vec<u64>,
    /// [`flow_autograd::StateDict::parameters`]; None without an optimizer.
    optimizer: Option<Vec<String>>,
    /// [`crate::random::Generator::state`].
    generator: [u64; 2],
    /// The program's.
    state: serde_json::Value,
    index: Index,
}

impl Contents {
    /// Of the checkpoint `path`.
    fn read(path: &Path) -> Result<Self> {
        let file = path.join(INDEX);
        let remedy = "give the folder of one checkpoint, as checkpoints/step-100";
        let text = fs::read(&file).map_err(CheckpointError::file("read", &file, remedy))?;
        let damaged = |reason| CheckpointError::damaged(&file, reason);
        let value: serde_json::Value =
            serde_json::from_slice(&text).map_err(|error| damaged(error.to_string()))?;
        if value["format"] != FORMAT {
            let reason = format!("it has not format {FORMAT} of Flow's sharded checkpoints");
            return Err(CheckpointError::Other { path: path.into(), what: "program", reason });
        }
        let contents: Self =
            serde_json::from_slice(&text).map_err(|error| damaged(error.to_string()))?;
        contents.index.check().map_err(damaged)?;
        Ok(contents)
    }

    /// Checks that each rank's file is there and as long as it was.
    fn check_files(&self, path: &Path) -> Result<()> {
        let written = self.files.iter().enumerate().filter(|(_, &bytes)| bytes > 0);
        for (rank, &bytes) in written {
            let file = path.join(file_name(rank));
            let remedy = "bring it back, or use another checkpoint";
            let metadata = fs::metadata(&file);
            let seen = metadata.map_err(CheckpointError::file("read", &file, remedy))?.len();
            if seen != bytes {
                let reason = format!("it has {seen} of {bytes} bytes");
                return Err(CheckpointError::damaged(file, reason));
            }
        }
        Ok(())
    }
}

impl Checkpoints {
    /// The checkpoints in `folder`, which is made if it is missing. All ranks call this.
    ///
    /// # Errors
    /// On all ranks, when rank 0 cannot write there, or another job does.
    pub fn open(folder: impl AsRef<Path>, group: &ProcessGroup) -> Result<Self> {
        let path = folder.as_ref().to_owned();
        let own = (group.rank() == 0).then(|| Folder::open(&path)).transpose();
        let folder = agree(group, own)?;
        Ok(Self { path, group: group.clone(), folder, keep: 2, read: false, damaged: Vec::new() })
    }

    /// Keeps the last `count` checkpoints, one at least (default: 2).
    pub fn keep(mut self, count: usize) -> Self {
        self.keep = count.max(1);
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
    /// On all ranks, when one of them cannot write, or a tensor or the state cannot be kept; the
    /// checkpoints before are then still there. Also when the folder has checkpoints and
    /// [`latest`](Self::latest) was not called.
    pub fn save<S: Serialize + DeserializeOwned>(
        &mut self,
        step: usize,
        vs: &VarStore,
        optimizer: Option<&Optimizer>,
        state: &S,
    ) -> Result<()> {
        let unfit = |what| move |reason| CheckpointError::unfit("save", what, reason);
        let prepare = || {
            let mut tensors = variables(vs);
            let dict = optimizer.map(OptimizerState::state).transpose();
            let dict = dict.map_err(|error| unfit("the optimizer")(error.to_string()))?;
            let parameters = dict.map(|dict| {
                tensors.extend(named(dict.tensors));
                dict.parameters
            });
            let contents = Contents {
                format: FORMAT,
                step,
                files: Vec::new(),
                optimizer: parameters,
                generator: rng_state(&Placement::all(&self.group)?)?,
                state: json(state).map_err(unfit("the program's state"))?,
                index: Index::default(),
            };
            Ok((contents, entries(&tensors, &self.group)?))
        };
        let (contents, entries) = agree(&self.group, prepare())?;
        self.save_entries(contents, &entries)
    }

    /// Writes what the ranks have of the entries. `contents` is without index and files.
    fn save_entries(&mut self, mut contents: Contents, entries: &[Entry]) -> Result<()> {
        let mut begin = || {
            for entry in entries {
                contents.index.tensors.insert(entry.name.clone(), entry.saved()?);
            }
            let Some(folder) = &self.folder else { return Ok(()) };
            if !self.read && !folder.steps()?.is_empty() {
                return Err(CheckpointError::Unread(self.path.clone()));
            }
            self.damaged.drain(..).try_for_each(|step| folder.set_aside(step))?;
            folder.begin(contents.step)
        };
        agree(&self.group, begin())?;
        let partial = folder::partial(&self.path);
        let written = shards::write(&partial, self.group.rank(), &contents.index, entries);
        contents.files = gather(&self.group, agree(&self.group, written)?)?;
        let finished = self.folder.as_ref().map_or(Ok(()), |folder| {
            check_shared(&partial, &contents.files)?;
            let unfit = |error: serde_json::Error| {
                CheckpointError::unfit("save", "the index", error.to_string())
            };
            let text = serde_json::to_vec_pretty(&contents).map_err(unfit)?;
            folder.commit(contents.step, &text)?;
            // Later ones are of a way that this training has not gone.
            let (kept, later): (Vec<_>, Vec<_>) =
                folder.steps()?.into_iter().partition(|&other| other <= contents.step);
            let old = later.into_iter().chain(kept.into_iter().skip(self.keep));
            old.into_iter().try_for_each(|old| folder.remove(old))
        });
        agree(&self.group, finished)?;
        self.read = true;
        Ok(())
    }

    /// The latest checkpoint that is whole, the same on all ranks; None where there is none at all.
    /// A damaged one is a warning in the log. All ranks call this.
    ///
    /// # Errors
    /// On all ranks, when the disk cannot be read, or there are only damaged ones, or those of
    /// another program.
    pub fn latest<S: DeserializeOwned>(&mut self) -> Result<Option<Checkpoint<S>>> {
        let found = self.folder.as_ref().map(|folder| {
            let mut newest = None;
            self.damaged.clear();
            for step in folder.steps()? {
                let path = folder::checkpoint(&self.path, step);
                let contents = Contents::read(&path)
                    .and_then(|contents| contents.check_files(&path).map(|()| contents));
                match contents {
                    Ok(contents) => return Ok(Some(contents)),
                    Err(error @ CheckpointError::Other { .. }) => return Err(error),
                    Err(error) => {
                        log::warn!("the checkpoint of step {step} is not whole: {error}");
                        self.damaged.push(step);
                        newest.get_or_insert(error.to_string());
                    }
                }
            }
            let folder = self.path.clone();
            newest.map_or(Ok(None), |newest| Err(CheckpointError::AllDamaged { folder, newest }))
        });
        let found = from_rank_0(&self.group, found)?;
        self.read = true;
        let Some(contents) = found else { return Ok(None) };
        let (path, group) = (folder::checkpoint(&self.path, contents.step), self.group.clone());
        match serde_json::from_value(contents.state.clone()) {
            Ok(state) => Ok(Some(Checkpoint { state, path, group, contents })),
            Err(error) => {
                let reason = error.to_string();
                Err(CheckpointError::Other { path, what: "program", reason })
            }
        }
    }
}

/// Rank 0 checks that it sees what the ranks have written.
fn check_shared(folder: &Path, files: &[u64]) -> Result<()> {
    for (rank, &bytes) in files.iter().enumerate().filter(|(_, &bytes)| bytes > 0) {
        let path = folder.join(file_name(rank));
        let seen = fs::metadata(&path).map_or(0, |metadata| metadata.len());
        if seen != bytes {
            return Err(CheckpointError::NotShared { path, rank, bytes, seen });
        }
    }
    Ok(())
}

/// The optimizer's state as a checkpoint names it.
fn named(state: impl IntoIterator<Item = (String, Tensor)>) -> Vec<(String, Tensor)> {
    state.into_iter().map(|(name, tensor)| (format!("{OPTIMIZER}{name}"), tensor)).collect()
}

/// JSON that can be read back: it has `null` where a number is NaN.
fn json<S: Serialize + DeserializeOwned>(
    state: &S,
) -> std::result::Result<serde_json::Value, String> {
    let value = serde_json::to_value(state).map_err(|error| error.to_string())?;
    match S::deserialize(&value) {
        Ok(_) => Ok(value),
        Err(error) => Err(format!("it cannot be read back: {error}; JSON has no NaN or infinity")),
    }
}

impl<S> Checkpoint<S> {
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
            let wanted = entry.saved()?;
            let fits = |saved: &&Saved| saved.dtype == wanted.dtype && saved.shape == wanted.shape;
            if tensors.get(&entry.name).filter(fits).is_none() {
                let name = &entry.name[MODEL.len()..];
                let (dtype, shape) = (wanted.dtype, wanted.shape);
                return Err(other(format!("it has no {name} of {dtype} {shape:?}")));
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
    fn load_entries(&self, entries: &mut [Entry]) -> Result<()> {
        let rank = self.group.rank();
        let mut reader = Reader::new(&self.path, &self.contents.index);
        let mut load = |entry: &mut Entry| {
            let region = entry.region(rank);
            let Some((region, local)) = region.zip(entry.local.as_mut()) else { return Ok(()) };
            let unfit = |reason| CheckpointError::unfit("load", &entry.name, reason);
            if let Ok(bytes) = flow_autograd::bytes_mut(local) {
                return reader.read(&entry.name, &region, bytes);
            }
            let shape: Vec<i64> = region.shape().iter().map(|&size| size as i64).collect();
            let mut read = Tensor::empty(&shape[..], (entry.kind, Device::Cpu));
            let bytes = flow_autograd::bytes_mut(&mut read);
            reader.read(&entry.name, &region, bytes.map_err(|error| unfit(error.to_string()))?)?;
            let copied = tch::no_grad(|| local.f_copy_(&read));
            copied.map(drop).map_err(|error| unfit(error.to_string()))
        };
        agree(&self.group, entries.iter_mut().try_for_each(&mut load))
    }
}
