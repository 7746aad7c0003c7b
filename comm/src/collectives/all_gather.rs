//! all_gather and all_gather_v: every rank contributes one block, which all ranks read.

use super::host::HostCollectives;
use super::read::read_from_all;
use crate::backend::Buffers;
use crate::descriptor::OpDescriptor;
use crate::error::Result;
use crate::shm::contribution::{
    digest, equal_extents, extents_of, longest, Contribution, Contributors, Readers,
};

/// Every rank gets all ranks' `input`, in rank order, in `output`.
pub fn all_gather(
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

/// As [`all_gather`], with `output_counts[r]` elements of rank r.
pub fn all_gather_v(
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
