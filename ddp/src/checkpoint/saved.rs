//! The tensors of a checkpoint, which are read as they are needed.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;

use flow_autograd::SavedState;
use tch::{Device, Kind, Tensor};

use super::error::{CheckpointError, Result};
use super::safetensors::{DTYPES, Header};
use super::saved_file::SavedFile;
use super::sums::failed_to_read;

/// The tensors of some files.
pub struct SavedTensors {
    files: Vec<SavedFile>,
    tensors: BTreeMap<String, SavedTensor>,
}

/// A tensor of a file.
pub struct SavedTensor {
    pub kind: Kind,
    pub shape: Vec<i64>,
    file: usize,
    /// Where it begins.
    start: u64,
}

impl SavedTensors {
    /// Reads the headers of files.
    pub fn open(files: Vec<SavedFile>) -> Result<Self> {
        let mut tensors = BTreeMap::new();
        for (file, saved) in files.iter().enumerate() {
            let path = &saved.path;
            let read = |bytes: &mut [u8], start| saved.read_exact_at(bytes, start);
            let header = Header::read_by(saved.length(), read);
            let (header, base) = header.map_err(failed_to_read(path))?;
            for (name, info) in header.tensors {
                let kind = DTYPES.iter().find(|(_, dtype)| *dtype == info.dtype);
                let Some(&(kind, _)) = kind else {
                    let reason = format!("its {name} is of type {}", info.dtype);
                    return Err(CheckpointError::damaged(path, reason));
                };
                let shape = info.shape.iter().map(|&size| size as i64).collect();
                let start = base + info.data_offsets.0;
                tensors.insert(name, SavedTensor { kind, shape, file, start });
            }
        }
        Ok(Self { files, tensors })
    }

    /// Returns a tensor's kind and shape.
    pub fn get(&self, name: &str) -> Option<&SavedTensor> {
        self.tensors.get(name)
    }

    /// Returns all tensors, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&String, &SavedTensor)> {
        self.tensors.iter()
    }

    /// Reads elements of a tensor, row-major, from `start` on into as many bytes as they have.
    ///
    /// # Errors
    /// There is no such tensor; the disk cannot be read.
    pub fn read(&self, name: &str, start: usize, bytes: &mut [u8]) -> Result<()> {
        let Some(saved) = self.tensors.get(name) else {
            return Err(CheckpointError::unfit("load", name, "the checkpoint does not have it"));
        };
        let file = &self.files[saved.file];
        let start = saved.start + (start * saved.kind.elt_size_in_bytes()) as u64;
        file.read_exact_at(bytes, start).map_err(failed_to_read(&file.path))
    }

    /// Returns elements of a tensor.
    ///
    /// # Errors
    /// Those of [`read`](Self::read) and of libtorch.
    pub fn tensor(&self, name: &str, elements: Range<usize>) -> Result<Tensor> {
        let kind = self.get(name).map_or(Kind::Uint8, |saved| saved.kind);
        let unfit = |error: String| CheckpointError::unfit("load", name, error);
        let mut tensor = Tensor::f_empty([elements.len() as i64], (kind, Device::Cpu))
            .map_err(|error| unfit(error.to_string()))?;
        let bytes =
            flow_autograd::bytes_mut(&mut tensor).map_err(|error| unfit(error.to_string()))?;
        self.read(name, elements.start, bytes)?;
        Ok(tensor)
    }

    /// Reads elements of a tensor, or more, into `tensor`, which is like it.
    ///
    /// # Errors
    /// Those of [`read`](Self::read) and of libtorch.
    pub fn load(&self, name: &str, tensor: &mut Tensor, elements: Range<usize>) -> Result<()> {
        let element = tensor.kind().elt_size_in_bytes();
        if let Ok(bytes) = flow_autograd::bytes_mut(tensor) {
            let own = &mut bytes[elements.start * element..elements.end * element];
            self.read(name, elements.start, own)?;
            return flow_autograd::bump_version(tensor)
                .map_err(|error| CheckpointError::unfit("load", name, error));
        }
        let read = self.tensor(name, 0..tensor.numel())?;
        tch::no_grad(|| tensor.f_copy_(&read.view(&tensor.size()[..])))
            .map_err(|error| CheckpointError::unfit("load", name, error))
    }
}

/// The state of an optimizer.
pub struct SavedOptimizer<'a> {
    pub parameters: &'a [String],
    pub tensors: &'a SavedTensors,
    /// Why it could not be read.
    pub failure: RefCell<Option<CheckpointError>>,
}

impl SavedState for SavedOptimizer<'_> {
    fn parameters(&self) -> &[String] {
        self.parameters
    }

    fn shapes(&self) -> Vec<(String, Vec<i64>)> {
        self.tensors.iter().map(|(name, saved)| (name.clone(), saved.shape.clone())).collect()
    }

    fn read(&self, name: &str, elements: Range<usize>) -> Result<Tensor, flow_autograd::Error> {
        self.tensors.tensor(name, elements).map_err(|error| {
            let reason = error.to_string();
            *self.failure.borrow_mut() = Some(error);
            flow_autograd::Error::Libtorch { operation: "OptimizerState::load_from", reason }
        })
    }
}
