//! all_gather and all_gather_v: every rank contributes one block, which all ranks read.

use super::host::HostCollectives;
use super::read::read_from_all;
use crate::buffer::Buffer;
use crate::descriptor::OpDescriptor;
use crate::error::Result;
use crate::group::ProcessGroup;
use crate::kind::Kind;
use crate::memory::Buffers;
use crate::shm::contribution::{
    Contribution, Contributors, Readers, equal_extents, extents_of, longest,
};
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
        self.caller().check_counts(name, "counts", counts)?;
        self.caller().check_length(
            name,
            "input",
            input.bytes / dtype.size(),
            counts[self.rank()],
        )?;
        self.caller().check_length(
            name,
            "output",
            output.bytes / dtype.size(),
            counts.iter().sum(),
        )?;
        let operation = OpDescriptor::new(Kind::AllGatherV, dtype, counts.iter().sum());
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
    operation.layout ^= digest(output_counts);
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
