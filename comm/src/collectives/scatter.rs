//! scatter: the root contributes a block for each rank.

use super::host::HostCollectives;
use super::read::read_from_all;
use crate::buffer::Buffer;
use crate::descriptor::OpDescriptor;
use crate::error::Result;
use crate::group::ProcessGroup;
use crate::kind::Kind;
use crate::memory::{BufferView, Buffers};
use crate::shm::contribution::{Contribution, Contributors, Readers, equal_extents};

impl ProcessGroup {
    /// Gives block r of rank `root`'s `input` (world size blocks, each as long as `output`) to rank
    /// r. The root gives `Some` input, the others `None`.
    pub fn scatter<I, O>(&self, input: Option<&I>, output: &mut O, root: usize) -> Result<()>
    where
        I: Buffer + ?Sized,
        O: Buffer + ?Sized,
    {
        self.caller().check_rank("scatter", "root", root)?;
        self.caller().check_root_side("scatter", "input", input.is_some(), root)?;
        let (input, output, dtype) = match input {
            Some(input) => self.caller().pair("scatter", input, output, (self.world_size(), 1))?,
            None => {
                let (output, dtype) = self.caller().view_mut("scatter", output)?;
                (BufferView::NONE, output, dtype)
            }
        };
        let operation = OpDescriptor::new(Kind::Scatter, dtype, output.bytes / dtype.size());
        self.collective(operation.root(root), Buffers::new(input, output), run)
    }
}

/// Rank r gets block r of the root's `input`.
fn run(
    host: &HostCollectives,
    operation: OpDescriptor,
    Buffers { input, output, .. }: Buffers,
) -> Result<()> {
    let root = operation.root as usize;
    let own = host.core.rank;
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
