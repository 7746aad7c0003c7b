//! gather: every rank contributes one block, which the root reads.

use super::host::HostCollectives;
use super::read::read_from_all;
use crate::backend::Buffers;
use crate::descriptor::OpDescriptor;
use crate::error::Result;
use crate::shm::contribution::{equal_extents, Contribution, Contributors, Readers};

/// The root gets all ranks' `input`, in rank order, in its `output`.
pub fn gather(
    host: &HostCollectives,
    operation: OpDescriptor,
    Buffers { input, output, .. }: Buffers,
) -> Result<()> {
    let root = operation.root as usize;
    let contribution = Contribution {
        from: Contributors::All,
        to: Readers::Root(root),
        data: Some(input.data),
        blocks: 1,
        block_bytes: input.bytes,
        extent: &equal_extents(input.bytes),
    };
    read_from_all(host, operation, &contribution, &mut |range, at| {
        if host.core.rank != root {
            return;
        }
        for rank in 0..host.core.size() {
            output.write(rank * input.bytes + range.start, at(rank, 0), range.len());
        }
    })
}
