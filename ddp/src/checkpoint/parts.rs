//! What each rank writes of the tensors of a checkpoint.

use std::collections::BTreeMap;
use std::ops::Range;

use flow_autograd::global::is_global;
use serde::{Deserialize, Serialize};
use tch::{Device, TchError, Tensor};

use super::error::{CheckpointError, Result};
use super::layout::Described;
use super::safetensors::dtype;
use crate::zero::partition::partition;

/// The bytes that are copied at once from a GPU.
const BLOCK: usize = 8 << 20;

/// A tensor that this rank has all of.
pub struct Whole {
    pub name: String,
    pub tensor: Tensor,
    /// Ranks have one copy of it: each writes a part.
    pub is_common: bool,
}

/// Elements of a tensor, which this rank writes.
pub struct Part {
    pub name: String,
    dtype: &'static str,
    shape: Vec<usize>,
    /// The first of the elements, row-major.
    start: usize,
    tensor: Tensor,
    /// Where the elements are in that, row-major.
    elements: Range<usize>,
}

/// A part, as ranks tell each other of it.
#[derive(PartialEq, Serialize, Deserialize)]
pub struct Listed {
    name: String,
    dtype: String,
    shape: Vec<usize>,
    start: usize,
    elements: usize,
}

/// Returns the type's name of a tensor that can be kept. The error is why it cannot.
pub fn check(tensor: &Tensor) -> Result<&'static str, String> {
    if tensor.is_sparse() {
        return Err("it is sparse, which safetensors cannot keep; make it dense".into());
    }
    if is_global(tensor) && flow_autograd::data_ptr(tensor).is_null() {
        return Err(SHARDED.into());
    }
    let kind = tensor.kind();
    dtype(kind).ok_or_else(|| format!("it is of kind {kind:?}, which safetensors cannot keep"))
}

/// Why a global tensor without memory of its own is not kept.
const SHARDED: &str = "it is a global tensor, and no rank has all of it; use \
                       flow::global::checkpoint::ShardedCheckpoints, where each rank saves its part";

impl Part {
    /// Returns the part of a tensor of shape `shape` that begins at `start`. The error is why it cannot
    /// be kept.
    pub fn new(name: &str, shape: &[i64], start: usize, tensor: Tensor) -> Result<Self, String> {
        let elements = 0..tensor.numel();
        let dtype = check(&tensor)?;
        let shape = shape.iter().map(|&size| size as usize).collect();
        Ok(Self { name: name.to_owned(), dtype, shape, start, tensor, elements })
    }

    /// Returns the first of the elements, row-major.
    pub fn start(&self) -> usize {
        self.start
    }

    /// Returns how many bytes the elements have.
    pub fn bytes(&self) -> usize {
        self.elements.len() * self.tensor.kind().elt_size_in_bytes()
    }

    /// Returns what the other ranks are told of it.
    pub fn listed(&self) -> Listed {
        let Self { name, dtype, shape, start, elements, .. } = self;
        Listed {
            name: name.clone(),
            dtype: (*dtype).to_owned(),
            shape: shape.clone(),
            start: *start,
            elements: elements.len(),
        }
    }

    /// Gives the bytes in blocks, each with its place in the file where the whole tensor begins at `base`.
    ///
    /// # Errors
    /// Those of libtorch and of `block`.
    pub fn each_block(
        &self,
        base: u64,
        mut block: impl FnMut(u64, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let element = self.tensor.kind().elt_size_in_bytes();
        let mut at = base + (self.start * element) as u64;
        if let Ok(bytes) = flow_autograd::bytes(&self.tensor) {
            let own = &bytes[self.elements.start * element..self.elements.end * element];
            for bytes in own.chunks(BLOCK) {
                block(at, bytes)?;
                at += bytes.len() as u64;
            }
            return Ok(());
        }
        let unfit = |error: TchError| CheckpointError::unfit("save", &self.name, error);
        let tensor = self.tensor.detach();
        let tensor = flow_autograd::resolved(&tensor).unwrap_or(tensor);
        let flat = tensor.f_reshape([-1]).map_err(unfit)?;
        for start in self.elements.clone().step_by(BLOCK / element) {
            let length = (BLOCK / element).min(self.elements.end - start);
            let own = flat.f_narrow(0, start as i64, length as i64);
            let own = own.and_then(|own| own.f_to_device(Device::Cpu));
            // A column is flat as it is, with gaps.
            let own = own.and_then(|own| own.f_contiguous()).map_err(unfit)?;
            let bytes = flow_autograd::bytes(&own)
                .map_err(|error| CheckpointError::unfit("save", &self.name, error))?;
            block(at, bytes)?;
            at += bytes.len() as u64;
        }
        Ok(())
    }
}

/// Divides tensors among the ranks `writers`: what ranks have in common, evenly; all else is rank 0's.
/// Returns the parts of `rank`. All ranks have the same in common.
pub fn divide(rank: usize, writers: &[usize], tensors: Vec<Whole>) -> Result<Vec<Part>> {
    let mut sizes = Vec::new();
    for Whole { tensor, .. } in tensors.iter().filter(|whole| whole.is_common) {
        sizes.push((tensor.numel(), tensor.kind().elt_size_in_bytes()));
    }
    let mut shards = partition(&sizes, writers.len()).into_iter();
    let mut parts = Vec::new();
    for Whole { name, tensor, is_common } in tensors {
        let own = if is_common {
            let shards = shards.next().into_iter().flatten();
            let mut own = shards.filter(|shard| writers[shard.rank] == rank);
            own.next().map(|shard| shard.elements)
        } else {
            (rank == 0).then_some(0..tensor.numel())
        };
        let Some(elements) = own else { continue };
        let part = Part::new(&name, &tensor.size(), elements.start, tensor);
        let part = part.map_err(|reason| CheckpointError::unfit("save", &name, reason))?;
        parts.push(Part { elements, ..part });
    }
    Ok(parts)
}

/// Returns the tensors that have these parts.
///
/// # Errors
/// The parts of a tensor are not all of it.
pub fn merge(mut all: Vec<&Listed>) -> Result<BTreeMap<String, Described>> {
    all.sort_by(|one, other| (&one.name, one.start).cmp(&(&other.name, other.start)));
    let mut tensors = BTreeMap::new();
    for parts in all.chunk_by(|one, other| one.name == other.name) {
        let Listed { name, dtype, shape, .. } = parts[0];
        let mut end = 0;
        for part in parts {
            if part.start != end || (&part.dtype, &part.shape) != (dtype, shape) {
                return Err(unequal(name));
            }
            end += part.elements;
        }
        if end != shape.iter().product::<usize>() {
            return Err(unequal(name));
        }
        tensors.insert(name.clone(), (dtype.clone(), shape.clone()));
    }
    Ok(tensors)
}

fn unequal(name: &str) -> CheckpointError {
    let reason = "ranks do not have the same of it; save the same model on all ranks, and give a \
                  parameter a gradient on all of them";
    CheckpointError::unfit("save", name, reason)
}
