//! reduce: the reduction of all ranks' data replaces the root's.

use super::host::HostCollectives;
use super::reduce_in_place::reduce_in_place;
use crate::buffer::Buffer;
use crate::descriptor::OpDescriptor;
use crate::error::Result;
use crate::group::ProcessGroup;
use crate::kind::Kind;
use crate::memory::Buffers;
use crate::shm::contribution::Readers;
use flow_kernels::ReduceOp;

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
