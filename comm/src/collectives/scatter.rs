//! scatter: the root contributes a block for each rank.

use super::host::HostCollectives;
use super::read::read_from_all;
use crate::backend::Buffers;
use crate::descriptor::OpDescriptor;
use crate::error::Result;
use crate::shm::contribution::{equal_extents, Contribution, Contributors, Readers};

/// Rank r gets block r of the root's `input`.
pub fn scatter(
    host: &HostCollectives,
    operation: OpDescriptor,
    Buffers { input, output, .. }: Buffers,
) -> Result<()> {
    let (root, own) = (operation.root as usize, host.core.rank);
    let contribution = Contribution {
        from: Contributors::Root(root),
        to: Readers::OwnerOfBlock,
        data: (own == root).then_some(input.data),
        blocks: host.core.size(),
        block_bytes: output.bytes,
        extent: &equal_extents(output.bytes),
    };
    read_from_all(host, operation, &contribution, &mut |range, at| {
        output.write(range.start, at(root, own), range.len());
    })
}
