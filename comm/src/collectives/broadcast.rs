//! broadcast: the root contributes one block, which all ranks read.

use super::host::HostCollectives;
use super::read::read_from_all;
use crate::buffer::Buffer;
use crate::descriptor::OpDescriptor;
use crate::error::Result;
use crate::group::ProcessGroup;
use crate::kind::Kind;
use crate::memory::Buffers;
use crate::nccl::CudaGroup;
use crate::nccl::operations::parts;
use crate::shm::contribution::{Contribution, Contributors, Readers, equal_extents};
use flow_kernels::DType;
use flow_kernels::cuda::{DeviceBuffer, Stream};

impl ProcessGroup {
    /// Copies rank `root`'s `buffer` to all ranks'.
    pub fn broadcast<B: Buffer + ?Sized>(&self, buffer: &mut B, root: usize) -> Result<()> {
        self.caller().check_rank("broadcast", "root", root)?;
        let (data, dtype) = self.caller().view_mut("broadcast", buffer)?;
        let operation = OpDescriptor::new(Kind::Broadcast, dtype, data.bytes / dtype.size());
        self.collective(operation.root(root), Buffers::in_place(data), run)
    }
}

/// Copies the root's `output` to all ranks'.
fn run(
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

impl CudaGroup {
    /// Copies rank `root`'s buffers to all ranks', as one operation.
    pub fn broadcast<B: DeviceBuffer>(
        &self,
        buffers: &mut [B],
        root: usize,
        stream: &Stream,
    ) -> Result<()> {
        self.caller().check_rank("broadcast", "root", root)?;
        let bytes = buffers.iter().map(B::bytes).sum();
        let operation = OpDescriptor::new(Kind::Broadcast, DType::U8, bytes).root(root);
        let root = root as i32;
        self.in_order(operation, stream, |communicator, own| {
            let stream = own.handle().cast();
            communicator.grouped(|library, comm| {
                for buffer in buffers {
                    let (data, count, dtype) = parts(buffer);
                    // SAFETY: `in_order` has the buffers used in the order of the caller's stream;
                    // each holds `count` elements.
                    let code = unsafe {
                        library.nccl.ncclBroadcast(data, data, count, dtype, root, comm, stream)
                    };
                    library.check("ncclBroadcast", code)?;
                }
                Ok(())
            })
        })
    }
}
