//! Plain safetensors files of a checkpoint.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::path::Path;

use flow_ddp::checkpoint::layout::{TensorFile, index, lay_out};
use flow_ddp::checkpoint::write::{Pieces, write};
use flow_ddp::checkpoint::{CheckpointError, MODEL, Result, files};

use super::opened::Opened;

/// Writes the model of the checkpoint in the folder `checkpoint` to the file `out`, whole or not at
/// all, with the names of its variables: PyTorch's `safetensors` and tch's
/// `VarStore::load` read it. The model need not fit into memory.
///
/// # Errors
/// A file of the checkpoint is missing or damaged; `out` cannot be written.
pub fn merge(checkpoint: impl AsRef<Path>, out: impl AsRef<Path>) -> Result<()> {
    let out = out.as_ref();
    let model = Model::open(checkpoint.as_ref(), u64::MAX)?;
    model.files.iter().try_for_each(|file| model.write(file, out))
}

/// Writes the model of a checkpoint into the folder `out`, as Hugging Face lays models out:
/// `model.safetensors`, or several files of at most so many bytes and `model.safetensors.index.json`.
/// Each file is whole or not there; the index is written last.
///
/// # Errors
/// Those of [`merge`].
pub fn merge_into_folder(
    checkpoint: impl AsRef<Path>,
    out: impl AsRef<Path>,
    file_bytes: u64,
) -> Result<()> {
    let out = out.as_ref();
    let model = Model::open(checkpoint.as_ref(), file_bytes)?;
    files::create(out).map_err(CheckpointError::write(out))?;
    for file in &model.files {
        model.write(file, &out.join(&file.name))?;
    }
    let Some((name, text)) = index(MODEL, &model.files) else { return Ok(()) };
    let path = out.join(name);
    files::write_whole(&path, |partial| {
        std::fs::write(partial, text).map_err(CheckpointError::write(&path))
    })
}

/// The model of a checkpoint, and the files that it is to have.
struct Model {
    opened: Opened,
    files: Vec<TensorFile>,
}

impl Model {
    fn open(checkpoint: &Path, file_bytes: u64) -> Result<Self> {
        let opened = Opened::new(checkpoint)?;
        let prefix = format!("{MODEL}.");
        let tensors = opened.tensors.iter();
        let tensors: BTreeMap<_, _> = tensors
            .filter_map(|(name, tensor)| {
                Some((name.strip_prefix(&prefix)?.to_owned(), tensor.clone()))
            })
            .collect();
        let files = lay_out(MODEL, &tensors, file_bytes)
            .map_err(|reason| CheckpointError::damaged(checkpoint, reason))?;
        Ok(Self { opened, files })
    }

    fn write(&self, file: &TensorFile, out: &Path) -> Result<()> {
        files::write_whole(out, |partial| {
            File::create(partial).map_err(CheckpointError::write(out))?;
            let names: Vec<&OsStr> = partial.file_name().into_iter().collect();
            let folder = files::parent(partial);
            write(folder, folder, &names, |pieces| self.read(file, pieces)).map(drop)
        })
    }

    /// Reads the bytes of a file into pieces.
    fn read(&self, file: &TensorFile, pieces: &mut Pieces) -> Result<()> {
        pieces.add(0, 0, &file.head)?;
        let mut end = file.head.len() as u64;
        let mut bytes = Vec::new();
        for (name, _) in file.header.in_order() {
            let name = format!("{MODEL}.{name}");
            for block in self.opened.blocks(&name) {
                self.opened.read(&name, &block, &mut bytes)?;
                pieces.add(0, end, &bytes)?;
                end += bytes.len() as u64;
            }
        }
        Ok(())
    }
}
