//! Many tensors in one operation.

use std::sync::Arc;

use flow_autograd::CudaTensor;
use flow_comm::nccl::{CudaGroup, FlatBucket};
use flow_comm::{ProcessGroup, ReduceOp, SharedBuffer};
use tch::{Kind, Tensor};

use crate::error::{Error, Result, failed, torch_failed};
use crate::operation::{Call, Operation, Output};
use crate::prepared::{Prepared, check};
use crate::tensors::{contiguous, copy_back, cuda_group, current_stream};

const OPERATION: &str = "broadcasting tensors";
const ALL_REDUCE: &str = "all_reduce_coalesced";

/// Reduces several tensors:
/// [`TensorCollectives::all_reduce_coalesced`](crate::TensorCollectives::all_reduce_coalesced).
pub(crate) fn all_reduce(group: &ProcessGroup, tensors: &mut [Tensor], op: ReduceOp) -> Result<()> {
    let failed = failed(group, ALL_REDUCE);
    for tensor in tensors.iter() {
        check(true, tensor, true).map_err(&failed)?;
        if tensor.device() != tensors[0].device() {
            let devices = (tensors[0].device(), tensor.device());
            return Err(failed(format!("tensors are on {devices:?}: put them on one device")));
        }
    }
    for members in by_kind(tensors) {
        let parts: Vec<Tensor> =
            members.iter().map(|&index| contiguous(&tensors[index]).view([-1])).collect();
        let flat = Tensor::f_cat(&parts, 0).map_err(torch_failed(group, ALL_REDUCE))?;
        let reduce = Call::new(group, Operation::AllReduce(op), None, Output::Given(&flat))?;
        drop(reduce.run(group)?);
        let lengths: Vec<i64> = parts.iter().map(|part| part.numel() as i64).collect();
        for (index, reduced) in members.into_iter().zip(flat.split_with_sizes(lengths, 0)) {
            let reduced = reduced.view(&tensors[index].size()[..]);
            copy_back(group, ALL_REDUCE, &reduced, &mut tensors[index])?;
        }
    }
    Ok(())
}

/// Returns the indices of tensors of each kind.
fn by_kind(tensors: &[Tensor]) -> Vec<Vec<usize>> {
    let mut kinds: Vec<(Kind, Vec<usize>)> = Vec::new();
    for (index, tensor) in tensors.iter().enumerate() {
        match kinds.iter_mut().find(|(kind, _)| *kind == tensor.kind()) {
            Some((_, members)) => members.push(index),
            None => kinds.push((tensor.kind(), vec![index])),
        }
    }
    kinds.into_iter().map(|(_, members)| members).collect()
}

/// Broadcasts many tensors, all on one device, in one operation: PyTorch's
/// `_broadcast_coalesced`.
pub struct CoalescedBroadcast {
    names: Vec<String>,
    tensors: Vec<Tensor>,
    /// The kind and number of elements that the buffers were made for, of each tensor.
    sizes: Vec<(Kind, usize)>,
    /// None for one rank.
    buffers: Option<CoalescedBuffers>,
}

enum CoalescedBuffers {
    /// All tensors' bytes, one after the other.
    Cpu(SharedBuffer<u8>),
    Cuda {
        cuda: Arc<CudaGroup>,
        flat: Vec<Flat>,
    },
}

impl CoalescedBuffers {
    fn new(group: &ProcessGroup, tensors: &[Tensor]) -> Result<Self> {
        let cuda = tensors.first().map(|tensor| cuda_group(group, tensor)).transpose()?.flatten();
        Ok(match cuda {
            Some(cuda) => Self::Cuda { flat: flat(&cuda, tensors)?, cuda },
            None => Self::Cpu(group.alloc_shared(tensors.iter().map(size_in_bytes).sum())?),
        })
    }
}

/// Tensors of one kind, by index.
struct Flat {
    members: Vec<usize>,
    /// None for kinds that the kernels do not know, which are broadcast one by one.
    bucket: Option<FlatBucket>,
}

impl CoalescedBroadcast {
    /// Prepares to broadcast these tensors, named for messages. They may be on GPUs, and are the
    /// same on all ranks, but for their values.
    ///
    /// # Errors
    ///
    /// There is no memory for them, or NCCL cannot be used.
    pub fn new(group: &ProcessGroup, named: Vec<(String, Tensor)>) -> Result<Self> {
        let (names, tensors): (Vec<String>, Vec<Tensor>) = named.into_iter().unzip();
        let buffers = match group.world_size() {
            1 => None,
            _ => Some(CoalescedBuffers::new(group, &tensors)?),
        };
        let sizes = tensors.iter().map(|tensor| (tensor.kind(), tensor.numel())).collect();
        Ok(Self { names, tensors, sizes, buffers })
    }

