//! broadcast: the root contributes one block, which all ranks read.

use super::host::HostCollectives;
use super::read::read_from_all;
use crate::backend::Buffers;
use crate::descriptor::OpDescriptor;
use crate::error::Result;
use crate::shm::contribution::{equal_extents, Contribution, Contributors, Readers};

/// Copies the root's `output` to all ranks'.
pub fn broadcast(
    host: &HostCollectives,
    operation: OpDescriptor,
    Buffers { output: data, .. }: Buffers,
) -> Result<()> {
    let root = operation.root as usize;
    let contribution = Contribution {
        from: Contributors::Root(root),
        to: Readers::All,
        data: (host.core.rank == root).then_some(data.data),
        blocks: 1,
        block_bytes: data.bytes,
        extent: &equal_extents(data.bytes),
    };
    read_from_all(host, operation, &contribution, &mut |range, at| {
        if host.core.rank != root {
            data.write(range.start, at(root, 0), range.len());
        }
    })
}
