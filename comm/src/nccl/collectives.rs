//! The collectives of a group on GPUs: argument checks, and what NCCL is called with.

use flow_kernels::cuda::{DeviceBuffer, DeviceMemory, Stream};
use flow_kernels::{DType, ReduceOp};

use super::communicator::{Communicator, CommunicatorError};
use super::group::CudaGroup;
use super::operations::{Block, operator, parts};
use crate::arguments::Caller;
use crate::descriptor::OpDescriptor;
use crate::error::Result;
use crate::kind::Kind;

impl CudaGroup {
    /// Reduces `buffer` element by element over all ranks; all get the result.
    pub fn all_reduce(
        &self,
        buffer: &mut impl DeviceBuffer,
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<()> {
        let operation =
            OpDescriptor::new(Kind::AllReduce, buffer.dtype(), count(buffer)).reduce(op);
        // SAFETY: `in_order` has the buffer used in the order of the caller's stream.
        self.in_order(operation, stream, |communicator, own| unsafe {
            enqueue_all_reduce(communicator, buffer, op, own)
        })
    }

    /// Reduces as [`CudaGroup::all_reduce`] does; only rank `root` gets the result, the other
    /// buffers stay as they are.
    pub fn reduce(
        &self,
        buffer: &mut impl DeviceBuffer,
        op: ReduceOp,
        root: usize,
        stream: &Stream,
    ) -> Result<()> {
        self.caller().check_rank("reduce", "root", root)?;
        let operation =
            OpDescriptor::new(Kind::Reduce, buffer.dtype(), count(buffer)).reduce(op).root(root);
        let (data, count, dtype) = parts(buffer);
        let op = operator(op);
        let root = root as i32;
        // SAFETY: as above; the memory holds `count` elements, and NCCL writes to the root's only.
        self.in_order(operation, stream, |communicator, own| unsafe {
            communicator.call("ncclReduce", |nccl, comm| {
                nccl.ncclReduce(data, data, count, dtype, op, root, comm, own.handle().cast())
            })
        })
    }

    /// Copies rank `root`'s buffers to all ranks', as one operation.
    pub fn broadcast<B: DeviceBuffer>(
        &self,
        buffers: &mut [B],
        root: usize,
        stream: &Stream,
    ) -> Result<()> {
        self.caller().check_rank("broadcast", "root", root)?;
        let bytes = buffers.iter().map(B::bytes).sum();
        let operation = OpDescriptor::new(Kind::Broadcast, DType::U8, bytes).root(root);
        let root = root as i32;
        self.in_order(operation, stream, |communicator, own| {
            let stream = own.handle().cast();
            communicator.grouped(|library, comm| {
                for buffer in buffers {
                    let (data, count, dtype) = parts(buffer);
                    // SAFETY: as above; the memory holds `count` elements.
                    let code = unsafe {
                        library.nccl.ncclBroadcast(data, data, count, dtype, root, comm, stream)
                    };
                    library.check("ncclBroadcast", code)?;
                }
                Ok(())
            })
        })
    }

    /// Gathers all ranks' `input`, in rank order, in every rank's `output`, which is group size
    /// times as long.
    pub fn all_gather(
        &self,
        input: &impl DeviceBuffer,
        output: &mut impl DeviceBuffer,
        stream: &Stream,
    ) -> Result<()> {
        check_pair(self.caller(), "all_gather", input, output, (1, self.size()))?;
        let operation = OpDescriptor::new(Kind::AllGather, input.dtype(), count(input));
        let (from, count, dtype) = parts(input);
        let (to, ..) = parts(output);
        // SAFETY: as above; the output holds `count` elements for each rank.
        self.in_order(operation, stream, |communicator, own| unsafe {
            communicator.call("ncclAllGather", |nccl, comm| {
                nccl.ncclAllGather(from, to, count, dtype, comm, own.handle().cast())
            })
        })
    }

    /// Reduces `input` (group size blocks, each as long as `output`) over all ranks; rank r gets
    /// block r.
    pub fn reduce_scatter(
        &self,
        input: &impl DeviceBuffer,
        output: &mut impl DeviceBuffer,
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<()> {
        check_pair(self.caller(), "reduce_scatter", input, output, (self.size(), 1))?;
        let operation =
            OpDescriptor::new(Kind::ReduceScatter, input.dtype(), count(input)).reduce(op);
        let (from, ..) = parts(input);
        let (to, count, dtype) = parts(output);
        let op = operator(op);
        // SAFETY: as above; the input holds `count` elements for each rank.
        self.in_order(operation, stream, |communicator, own| unsafe {
            communicator.call("ncclReduceScatter", |nccl, comm| {
                nccl.ncclReduceScatter(from, to, count, dtype, op, comm, own.handle().cast())
            })
        })
    }

    /// Block s of rank r's `output` becomes block r of rank s' `input`. Both buffers consist of
    /// equal blocks, one for each rank.
    pub fn all_to_all(
        &self,
        input: &impl DeviceBuffer,
        output: &mut impl DeviceBuffer,
        stream: &Stream,
    ) -> Result<()> {
        check_pair(self.caller(), "all_to_all", input, output, (1, 1))?;
        self.caller().check_blocks("all_to_all", count(input))?;
        let operation = OpDescriptor::new(Kind::AllToAll, input.dtype(), count(input));
        let sends = blocks(input, self.size());
        let receives = blocks(&*output, self.size());
        // SAFETY: as above; the blocks are parts of the buffers.
        self.in_order(operation, stream, |communicator, own| unsafe {
            communicator.exchange(&sends, &receives, own)
        })
    }

    /// Gathers as [`CudaGroup::all_gather`] does, to rank `root` only, which gives `Some` output;
    /// the others give `None`.
    pub fn gather<B: DeviceBuffer>(
        &self,
        input: &B,
        output: Option<&mut B>,
        root: usize,
        stream: &Stream,
    ) -> Result<()> {
        self.caller().check_rank("gather", "root", root)?;
        self.caller().check_root_side("gather", "output", output.is_some(), root)?;
        let output = match output {
            Some(output) => {
                check_pair(self.caller(), "gather", input, output, (1, self.size()))?;
                Some(output)
            }
            None => None,
        };
        let operation = OpDescriptor::new(Kind::Gather, input.dtype(), count(input)).root(root);
        let send = Block { buffer: input, start: 0, bytes: input.bytes(), peer: root };
        let receives = output.map_or(Vec::new(), |output| blocks(&*output, self.size()));
        // SAFETY: as above.
        self.in_order(operation, stream, |communicator, own| unsafe {
            communicator.exchange(&[send], &receives, own)
        })
    }

    /// Gives block r of rank `root`'s `input` (group size blocks, each as long as `output`) to rank
    /// r. The root gives `Some` input, the others `None`.
    pub fn scatter<B: DeviceBuffer>(
        &self,
        input: Option<&B>,
        output: &mut B,
        root: usize,
        stream: &Stream,
    ) -> Result<()> {
        self.caller().check_rank("scatter", "root", root)?;
        self.caller().check_root_side("scatter", "input", input.is_some(), root)?;
        if let Some(input) = input {
            check_pair(self.caller(), "scatter", input, output, (self.size(), 1))?;
        }
        let operation = OpDescriptor::new(Kind::Scatter, output.dtype(), count(output)).root(root);
        let receive = Block { buffer: &*output, start: 0, bytes: output.bytes(), peer: root };
        let sends = input.map_or(Vec::new(), |input| blocks(input, self.size()));
        // SAFETY: as above.
        self.in_order(operation, stream, |communicator, own| unsafe {
            communicator.exchange(&sends, &[receive], own)
        })
    }

    /// Gathers all ranks' `input`, in rank order, in every rank's `output`: `counts[r]` elements of
    /// rank r.
    pub fn all_gather_v(
        &self,
        input: &impl DeviceBuffer,
        output: &mut impl DeviceBuffer,
        counts: &[usize],
        stream: &Stream,
    ) -> Result<()> {
        let name = "all_gather_v";
        let caller = self.caller();
        caller.check_types(name, input.dtype(), output.dtype())?;
        caller.check_counts(name, "counts", counts)?;
        caller.check_length(name, "input", count(input), counts[self.rank()])?;
        caller.check_length(name, "output", count(output), counts.iter().sum())?;
        let operation = OpDescriptor::new(Kind::AllGatherV, output.dtype(), count(output));
        let (own_data, ..) = parts(input);
        let own_rank = self.rank();
        let blocks = blocks_of(&*output, counts);
        // NCCL has no gather of uneven blocks: each rank that has any broadcasts its own.
        self.in_order(operation, stream, |communicator, own| {
            let stream = own.handle().cast();
            communicator.grouped(|library, comm| {
                for block in &blocks {
                    let (to, count, dtype) = block.parts();
                    let from = if block.peer == own_rank { own_data } else { to };
                    let root = block.peer as i32;
                    // SAFETY: as above; the blocks are parts of the output, and this rank's is as
                    // long as `input`. NCCL reads the root's only.
                    let code = unsafe {
                        library.nccl.ncclBroadcast(from, to, count, dtype, root, comm, stream)
                    };
                    library.check("ncclBroadcast", code)?;
                }
                Ok(())
            })
        })
    }

    /// Reduces `input`, `counts[r]` elements for each rank r, over all ranks. Each gets its block.
    pub fn reduce_scatter_v(
        &self,
        input: &impl DeviceBuffer,
        output: &mut impl DeviceBuffer,
        counts: &[usize],
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<()> {
        let name = "reduce_scatter_v";
        let caller = self.caller();
        caller.check_types(name, input.dtype(), output.dtype())?;
        caller.check_counts(name, "counts", counts)?;
        caller.check_length(name, "input", count(input), counts.iter().sum())?;
        caller.check_length(name, "output", count(output), counts[self.rank()])?;
        let operation =
            OpDescriptor::new(Kind::ReduceScatterV, input.dtype(), count(input)).reduce(op);
        let (own_data, ..) = parts(output);
        let own_rank = self.rank();
        let blocks = blocks_of(input, counts);
        let op = operator(op);
        // NCCL has no reduce-scatter of uneven blocks: each block is reduced to its rank.
        self.in_order(operation, stream, |communicator, own| {
            let stream = own.handle().cast();
            communicator.grouped(|library, comm| {
                for block in &blocks {
                    let (from, count, dtype) = block.parts();
                    let to = if block.peer == own_rank { own_data } else { std::ptr::null_mut() };
                    let root = block.peer as i32;
                    // SAFETY: as above; the blocks are parts of the input, and this rank's is as
                    // long as `output`. NCCL writes to the root's only.
                    let code = unsafe {
                        library.nccl.ncclReduce(from, to, count, dtype, op, root, comm, stream)
                    };
                    library.check("ncclReduce", code)?;
                }
                Ok(())
            })
        })
    }

    /// Exchanges blocks: `input` is one block for each rank, of `input_counts[r]` elements for rank
    /// r; `output` one block from each, of `output_counts[r]` elements from rank r. What a rank
    /// sends is what its peer expects: each rank sees its own counts only, and if they do not fit
    /// those of a peer the operation does not end.
    pub fn all_to_all_v(
        &self,
        input: &impl DeviceBuffer,
        input_counts: &[usize],
        output: &mut impl DeviceBuffer,
        output_counts: &[usize],
        stream: &Stream,
    ) -> Result<()> {
        let name = "all_to_all_v";
        let caller = self.caller();
        caller.check_types(name, input.dtype(), output.dtype())?;
        caller.check_counts(name, "input_counts", input_counts)?;
        caller.check_counts(name, "output_counts", output_counts)?;
        caller.check_own_count(name, input_counts, output_counts)?;
        caller.check_length(name, "input", count(input), input_counts.iter().sum())?;
        caller.check_length(name, "output", count(output), output_counts.iter().sum())?;
        let operation = OpDescriptor::new(Kind::AllToAllV, input.dtype(), count(input));
        let sends = blocks_of(input, input_counts);
        let receives = blocks_of(&*output, output_counts);
        // SAFETY: as above; the blocks are parts of the buffers.
        self.in_order(operation, stream, |communicator, own| unsafe {
            communicator.exchange(&sends, &receives, own)
        })
    }

    /// Returns when all ranks have called it and all their earlier operations are over.
    pub fn barrier(&self) -> Result<()> {
        self.member(&"barrier")?;
        let memory = DeviceMemory::allocate(self.device(), DType::F32.size())
            .map_err(|e| self.system("barrier", e.to_string()))?;
        let mut word = Word(memory);
        let operation = OpDescriptor::new(Kind::Barrier, DType::F32, 1);
        let done = self.enqueue(operation, &[], |communicator, stream| {
            word.0.fill_zero(stream)?;
            // SAFETY: freeing the word waits for the device.
            unsafe { enqueue_all_reduce(communicator, &mut word, ReduceOp::Sum, stream)? };
            Ok(())
        })?;
        self.wait("barrier", &done)
    }
}

/// Checks that the lengths are in the ratio `(input, output)`, and the types equal.
fn check_pair(
    caller: Caller,
    operation: &str,
    input: &impl DeviceBuffer,
    output: &impl DeviceBuffer,
    ratio: (usize, usize),
) -> Result<()> {
    let input = (input.bytes(), input.dtype());
    let output = (output.bytes(), output.dtype());
    caller.check_pair(operation, input, output, ratio)
}

/// Enqueues the reduction of `buffer` over all ranks.
///
/// # Safety
///
/// Until what this enqueues on `stream` is over, nobody else uses the buffer, and it is not freed.
pub(super) unsafe fn enqueue_all_reduce(
    communicator: &Communicator,
    buffer: &mut dyn DeviceBuffer,
    op: ReduceOp,
    stream: &Stream,
) -> Result<(), CommunicatorError> {
    let (data, count, dtype) = parts(buffer);
    let op = operator(op);
    let stream = stream.handle().cast();
    communicator.call("ncclAllReduce", |nccl, comm| {
        // SAFETY: the memory holds `count` elements; the caller's promise.
        unsafe { nccl.ncclAllReduce(data, data, count, dtype, op, comm, stream) }
    })
}

/// Enqueues the copy of rank `root`'s buffer to all ranks'.
///
/// # Safety
///
/// As for [`enqueue_all_reduce`].
pub(super) unsafe fn enqueue_broadcast(
    communicator: &Communicator,
    buffer: &mut dyn DeviceBuffer,
    root: usize,
    stream: &Stream,
) -> Result<(), CommunicatorError> {
    let (data, count, dtype) = parts(buffer);
    let root = root as i32;
    let stream = stream.handle().cast();
    communicator.call("ncclBroadcast", |nccl, comm| {
        // SAFETY: the memory holds `count` elements; the caller's promise.
        unsafe { nccl.ncclBroadcast(data, data, count, dtype, root, comm, stream) }
    })
}

/// Returns the number of elements.
pub(super) fn count(buffer: &impl DeviceBuffer) -> usize {
    buffer.bytes() / buffer.dtype().size()
}

/// Returns a buffer's equal blocks, one for each of `peers`.
fn blocks(buffer: &impl DeviceBuffer, peers: usize) -> Vec<Block<'_>> {
    let bytes = buffer.bytes() / peers;
    (0..peers).map(|peer| Block { buffer, start: peer * bytes, bytes, peer }).collect()
}

/// Returns a buffer's blocks, of `counts[peer]` elements each; those that are empty are left out.
fn blocks_of<'a>(buffer: &'a impl DeviceBuffer, counts: &[usize]) -> Vec<Block<'a>> {
    let size = buffer.dtype().size();
    let mut start = 0;
    let mut blocks = Vec::new();
    for (peer, count) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
        let bytes = count * size;
        blocks.push(Block { buffer, start, bytes, peer });
        start += bytes;
    }
    blocks
}

/// One element for a barrier.
struct Word(DeviceMemory);

// SAFETY: the memory holds one f32 and is freed when the device has done all its work.
unsafe impl DeviceBuffer for Word {
    fn address(&self) -> u64 {
        self.0.address()
    }

    fn bytes(&self) -> usize {
        self.0.bytes()
    }

    fn dtype(&self) -> DType {
        DType::F32
    }
}
