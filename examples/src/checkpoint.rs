//! Checkpoints of a training: files in a folder, each of them whole whenever the job is killed.
//!
//! A file is gzip, uncompressed, for its checksum: a line of JSON, then tensors as libtorch keeps them.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{Cursor, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

use anyhow::{anyhow, Context, Result};
use flate2::bufread::GzDecoder;
use flate2::write::GzEncoder;
use flate2::Compression;
use flow_ddp::{OptimizerState, ProcessGroup};
use serde::de::DeserializeOwned;
use serde::Serialize;
use tch::nn::{Optimizer, VarStore};
use tch::{Device, Tensor};

/// What is being written. There is one writer: what lies there at the start is of one that was killed.
const PARTIAL: &str = "partial";
/// What the names of a file's tensors begin with.
const MODEL: &str = "model.";
const OPTIMIZER: &str = "optimizer.";

/// The checkpoints in a folder, which rank 0 writes and reads for all: the other ranks need not see the folder.
pub struct Checkpoints {
    folder: PathBuf,
    group: ProcessGroup,
    /// The last good one.
    last: Option<PathBuf>,
}

impl Checkpoints {
    /// The checkpoints in `folder`, which is made if it is missing. No other job may use it meanwhile.
    ///
    /// # Errors
    /// When rank 0 cannot write there.
    pub fn open(folder: &Path, group: &ProcessGroup) -> Result<Self> {
        if group.rank() == 0 {
            fs::create_dir_all(folder).with_context(|| format!("cannot make the folder {}", folder.display()))?;
            match fs::remove_file(folder.join(PARTIAL)) {
                Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
                _ => Ok(()),
            }
            .with_context(|| format!("cannot write to {}", folder.display()))?;
        }
        Ok(Self { folder: folder.to_owned(), group: group.clone(), last: None })
    }

    /// The newest checkpoint that is not damaged, the same on all ranks; None where there is none at all.
    ///
    /// # Errors
    /// When there are only damaged ones, or those of another program.
    pub fn newest<S: DeserializeOwned>(&mut self) -> Result<Option<Checkpoint<S>>> {
        let mut bytes = if self.group.rank() == 0 { self.read_newest()? } else { Vec::new() };
        let mut length = [bytes.len() as i64];
        self.group.broadcast(&mut length, 0)?;
        bytes.resize(length[0] as usize, 0);
        if bytes.is_empty() {
            return Ok(None);
        }
        self.group.broadcast(&mut bytes, 0)?;
        Checkpoint::parse(&bytes)
            .with_context(|| format!("the checkpoint in {} is of another program", self.folder.display()))
            .map(Some)
    }

    /// Writes a checkpoint, if this is rank 0, and removes those before the last.
    ///
    /// # Errors
    /// When it cannot be written; the last one is then still there.
    pub fn write<S: Serialize>(&mut self, step: usize, state: &S, vs: &VarStore, optimizer: &Optimizer) -> Result<()> {
        if self.group.rank() > 0 {
            return Ok(());
        }
        let path = self.folder.join(format!("step-{step}"));
        let weights = vs.variables().into_iter().map(|(name, weight)| (MODEL.to_owned() + &name, weight));
        let optimizer = optimizer.state()?.into_iter().map(|(name, tensor)| (OPTIMIZER.to_owned() + &name, tensor));
        let tensors: Vec<_> = weights.chain(optimizer).collect();
        self.write_file(&path, state, &tensors).with_context(|| format!("cannot write {}", path.display()))?;
        for file in self.files()? {
            if file != path && Some(&file) != self.last.as_ref() {
                fs::remove_file(&file).with_context(|| format!("cannot remove {}", file.display()))?;
            }
        }
        self.last = Some(path);
        Ok(())
    }

    /// Whenever this is cut off, `path` is as it was or is the whole new file, even if the machine loses its power.
    fn write_file<S: Serialize>(&self, path: &Path, state: &S, tensors: &[(String, Tensor)]) -> Result<()> {
        let mut bytes = serde_json::to_vec(state)?;
        bytes.push(b'\n');
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
        for path in self.files()? {
            let mut bytes = Vec::new();
            match fs::read(&path).and_then(|file| GzDecoder::new(&file[..]).read_to_end(&mut bytes)) {
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
        let only = || format!("all checkpoints in {} are damaged; remove them to start anew", self.folder.display());
        damage.map_or(Ok(Vec::new()), |error| Err(error).with_context(only))
    }

    /// The checkpoints, the newest first.
    fn files(&self) -> Result<Vec<PathBuf>> {
        let read = || -> std::io::Result<_> {
            let paths =
                fs::read_dir(&self.folder)?.map(|entry| Ok(entry?.path())).collect::<std::io::Result<Vec<_>>>()?;
            let step = |path: &PathBuf| path.file_name()?.to_str()?.strip_prefix("step-")?.parse::<usize>().ok();
            let mut files: Vec<_> = paths.into_iter().filter(|path| step(path).is_some()).collect();
            files.sort_unstable_by_key(|path| Reverse(step(path)));
            Ok(files)
        };
        read().with_context(|| format!("cannot read the folder {}", self.folder.display()))
    }
}

/// What a job goes on from.
pub struct Checkpoint<S> {
    /// What the program keeps beside tensors.
    pub state: S,
    tensors: HashMap<String, Tensor>,
}

impl<S: DeserializeOwned> Checkpoint<S> {
    fn parse(bytes: &[u8]) -> Result<Self> {
        let line = bytes.iter().position(|&byte| byte == b'\n').context("it has no first line")?;
        let state = serde_json::from_slice(&bytes[..line])?;
        let tensors = Tensor::load_multi_from_stream_with_device(Cursor::new(&bytes[line + 1..]), Device::Cpu);
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
            let saved = self.tensors.get(&(MODEL.to_owned() + &name)).filter(|saved| saved.size() == weight.size());
            let other = || format!("the checkpoint is of another model: it has no {name} of shape {:?}", weight.size());
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
