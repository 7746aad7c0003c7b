//! reduce: the reduction of all ranks' data replaces the root's.

use super::host::HostCollectives;
use super::reduce_in_place::reduce_in_place;
use crate::buffer::Buffer;
use crate::descriptor::OpDescriptor;
use crate::error::Result;
use crate::group::ProcessGroup;
use crate::kind::Kind;
use crate::memory::Buffers;
use crate::nccl::CudaGroup;
use crate::nccl::operations::{count, parts};
use crate::shm::contribution::Readers;
use flow_kernels::ReduceOp;
use flow_kernels::cuda::{DeviceBuffer, Stream};

impl ProcessGroup {
    /// Reduces as [`ProcessGroup::all_reduce`] does; only rank `root` gets the result, the other
    /// buffers stay as they are.
    pub fn reduce<B: Buffer + ?Sized>(
        &self,
        buffer: &mut B,
        op: ReduceOp,
        root: usize,
    ) -> Result<()> {
        self.caller().check_rank("reduce", "root", root)?;
        let (data, dtype) = self.caller().view_mut("reduce", buffer)?;
        let operation = OpDescriptor::new(Kind::Reduce, dtype, data.bytes / dtype.size());
        self.collective(operation.reduce(op).root(root), Buffers::in_place(data), run)
    }
}

/// Reduces `output` over all ranks into the root's; the other ranks' stay as they are.
fn run(
    host: &HostCollectives,
    operation: OpDescriptor,
    Buffers { output: data, .. }: Buffers,
) -> Result<()> {
    let state = &mut *host.rounds.lock();
    reduce_in_place(host, state, &operation, data, Readers::Root(operation.root as usize))
}

impl CudaGroup {
    /// Reduces as [`CudaGroup::all_reduce`] does; only rank `root` gets the result, the other
    /// buffers stay as they are.
    pub fn reduce(
        &self,
        buffer: &mut impl DeviceBuffer,
        op: ReduceOp,
        root: usize,
        stream: &Stream,
    ) -> Result<()> {
        self.caller().check_rank("reduce", "root", root)?;
        let operation =
            OpDescriptor::new(Kind::Reduce, buffer.dtype(), count(buffer)).reduce(op).root(root);
        let (data, count, dtype) = parts(buffer);
        let root = root as i32;
        // SAFETY: `in_order` has the buffer used in the order of the caller's stream; it holds `count`
        // elements, and NCCL writes to the root's only.
        self.in_order(operation, stream, |communicator, own| unsafe {
            let op = communicator.operator(op);
            communicator.call("ncclReduce", |nccl, comm| {
                nccl.ncclReduce(data, data, count, dtype, op, root, comm, own.handle().cast())
            })
        })
    }
}
