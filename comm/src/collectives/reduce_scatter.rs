//! reduce_scatter and reduce_scatter_v: every rank contributes a block for each rank, which that
//! rank reduces.

use std::ops::Range;

use super::host::HostCollectives;
use super::kernel::reduce_all;
use super::read::read_from_all;
use crate::buffer::Buffer;
use crate::descriptor::OpDescriptor;
use crate::error::Result;
use crate::group::ProcessGroup;
use crate::kind::Kind;
use crate::memory::Buffers;
use crate::nccl::CudaGroup;
use crate::nccl::operations::{blocks_of, count, parts};
use crate::shm::contribution::{
    Contribution, Contributors, Readers, equal_extents, extents_of, longest,
};
use flow_kernels::cuda::{DeviceBuffer, Stream};
use flow_kernels::{ReduceOp, digest};

impl ProcessGroup {
    /// Reduces `input` (world size blocks, each as long as `output`) over all ranks; rank r gets
    /// block r.
    pub fn reduce_scatter<I, O>(&self, input: &I, output: &mut O, op: ReduceOp) -> Result<()>
    where
        I: Buffer + ?Sized,
        O: Buffer + ?Sized,
    {
        let (input, output, dtype) =
            self.caller().pair("reduce_scatter", input, output, (self.world_size(), 1))?;
        let operation = OpDescriptor::new(Kind::ReduceScatter, dtype, input.bytes / dtype.size());
        self.collective(operation.reduce(op), Buffers::new(input, output), run)
    }

    /// Reduces as [`ProcessGroup::reduce_scatter`] does, with blocks of different lengths: rank r
    /// gets block r, of `counts[r]` elements. All ranks give the same list, and `input` holds its
    /// sum.
    pub fn reduce_scatter_v<I, O>(
        &self,
        input: &I,
        output: &mut O,
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<()>
    where
        I: Buffer + ?Sized,
        O: Buffer + ?Sized,
    {
        let name = "reduce_scatter_v";
        let (input, output, dtype) = self.caller().uneven_pair(name, input, output)?;
        let block = output.bytes / dtype.size();
        let whole = input.bytes / dtype.size();
        self.caller().check_block_and_whole(name, counts, ("output", block), ("input", whole))?;
        let operation = OpDescriptor::new(Kind::ReduceScatterV, dtype, whole);
        let buffers = Buffers { input_counts: counts, ..Buffers::new(input, output) };
        self.collective(operation.reduce(op), buffers, run_v)
    }
}

/// Rank r gets the reduction of all ranks' blocks r.
fn run(host: &HostCollectives, operation: OpDescriptor, buffers: Buffers) -> Result<()> {
    let block_bytes = buffers.output.bytes;
    reduce_blocks(host, operation, buffers, &equal_extents(block_bytes), block_bytes)
}

/// Reduces as [`run`] does, with `input_counts[r]` elements in block r.
fn run_v(host: &HostCollectives, mut operation: OpDescriptor, buffers: Buffers) -> Result<()> {
    operation.digest ^= digest(buffers.input_counts);
    let places = extents_of(buffers.input_counts, operation.dtype.size());
    reduce_blocks(host, operation, buffers, &|_, block| places[block].clone(), longest(&places))
}

fn reduce_blocks(
    host: &HostCollectives,
    operation: OpDescriptor,
    Buffers { input, output, .. }: Buffers,
    extent: &dyn Fn(usize, usize) -> Range<usize>,
    block_bytes: usize,
) -> Result<()> {
    let size = host.core.size();
    let own = host.core.rank;
    let contribution = Contribution {
        from: Contributors::All,
        to: Readers::OwnerOfBlock,
        data: Some(input.data),
        blocks: size,
        block_bytes,
        extent,
    };
    read_from_all(host, operation, &contribution, &mut |range, at| {
        let range = contribution.clip(own, own, &range);
        let sources: Vec<*const u8> = (0..size).map(|rank| at(rank, own)).collect();
        let destination = output.data.wrapping_add(range.start);
        let count = range.len() / operation.dtype.size();
        // SAFETY: each source has `range` of a block that no rank writes in this round; the
        // destination is the same range of our own output; both are aligned, as ranges begin at
        // multiples of 64 bytes.
        unsafe { reduce_all(&operation, &sources, &[destination], count) };
    })
}

impl CudaGroup {
    /// Reduces `input` (group size blocks, each as long as `output`) over all ranks; rank r gets
    /// block r.
    pub fn reduce_scatter(
        &self,
        input: &impl DeviceBuffer,
        output: &mut impl DeviceBuffer,
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<()> {
        self.caller().check_device_pair("reduce_scatter", input, output, (self.size(), 1))?;
        let operation =
            OpDescriptor::new(Kind::ReduceScatter, input.dtype(), count(input)).reduce(op);
        let (from, ..) = parts(input);
        let (to, count, dtype) = parts(output);
        // SAFETY: `in_order` has the buffers used in the order of the caller's stream; the input
        // holds `count` elements for each rank.
        self.in_order(operation, stream, |communicator, own| unsafe {
            let op = communicator.operator(op);
            communicator.call("ncclReduceScatter", |nccl, comm| {
                nccl.ncclReduceScatter(from, to, count, dtype, op, comm, own.handle().cast())
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
        let block = ("output", count(output));
        let whole = ("input", count(input));
        caller.check_block_and_whole(name, counts, block, whole)?;
        let operation =
            OpDescriptor::new(Kind::ReduceScatterV, input.dtype(), count(input)).reduce(op);
        let (own_data, ..) = parts(output);
        let own_rank = self.rank();
        let blocks = blocks_of(input, counts);
        // NCCL has no reduce-scatter of uneven blocks: each block is reduced to its rank.
        self.in_order(operation, stream, |communicator, own| {
            let op = communicator.operator(op);
            let stream = own.handle().cast();
            communicator.grouped(|library, comm| {
                for block in &blocks {
                    let (from, count, dtype) = block.parts();
                    let to = if block.peer == own_rank { own_data } else { std::ptr::null_mut() };
                    let root = block.peer as i32;
                    // SAFETY: as in `reduce_scatter`; the blocks are parts of the input, and this
                    // rank's is as long as `output`. NCCL writes to the root's only.
                    let code = unsafe {
                        library.nccl.ncclReduce(from, to, count, dtype, op, root, comm, stream)
                    };
                    library.check("ncclReduce", code)?;
                }
                Ok(())
            })
        })
    }
}
