//! gather: every rank contributes one block, which the root reads.

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
    /// Gathers as [`ProcessGroup::all_gather`] does, to rank `root` only, which gives `Some`
    /// output; the others give `None`.
    pub fn gather<I, O>(&self, input: &I, output: Option<&mut O>, root: usize) -> Result<()>
    where
        I: Buffer + ?Sized,
        O: Buffer + ?Sized,
    {
        self.caller().check_rank("gather", "root", root)?;
        self.caller().check_root_side("gather", "output", output.is_some(), root)?;
        let (input, output, dtype) = match output {
            Some(output) => self.caller().pair("gather", input, output, (1, self.world_size()))?,
            None => {
                let (input, dtype) = self.caller().view("gather", input)?;
                (input, BufferView::NONE, dtype)
            }
        };
        let operation = OpDescriptor::new(Kind::Gather, dtype, input.bytes / dtype.size());
        self.collective(operation.root(root), Buffers::new(input, output), run)
    }
}

/// Gives the root all ranks' `input`, in rank order, in its `output`.
fn run(
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

impl CudaGroup {
    /// Gathers as [`CudaGroup::all_gather`] does, to rank `root` only, which gives `Some` output;
    /// the others give `None`.
    pub fn gather<B: DeviceBuffer>(
        &self,
        input: &B,
        output: Option<&mut B>,
        root: usize,
        stream: &Stream,
    ) -> Result<()> {
        self.caller().check_rank("gather", "root", root)?;
        self.caller().check_root_side("gather", "output", output.is_some(), root)?;
        if let Some(output) = &output {
            self.caller().check_device_pair("gather", input, &**output, (1, self.size()))?;
        }
        let operation = OpDescriptor::new(Kind::Gather, input.dtype(), count(input)).root(root);
        let send = PeerBlock { buffer: input, start: 0, bytes: input.bytes(), peer: root };
        let receives = output.map_or(Vec::new(), |output| blocks(&*output, self.size()));
        // SAFETY: `in_order` has the buffers used in the order of the caller's stream; the blocks
        // are parts of them.
        self.in_order(operation, stream, |communicator, own| unsafe {
            communicator.exchange(&[send], &receives, own)
        })
    }
}
