//! How ranks get the parameters that others have stepped.

use flow_autograd::tensor_from_memory;
use flow_comm::ProcessGroup;
use flow_tensor::TensorCollectives;
use tch::{Device, Kind, TchError, Tensor};

use super::error;
use super::sharded_parameter::ShardedParameter;
use crate::error::{Error, Result, job_rank};

/// Bytes of each rank that are gathered at once. On the CPU they are to stay in a cache until they are
/// copied to the parameters.
const CPU_CHUNK: usize = 256 << 10;
const GPU_CHUNK: usize = 32 << 20;
/// The alignment of each part of a chunk: a multiple of the size of any element.
const ALIGNMENT: usize = 64;

/// Gathers all ranks' shards in the parameters, chunk by chunk.
pub(crate) struct Gather {
    chunks: Vec<Chunk>,
    /// This rank's part of a chunk, and all ranks'.
    input: Tensor,
    output: Tensor,
}

struct Chunk {
    /// Bytes of each rank.
    length: i64,
    /// Views of this rank's shards, and where they lie in the input.
    own: Vec<(Tensor, Tensor)>,
    /// Views of the others' shards, and where they lie in the output.
    others: Vec<(Tensor, Tensor)>,
}

/// A part of a chunk.
struct Part {
    parameter: usize,
    start: usize,
    elements: usize,
    /// Where it begins in the chunk, in bytes.
    offset: usize,
}

impl Gather {
    /// Prepares to gather these parameters, of which there is one.
    pub fn new(group: &ProcessGroup, parameters: &[ShardedParameter]) -> Result<Self> {
        let device = parameters[0].tensor.device();
        let most = if device.is_cuda() { GPU_CHUNK } else { CPU_CHUNK };
        let mut packed = Vec::new();
        for rank in 0..group.world_size() {
            packed.push(pack(parameters, rank, most));
        }
        let count = packed.iter().map(Vec::len).max().unwrap_or_default();
        let mut lengths = vec![0; count];
        for chunks in &packed {
            for (parts, length) in chunks.iter().zip(&mut lengths) {
                let end = parts.last().map_or(0, |part| end_of(parameters, part));
                *length = end.max(*length);
            }
        }
        let longest = lengths.iter().max().copied().unwrap_or_default();
        let input = shared(group, longest, device)?;
        let libtorch_failed = |error: TchError| failed(group, error);
        let all = [(longest * group.world_size()) as i64];
        let output = Tensor::f_empty(all, (Kind::Uint8, device)).map_err(libtorch_failed)?;
        let mut chunks = Vec::with_capacity(count);
        for (number, &length) in lengths.iter().enumerate() {
            let mut chunk = Chunk { length: length as i64, own: Vec::new(), others: Vec::new() };
            for (rank, packed) in packed.iter().enumerate() {
                for part in packed.get(number).into_iter().flatten() {
                    let parameter = &parameters[part.parameter];
                    let is_own = rank == group.rank();
                    let (memory, start) =
                        if is_own { (&input, 0) } else { (&output, rank * length) };
                    let place = place(memory, start + part.offset, parameter.kind(), part.elements)
                        .map_err(libtorch_failed)?;
                    let view =
                        parameter.view(part.start, part.elements).map_err(libtorch_failed)?;
                    let views = if is_own { &mut chunk.own } else { &mut chunk.others };
                    views.push((view, place));
                }
            }
            chunks.push(chunk);
        }
        Ok(Self { chunks, input, output })
    }

    /// Gives each rank the shards of all. All ranks call this.
    pub fn run(&mut self, group: &ProcessGroup) -> Result<()> {
        for chunk in &mut self.chunks {
            let input = self.input.narrow(0, 0, chunk.length);
            let all = chunk.length * group.world_size() as i64;
            let mut output = self.output.narrow(0, 0, all);
            tch::no_grad(|| {
                for (view, place) in &mut chunk.own {
                    place.f_copy_(view).map_err(|error| failed(group, error))?;
                }
                group.all_gather_into_tensor(&mut output, &input)?;
                for (view, place) in &mut chunk.others {
                    view.f_copy_(place).map_err(|error| failed(group, error))?;
                }
                Ok::<_, Error>(())
            })?;
        }
        Ok(())
    }
}

/// Puts a rank's shards into chunks of at most `most` bytes, a multiple of the alignment.
fn pack(parameters: &[ShardedParameter], rank: usize, most: usize) -> Vec<Vec<Part>> {
    let mut chunks = Vec::new();
    let mut offset = most;
    for (number, parameter) in parameters.iter().enumerate() {
        let size = parameter.kind().elt_size_in_bytes();
        for shard in parameter.shards.iter().filter(|shard| shard.rank == rank) {
            let mut start = shard.elements.start;
            while start < shard.elements.end {
                if offset == most {
                    chunks.push(Vec::new());
                    offset = 0;
                }
                let elements = ((most - offset) / size).min(shard.elements.end - start);
                if let Some(chunk) = chunks.last_mut() {
                    chunk.push(Part { parameter: number, start, elements, offset });
                }
                start += elements;
                offset = (offset + elements * size).next_multiple_of(ALIGNMENT);
            }
        }
    }
    chunks
}

/// Returns where a part ends in its chunk, in bytes.
fn end_of(parameters: &[ShardedParameter], part: &Part) -> usize {
    let bytes = part.elements * parameters[part.parameter].kind().elt_size_in_bytes();
    (part.offset + bytes).next_multiple_of(ALIGNMENT)
}

/// Returns so many elements of `kind` that lie in `memory` from `start` on, in bytes.
fn place(memory: &Tensor, start: usize, kind: Kind, elements: usize) -> Result<Tensor, TchError> {
    let bytes = elements * kind.elt_size_in_bytes();
    memory.f_narrow(0, start as i64, bytes as i64)?.f_view_dtype(kind)
}

/// Returns memory of so many bytes, on the CPU where the other ranks can read it.
fn shared(group: &ProcessGroup, bytes: usize, device: Device) -> Result<Tensor> {
    let shape = [bytes as i64];
    if device.is_cuda() {
        return Tensor::f_empty(shape, (Kind::Uint8, device)).map_err(|error| failed(group, error));
    }
    let memory = group.alloc_shared::<u8>(bytes)?;
    tensor_from_memory(memory, &shape, Kind::Uint8).map_err(|error| failed(group, error))
}

fn failed(group: &ProcessGroup, reason: impl ToString) -> Error {
    error::failed(job_rank(group), reason)
}
