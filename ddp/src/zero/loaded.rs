//! What a rank reads of a state that is loaded.

use std::ops::Range;

use flow_autograd::{Error, OptimizerState, SavedState};
use tch::Tensor;

use super::sharded_parameter::{COUNT, Chunk, OwnShard, ShardedParameter};

/// What a state has of one parameter.
pub(super) struct ParameterState<'a> {
    saved: &'a dyn SavedState,
    parts: Vec<LoadedPart>,
}

/// A part of it, such as `exp_avg`.
struct LoadedPart {
    /// Its name in PyTorch.
    part: String,
    /// Its name in the state.
    name: String,
    /// All its elements in the order of the parameter's memory, if that is not row-major.
    in_memory_order: Option<Tensor>,
}

impl<'a> ParameterState<'a> {
    /// `names` are the parts' names in PyTorch and in the state.
    pub fn new(
        parameter: &ShardedParameter,
        names: Vec<(String, String)>,
        saved: &'a dyn SavedState,
    ) -> Result<Self, Error> {
        let mut parts = Vec::with_capacity(names.len());
        for (part, name) in names {
            let in_memory_order = if part == COUNT || parameter.layout.is_row_major() {
                None
            } else {
                let elements = parameter.tensor.numel();
                let whole = saved.read(&name, 0..elements)?.reshape(parameter.tensor.size());
                Some(parameter.layout.in_memory_order(&whole).reshape([-1]))
            };
            parts.push(LoadedPart { part, name, in_memory_order });
        }
        Ok(Self { saved, parts })
    }

    /// Replaces the state of a rank's part. It is read chunk by chunk: no more than a chunk's is there twice.
    pub fn load_into(&self, own: &mut OwnShard) -> Result<(), Error> {
        let mut start = own.elements.start;
        for Chunk { length, optimizer, described, .. } in &mut own.chunks {
            let elements = start..start + *length as usize;
            start = elements.end;
            optimizer.load_from(&ChunkState { saved: self, described, elements })?;
        }
        Ok(())
    }
}

/// What it has of some elements, in the order of the parameter's memory.
struct ChunkState<'a> {
    saved: &'a ParameterState<'a>,
    /// [`StateDict::parameters`](flow_autograd::StateDict::parameters).
    described: &'a [String],
    elements: Range<usize>,
}

impl SavedState for ChunkState<'_> {
    fn parameters(&self) -> &[String] {
        self.described
    }

    fn shapes(&self) -> Vec<(String, Vec<i64>)> {
        let mut shapes = Vec::new();
        for LoadedPart { part, .. } in &self.saved.parts {
            let shape = if part == COUNT { Vec::new() } else { vec![self.elements.len() as i64] };
            shapes.push((format!("0.{part}"), shape));
        }
        shapes
    }

    fn read(&self, name: &str, elements: Range<usize>) -> Result<Tensor, Error> {
        let ParameterState { saved, parts } = self.saved;
        let found = parts.iter().find(|loaded| name.strip_prefix("0.") == Some(&loaded.part));
        let Some(LoadedPart { part, name, in_memory_order }) = found else {
            let reason = format!("the state has no {name}");
            return Err(Error::Libtorch { operation: "OptimizerState::load_from", reason });
        };
        if part == COUNT {
            return saved.read(name, elements);
        }
        let start = self.elements.start + elements.start;
        match in_memory_order {
            Some(all) => Ok(all.narrow(0, start as i64, elements.len() as i64).copy()),
            None => saved.read(name, start..start + elements.len()),
        }
    }
}