    /// Returns the tensors with their names.
    pub fn named(&self) -> Vec<(String, Tensor)> {
        let tensors = self.tensors.iter().map(Tensor::shallow_clone);
        self.names.iter().cloned().zip(tensors).collect()
    }

    /// Returns whether there are no tensors.
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// Gives all ranks the root's values, in one transfer with a copy on each side.
    ///
    /// # Errors
    ///
    /// A tensor has another kind or number of elements than before; the broadcast failed.
    pub fn run(&mut self, group: &ProcessGroup, root: usize) -> Result<()> {
        let contiguous: Vec<Tensor> = self.tensors.iter().map(contiguous).collect();
        // A model may have given a tensor other data since it was wrapped.
        for (index, now) in contiguous.iter().enumerate() {
            let (kind, length) = self.sizes[index];
            if (now.kind(), now.numel()) != (kind, length) {
                return Err(failed(group, OPERATION)(format!(
                    "{} had {length} elements of {kind:?} when the model was wrapped and is {:?} \
                     {:?} now: wrap it again",
                    self.names[index],
                    now.size(),
                    now.kind()
                )));
            }
        }
        match &mut self.buffers {
            None => {}
            Some(CoalescedBuffers::Cpu(memory)) => {
                broadcast_shared(group, memory, root, &contiguous)?
            }
            Some(CoalescedBuffers::Cuda { cuda, flat }) => {
                broadcast_flat(group, cuda, flat, root, &contiguous)?
            }
        }
        if group.rank() != root {
            for (tensor, contiguous) in self.tensors.iter_mut().zip(&contiguous) {
                copy_back(group, OPERATION, contiguous, tensor)?;
            }
        }
        Ok(())
    }
}

fn flat(cuda: &CudaGroup, tensors: &[Tensor]) -> Result<Vec<Flat>> {
    let mut all = Vec::new();
    for (number, members) in by_kind(tensors).into_iter().enumerate() {
        let kind = tensors[members[0]].kind();
        let floating = matches!(kind, Kind::Float | Kind::Double | Kind::Half | Kind::BFloat16);
        let lengths: Vec<usize> = members.iter().map(|&member| tensors[member].numel()).collect();
        let bucket = match flow_autograd::dtype(kind).filter(|_| floating) {
            Some(dtype) => Some(cuda.bucket_to_broadcast(number as u32, dtype, &lengths)?),
            None => None,
        };
        all.push(Flat { members, bucket });
    }
    Ok(all)
}

fn broadcast_flat(
    group: &ProcessGroup,
    cuda: &CudaGroup,
    flat: &mut [Flat],
    root: usize,
    tensors: &[Tensor],
) -> Result<()> {
    let stream = current_stream(group, cuda)?;
    for Flat { members, bucket } in flat {
        let members = members.iter().map(|&member| &tensors[member]);
        match bucket {
            Some(bucket) => {
                let mut buffers = members
                    .map(CudaTensor::new)
                    .collect::<Result<Vec<_>, _>>()
                    .map_err(libtorch_failed(group))?;
                cuda.broadcast_bucket(bucket, &mut buffers, root, &stream)?;
            }
            None => {
                let mut buffers = members
                    .map(CudaTensor::as_bytes)
                    .collect::<Result<Vec<_>, _>>()
                    .map_err(libtorch_failed(group))?;
                cuda.broadcast(&mut buffers, root, &stream)?;
            }
        }
    }
    Ok(())
}

fn broadcast_shared(
    group: &ProcessGroup,
    memory: &mut SharedBuffer<u8>,
    root: usize,
    tensors: &[Tensor],
) -> Result<()> {
    let fail = libtorch_failed(group);
    let mut end = 0;
    if group.rank() == root {
        for tensor in tensors {
            let bytes = flow_autograd::bytes(tensor).map_err(&fail)?;
            memory[end..end + bytes.len()].copy_from_slice(bytes);
            end += bytes.len();
        }
    }
    group.broadcast(memory, root)?;
    if group.rank() != root {
        end = 0;
        for tensor in tensors {
            let mut target = tensor.shallow_clone();
            let bytes = flow_autograd::bytes_mut(&mut target).map_err(&fail)?;
            bytes.copy_from_slice(&memory[end..end + bytes.len()]);
            end += bytes.len();
        }
    }
    Ok(())
}

fn libtorch_failed(group: &ProcessGroup) -> impl Fn(flow_autograd::Error) -> Error {
    let failed = failed(group, OPERATION);
    move |error| failed(error.to_string())
}

fn size_in_bytes(tensor: &Tensor) -> usize {
    tensor.numel() * tensor.kind().elt_size_in_bytes()
}
