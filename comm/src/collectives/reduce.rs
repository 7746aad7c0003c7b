//! reduce: the reduction of all ranks' data replaces the root's.

use super::host::HostCollectives;
use super::reduce_in_place::reduce_in_place;
use crate::backend::Buffers;
use crate::descriptor::OpDescriptor;
use crate::error::Result;
use crate::shm::contribution::Readers;

/// Reduces `output` over all ranks into the root's; the other ranks' stay as they are.
pub fn reduce(
    host: &HostCollectives,
    operation: OpDescriptor,
    Buffers { output: data, .. }: Buffers,
) -> Result<()> {
    let state = &mut *host.rounds.lock();
    reduce_in_place(host, state, &operation, data, Readers::Root(operation.root as usize))
}
