//! Checkpoints of a training: files in a folder, each of them whole whenever the job is killed.
//!
//! A file is gzip, uncompressed, for its checksum: the program's state in MessagePack, which unlike
//! JSON keeps a NaN, then tensors as libtorch keeps them.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::fs::{self, File, TryLockError};
use std::io::{self, Cursor, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail, Context, Result};
use flate2::bufread::GzDecoder;
use flate2::write::GzEncoder;
use flate2::Compression;
use flow_ddp::{OptimizerState, ProcessGroup};
use serde::de::DeserializeOwned;
use serde::Serialize;
use tch::nn::{Optimizer, VarStore};
use tch::{Device, Tensor};

/// Locked by the one job that writes here.
const LOCK: &str = ".checkpoint.lock";
/// What is being written. What lies there at the start is of a writer that was killed.
const PARTIAL: &str = ".checkpoint.partial";
/// How long a writer that is being stopped may still hold the lock: longer than flow-launch waits
/// before it kills.
const STOPPING: Duration = Duration::from_secs(10);
/// What the names of a file's tensors begin with.
const MODEL: &str = "model.";
const OPTIMIZER: &str = "optimizer.";

/// The checkpoints in a folder, which rank 0 writes and reads for all: the other ranks need not see
/// the folder.
pub struct Checkpoints {
    folder: PathBuf,
    group: ProcessGroup,
    /// Rank 0's, until it is dropped or its process ends.
    _lock: Option<File>,
    /// The last good one.
    last: Option<PathBuf>,
}

impl Checkpoints {
    /// The checkpoints in `folder`, which is made if it is missing.
    ///
    /// # Errors
    /// When rank 0 cannot write there, or another job does.
    pub fn open(folder: &Path, group: &ProcessGroup) -> Result<Self> {
        let first = group.rank() == 0;
        let lock = first.then(|| take(folder)).transpose()?;
        Ok(Self { folder: folder.to_owned(), group: group.clone(), _lock: lock, last: None })
    }

    /// The newest checkpoint that is not damaged, the same on all ranks; None where there is none
    /// at all.
    ///
    /// # Errors
    /// When there are only damaged ones, or those of another program, or rank 0 does not see what
    /// another rank sees.
    pub fn newest<S: DeserializeOwned>(&mut self) -> Result<Option<Checkpoint<S>>> {
        self.seen_by_rank_0()?;
        let mut bytes = if self.group.rank() == 0 { self.read_newest()? } else { Vec::new() };
        let mut length = [bytes.len() as i64];
        self.group.broadcast(&mut length, 0)?;
        bytes.resize(length[0] as usize, 0);
        if bytes.is_empty() {
            return Ok(None);
        }
        self.group.broadcast(&mut bytes, 0)?;
        Checkpoint::parse(&bytes)
            .with_context(|| {
                format!("the checkpoint in {} is of another program", self.folder.display())
            })
            .map(Some)
    }

    /// A folder that each machine has for itself would let training start anew when another machine
    /// has rank 0.
    fn seen_by_rank_0(&self) -> Result<()> {
        // Other ranks than 0 need not see the folder at all.
        let own = self.files().unwrap_or_default().first().map_or(-1, |(step, _)| *step as i64);
        let mut newest = vec![-1i64; self.group.world_size()];
        self.group.all_gather(&[own], &mut newest)?;
        let Some(rank) = newest.iter().position(|&step| step > newest[0]) else { return Ok(()) };
        let name = |rank: usize| {
            if newest[rank] < 0 {
                "none".to_owned()
            } else {
                format!("step-{}", newest[rank])
            }
        };
        bail!(
            "the newest checkpoint in {} is {} for rank {rank}, but {} for rank 0, which reads it for all; use a disk that \
             all machines share",
            self.folder.display(),
            name(rank),
            name(0)
        )
    }

    /// Writes a checkpoint, if this is rank 0, and removes those before the last.
    ///
    /// # Errors
    /// When it cannot be written; the last one is then still there.
    pub fn write<S: Serialize>(
        &mut self,
        step: usize,
        state: &S,
        vs: &VarStore,
        optimizer: &Optimizer,
    ) -> Result<()> {
        if self.group.rank() > 0 {
            return Ok(());
        }
        let path = self.folder.join(format!("step-{step}"));
        let weights =
            vs.variables().into_iter().map(|(name, weight)| (MODEL.to_owned() + &name, weight));
        let optimizer = optimizer
            .state()?
            .into_iter()
            .map(|(name, tensor)| (OPTIMIZER.to_owned() + &name, tensor));
        let tensors: Vec<_> = weights.chain(optimizer).collect();
        self.write_file(&path, state, &tensors)
            .with_context(|| format!("cannot write {}", path.display()))?;
        for (_, file) in self.files()? {
            if file != path && Some(&file) != self.last.as_ref() {
                fs::remove_file(&file)
                    .with_context(|| format!("cannot remove {}", file.display()))?;
            }
        }
        self.last = Some(path);
        Ok(())
    }

