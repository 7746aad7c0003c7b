//! all_gather and all_gather_v: every rank contributes one block, which all ranks read.

use super::host::HostCollectives;
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
use flow_kernels::digest;

impl ProcessGroup {
    /// Gathers all ranks' `input`, in rank order, in every rank's `output`, which is world size
    /// times as long.
    pub fn all_gather<I, O>(&self, input: &I, output: &mut O) -> Result<()>
    where
        I: Buffer + ?Sized,
        O: Buffer + ?Sized,
    {
        let (input, output, dtype) =
            self.caller().pair("all_gather", input, output, (1, self.world_size()))?;
        let operation = OpDescriptor::new(Kind::AllGather, dtype, input.bytes / dtype.size());
        self.collective(operation, Buffers::new(input, output), run)
    }

    /// Gathers as [`ProcessGroup::all_gather`] does, with blocks of different lengths: `counts[r]`
    /// is the number of elements of rank r's `input`, the same list on all ranks, and `output`
    /// holds their sum.
    ///
    /// ```
    /// # use flow_comm::ProcessGroup;
    /// let group = ProcessGroup::from_env()?; // alone: a group of one
    /// let mut all = [0_i64; 2];
    /// group.all_gather_v(&[3_i64, 4], &mut all, &[2])?;
    /// assert_eq!(all, [3, 4]);
    /// # Ok::<(), flow_comm::Error>(())
    /// ```
    pub fn all_gather_v<I, O>(&self, input: &I, output: &mut O, counts: &[usize]) -> Result<()>
    where
        I: Buffer + ?Sized,
        O: Buffer + ?Sized,
    {
        let name = "all_gather_v";
        let (input, output, dtype) = self.caller().uneven_pair(name, input, output)?;
        let block = input.bytes / dtype.size();
        let whole = output.bytes / dtype.size();
        self.caller().check_block_and_whole(name, counts, ("input", block), ("output", whole))?;
        let operation = OpDescriptor::new(Kind::AllGatherV, dtype, whole);
        self.collective(
            operation,
            Buffers { output_counts: counts, ..Buffers::new(input, output) },
            run_v,
        )
    }
}

/// Gives every rank all ranks' `input`, in rank order, in `output`.
pub fn run(
    host: &HostCollectives,
    operation: OpDescriptor,
    Buffers { input, output, .. }: Buffers,
) -> Result<()> {
    let contribution = Contribution {
        from: Contributors::All,
        to: Readers::All,
        data: Some(input.data),
        blocks: 1,
        block_bytes: input.bytes,
        extent: &equal_extents(input.bytes),
    };
    read_from_all(host, operation, &contribution, &mut |range, at| {
        for rank in 0..host.core.size() {
            output.write(rank * input.bytes + range.start, at(rank, 0), range.len());
        }
    })
}

/// Gathers as [`run`] does, with `output_counts[r]` elements of rank r.
fn run_v(
    host: &HostCollectives,
    mut operation: OpDescriptor,
    Buffers { input, output, output_counts, .. }: Buffers,
) -> Result<()> {
    operation.digest ^= digest(output_counts);
    let places = extents_of(output_counts, operation.dtype.size());
    let contribution = Contribution {
        from: Contributors::All,
        to: Readers::All,
        data: Some(input.data),
        blocks: 1,
        block_bytes: longest(&places),
        extent: &|rank, _| 0..places[rank].len(),
    };
    read_from_all(host, operation, &contribution, &mut |range, at| {
        for (rank, place) in places.iter().enumerate() {
            let range = contribution.clip(rank, 0, &range);
            output.write(place.start + range.start, at(rank, 0), range.len());
        }
    })
}

impl CudaGroup {
    /// Gathers all ranks' `input`, in rank order, in every rank's `output`, which is group size
    /// times as long.
    pub fn all_gather(
        &self,
        input: &impl DeviceBuffer,
        output: &mut impl DeviceBuffer,
        stream: &Stream,
    ) -> Result<()> {
        self.caller().check_device_pair("all_gather", input, output, (1, self.size()))?;
        let operation = OpDescriptor::new(Kind::AllGather, input.dtype(), count(input));
        let (from, count, dtype) = parts(input);
        let (to, ..) = parts(output);
        // SAFETY: `in_order` has the buffers used in the order of the caller's stream; the output
        // holds `count` elements for each rank.
        self.in_order(operation, stream, |communicator, own| unsafe {
            communicator.call("ncclAllGather", |nccl, comm| {
                nccl.ncclAllGather(from, to, count, dtype, comm, own.handle().cast())
            })
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
        let block = ("input", count(input));
        let whole = ("output", count(output));
        caller.check_block_and_whole(name, counts, block, whole)?;
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
                    // SAFETY: as in `all_gather`; the blocks are parts of the output, and this
                    // rank's is as long as `input`. NCCL reads the root's only.
                    let code = unsafe {
                        library.nccl.ncclBroadcast(from, to, count, dtype, root, comm, stream)
                    };
                    library.check("ncclBroadcast", code)?;
                }
                Ok(())
            })
        })
    }
}
