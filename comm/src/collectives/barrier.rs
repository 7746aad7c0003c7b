//! barrier: every rank contributes nothing, and waits for the others.

use super::host::HostCollectives;
use super::read::read_from_all;
use crate::descriptor::OpDescriptor;
use crate::error::Result;
use crate::shm::contribution::{equal_extents, Contribution, Contributors, Readers};

/// Returns when all ranks have called it.
pub fn barrier(host: &HostCollectives, operation: OpDescriptor) -> Result<()> {
    let contribution = Contribution {
        from: Contributors::All,
        to: Readers::All,
        data: None,
        blocks: 1,
        block_bytes: 0,
        extent: &equal_extents(0),
    };
    read_from_all(host, operation, &contribution, &mut |_, _| {})
}
