//! reduce_scatter and reduce_scatter_v: every rank contributes a block for each rank, which that
//! rank reduces.

use std::ops::Range;

use super::host::HostCollectives;
use super::kernel::reduce_all;
use super::read::read_from_all;
use crate::backend::Buffers;
use crate::descriptor::OpDescriptor;
use crate::error::Result;
use crate::shm::contribution::{
    digest, equal_extents, extents_of, longest, Contribution, Contributors, Readers,
};

/// Rank r gets the reduction of all ranks' blocks r.
pub fn reduce_scatter(
    host: &HostCollectives,
    operation: OpDescriptor,
    buffers: Buffers,
) -> Result<()> {
    let block_bytes = buffers.output.bytes;
    reduce_blocks(host, operation, buffers, &equal_extents(block_bytes), block_bytes)
}

/// As [`reduce_scatter`], with `input_counts[r]` elements in block r.
pub fn reduce_scatter_v(
    host: &HostCollectives,
    mut operation: OpDescriptor,
    buffers: Buffers,
) -> Result<()> {
    operation.layout ^= digest(buffers.input_counts);
    let places = extents_of(buffers.input_counts, operation.dtype.size());
    let extent = |_, block: usize| places[block].clone();
    reduce_blocks(host, operation, buffers, &extent, longest(&places))
}

fn reduce_blocks(
    host: &HostCollectives,
    operation: OpDescriptor,
    Buffers { input, output, .. }: Buffers,
    extent: &dyn Fn(usize, usize) -> Range<usize>,
    block_bytes: usize,
) -> Result<()> {
    let (size, own) = (host.core.size(), host.core.rank);
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
