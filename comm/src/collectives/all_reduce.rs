//! all_reduce: the reduction of all ranks' data replaces the data on every rank.

use super::host::HostCollectives;
use super::kernel::is_mean_of_integers;
use super::reduce_in_place::reduce_in_place;
use crate::buffer::Buffer;
use crate::descriptor::OpDescriptor;
use crate::error::Result;
use crate::group::ProcessGroup;
use crate::kind::Kind;
use crate::memory::Buffers;
use crate::nccl::CudaGroup;
use crate::nccl::operations::count;
use crate::shm::contribution::Readers;
use crate::shm::control::PAYLOAD;
use flow_kernels::ReduceOp;
use flow_kernels::cuda::{DeviceBuffer, Stream};

impl ProcessGroup {
    /// Reduces `buffer` element by element over all ranks; all get the result.
    pub fn all_reduce<B: Buffer + ?Sized>(&self, buffer: &mut B, op: ReduceOp) -> Result<()> {
        let (data, dtype) = self.caller().view_mut("all_reduce", buffer)?;
        let operation = OpDescriptor::new(Kind::AllReduce, dtype, data.bytes / dtype.size());
        self.collective(operation.reduce(op), Buffers::in_place(data), run)
    }
}

/// Reduces `output` over all ranks. Over several nodes: small data, and means of integers, in one
/// step over all ranks; else `hierarchical`.
fn run(
    host: &HostCollectives,
    operation: OpDescriptor,
    Buffers { output: data, .. }: Buffers,
) -> Result<()> {
    let state = &mut *host.rounds.lock();
    match &host.hierarchical {
        Some(hierarchical) if data.bytes > PAYLOAD && !is_mean_of_integers(&operation) => {
            hierarchical.all_reduce(state, &operation, data)
        }
        _ => reduce_in_place(host, state, &operation, data, Readers::All),
    }
}

impl CudaGroup {
    /// Reduces `buffer` element by element over all ranks; all get the result.
    pub fn all_reduce(
        &self,
        buffer: &mut impl DeviceBuffer,
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<()> {
        let operation =
            OpDescriptor::new(Kind::AllReduce, buffer.dtype(), count(buffer)).reduce(op);
        // SAFETY: `in_order` has the buffer used in the order of the caller's stream.
        self.in_order(operation, stream, |communicator, own| unsafe {
            communicator.all_reduce(buffer, op, own)
        })
    }
}
