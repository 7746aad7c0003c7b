//! all_reduce: the reduction of all ranks' data replaces the data on every rank.

use super::host::HostCollectives;
use super::kernel::is_mean_of_integers;
use super::reduce_in_place::reduce_in_place;
use crate::backend::Buffers;
use crate::descriptor::OpDescriptor;
use crate::error::Result;
use crate::shm::contribution::Readers;
use crate::shm::control::PAYLOAD;

/// Reduces `output` over all ranks. Over several nodes: small data, and means of integers, in one
/// step over all ranks; else `hierarchical`.
pub fn all_reduce(
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
