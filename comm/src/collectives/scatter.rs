//! scatter: the root contributes a block for each rank.

use super::host::HostCollectives;
use super::read::read_from_all;
use crate::buffer::Buffer;
use crate::descriptor::OpDescriptor;
use crate::error::Result;
use crate::group::ProcessGroup;
use crate::kind::Kind;
use crate::memory::{BufferView, Buffers};
use crate::nccl::CudaGroup;
use crate::nccl::operations::{PeerBlock, blocks, count};
use crate::shm::contribution::{Contribution, Contributors, Readers, equal_extents};
use flow_kernels::cuda::{DeviceBuffer, Stream};

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

impl CudaGroup {
    /// Gives block r of rank `root`'s `input` (group size blocks, each as long as `output`) to rank
    /// r. The root gives `Some` input, the others `None`.
    pub fn scatter<B: DeviceBuffer>(
        &self,
        input: Option<&B>,
        output: &mut B,
        root: usize,
        stream: &Stream,
    ) -> Result<()> {
        self.caller().check_rank("scatter", "root", root)?;
        self.caller().check_root_side("scatter", "input", input.is_some(), root)?;
        if let Some(input) = input {
            self.caller().check_device_pair("scatter", input, output, (self.size(), 1))?;
        }
        let operation = OpDescriptor::new(Kind::Scatter, output.dtype(), count(output)).root(root);
        let receive = PeerBlock { buffer: &*output, start: 0, bytes: output.bytes(), peer: root };
        let sends = input.map_or(Vec::new(), |input| blocks(input, self.size()));
        // SAFETY: `in_order` has the buffers used in the order of the caller's stream; the blocks
        // are parts of them.
        self.in_order(operation, stream, |communicator, own| unsafe {
            communicator.exchange(&sends, &[receive], own)
        })
    }
}
