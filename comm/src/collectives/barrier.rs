//! barrier: every rank contributes nothing, and waits for the others.

use super::host::HostCollectives;
use super::read::read_from_all;
use crate::descriptor::OpDescriptor;
use crate::error::Result;
use crate::group::ProcessGroup;
use crate::kind::Kind;
use crate::memory::{BufferView, Buffers};
use crate::shm::contribution::{Contribution, Contributors, Readers, equal_extents};
use flow_kernels::DType;

impl ProcessGroup {
    /// Returns when all ranks of the group have called it.
    pub fn barrier(&self) -> Result<()> {
        let operation = OpDescriptor::new(Kind::Barrier, DType::U8, 0);
        self.collective(operation, Buffers::new(BufferView::NONE, BufferView::NONE), run)
    }
}

/// Returns when all ranks have called it.
fn run(host: &HostCollectives, operation: OpDescriptor, _: Buffers) -> Result<()> {
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