    /// Whenever this is cut off, `path` is as it was or is the whole new file, even if the machine
    /// loses its power.
    fn write_file<S: Serialize>(
        &self,
        path: &Path,
        state: &S,
        tensors: &[(String, Tensor)],
    ) -> Result<()> {
        let mut bytes = rmp_serde::to_vec_named(state)?;
        Tensor::save_multi_to_stream(tensors, &mut bytes)?;
        let partial = self.folder.join(PARTIAL);
        let mut file = GzEncoder::new(File::create(&partial)?, Compression::none());
        file.write_all(&bytes)?;
        file.finish()?.sync_all()?;
        fs::rename(partial, path)?;
        File::open(&self.folder)?.sync_all()?;
        Ok(())
    }

    fn read_newest(&mut self) -> Result<Vec<u8>> {
        let mut damage = None;
        for (_, path) in self.files()? {
            let mut bytes = Vec::new();
            match fs::read(&path).and_then(|file| GzDecoder::new(&file[..]).read_to_end(&mut bytes))
            {
                Ok(_) => {
                    self.last = Some(path);
                    return Ok(bytes);
                }
                Err(error) => {
                    log::warn!("the checkpoint {} is damaged: {error}", path.display());
                    damage.get_or_insert(error);
                }
            }
        }
        let only = || {
            format!(
                "all checkpoints in {} are damaged; remove them to start anew",
                self.folder.display()
            )
        };
        damage.map_or(Ok(Vec::new()), |error| Err(error).with_context(only))
    }

    /// The checkpoints and their steps, the newest first.
    fn files(&self) -> Result<Vec<(usize, PathBuf)>> {
        let read = || -> io::Result<_> {
            let paths = fs::read_dir(&self.folder)?
                .map(|entry| Ok(entry?.path()))
                .collect::<io::Result<Vec<_>>>()?;
            let step =
                |path: &Path| path.file_name()?.to_str()?.strip_prefix("step-")?.parse().ok();
            let mut files: Vec<_> =
                paths.into_iter().filter_map(|path| Some((step(&path)?, path))).collect();
            files.sort_unstable_by_key(|(step, _)| Reverse(*step));
            Ok(files)
        };
        read().with_context(|| format!("cannot read the folder {}", self.folder.display()))
    }
}

/// Makes `folder` this job's alone, until the result is dropped or the process ends.
fn take(folder: &Path) -> Result<File> {
    make(folder).with_context(|| format!("cannot make the folder {}", folder.display()))?;
    let cannot_write = || format!("cannot write to {}", folder.display());
    let lock = File::create(folder.join(LOCK)).with_context(cannot_write)?;
    let end = Instant::now() + STOPPING;
    while let Err(error) = lock.try_lock() {
        match error {
            TryLockError::WouldBlock if Instant::now() < end => sleep(Duration::from_millis(50)),
            TryLockError::WouldBlock => {
                bail!(
                    "another job writes checkpoints to {}; give each job a folder of its own",
                    folder.display()
                )
            }
            TryLockError::Error(error) => {
                return Err(error).with_context(|| format!("cannot lock {}", folder.display()))
            }
        }
    }
    match fs::remove_file(folder.join(PARTIAL)) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error).with_context(cannot_write),
        _ => Ok(lock),
    }
}

/// As `create_dir_all`, and what is made is still there when the machine has lost its power.
fn make(folder: &Path) -> io::Result<()> {
    if folder.is_dir() {
        return Ok(());
    }
    let parent =
        folder.parent().filter(|parent| *parent != Path::new("")).unwrap_or(Path::new("."));
    make(parent)?;
    fs::create_dir_all(folder)?; // no error where another process has just made it
    File::open(parent)?.sync_all()
}

/// What a job goes on from.
pub struct Checkpoint<S> {
    /// What the program keeps beside tensors.
    pub state: S,
    tensors: HashMap<String, Tensor>,
}

impl<S: DeserializeOwned> Checkpoint<S> {
    fn parse(bytes: &[u8]) -> Result<Self> {
        let mut rest = bytes;
        let state = rmp_serde::from_read(&mut rest)?;
        let tensors = Tensor::load_multi_from_stream_with_device(Cursor::new(rest), Device::Cpu);
        let tensors = tensors.map_err(|_| anyhow!("libtorch cannot read its tensors"))?; // in one line
        Ok(Self { state, tensors: tensors.into_iter().collect() })
    }
}

impl<S> Checkpoint<S> {
    /// Gives the model and the optimizer the weights and the state that they had.
    ///
    /// # Errors
    /// When they are of another model or kind of optimizer.
    pub fn restore(&self, vs: &VarStore, optimizer: &mut Optimizer) -> Result<()> {
        for (name, mut weight) in vs.variables() {
            let saved = self
                .tensors
                .get(&(MODEL.to_owned() + &name))
                .filter(|saved| saved.size() == weight.size());
            let other = || {
                format!(
                    "the checkpoint is of another model: it has no {name} of shape {:?}",
                    weight.size()
                )
            };
            let saved = saved.with_context(other)?;
            tch::no_grad(|| weight.f_copy_(saved))?;
        }
        let of_optimizer = |(name, tensor): (&String, &Tensor)| {
            Some((name.strip_prefix(OPTIMIZER)?.to_owned(), tensor.shallow_clone()))
        };
        let state: Vec<_> = self.tensors.iter().filter_map(of_optimizer).collect();
        optimizer.load_state(&state).context("the checkpoint is of another optimizer")
    }
}
