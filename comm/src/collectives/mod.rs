//! Collectives on the host, one a file. Each says what a rank contributes, who reads it, and what a
//! reader does with it.
//!
//! | file | subject |
//! |---|---|
//! | `all_gather`, `all_to_all`, `barrier`, `broadcast` | collectives that read from other ranks |
//! | `gather`, `reduce_scatter`, `scatter` | more collectives that read from other ranks |
//! | `read` | the loop of the collectives above |
//! | `all_reduce`, `reduce` | collectives whose result replaces the input |
//! | `reduce_in_place` | the loop of `all_reduce` and `reduce` on one node |
//! | `bucket` | the reductions of data-parallel training, beside backward |
//! | `peers` | collectives of any layout: the caller reads from the others |
//! | `pieces` | where a bucket lies |
//! | `hierarchical` | all_reduce and buckets over several nodes |
//! | `host` | what all of them run on |
//! | `kernel` | adding up memory of several ranks |

mod all_gather;
mod all_reduce;
mod all_to_all;
mod barrier;
mod broadcast;
pub mod bucket;
mod gather;
pub mod hierarchical;
pub mod host;
mod kernel;
pub mod peers;
mod pieces;
mod read;
mod reduce;
mod reduce_in_place;
mod reduce_scatter;
mod scatter;

use host::HostCollectives;

use crate::backend::Buffers;
use crate::descriptor::OpDescriptor;
use crate::error::Result;
use crate::kind::Kind;

/// Runs one collective.
pub fn run(host: &HostCollectives, operation: OpDescriptor, buffers: Buffers) -> Result<()> {
    match operation.kind {
        Kind::AllReduce => all_reduce::all_reduce(host, operation, buffers),
        Kind::Reduce => reduce::reduce(host, operation, buffers),
        Kind::Broadcast => broadcast::broadcast(host, operation, buffers),
        Kind::AllGather | Kind::NewGroup => all_gather::all_gather(host, operation, buffers),
        Kind::AllGatherV => all_gather::all_gather_v(host, operation, buffers),
        Kind::Gather => gather::gather(host, operation, buffers),
        Kind::Scatter => scatter::scatter(host, operation, buffers),
        Kind::ReduceScatter => reduce_scatter::reduce_scatter(host, operation, buffers),
        Kind::ReduceScatterV => reduce_scatter::reduce_scatter_v(host, operation, buffers),
        Kind::AllToAll => all_to_all::all_to_all(host, operation, buffers),
        Kind::AllToAllV => all_to_all::all_to_all_v(host, operation, buffers),
        Kind::Barrier => barrier::barrier(host, operation),
        Kind::Send | Kind::Recv | Kind::BatchSendRecv | Kind::ReadPeers => {
            let reason = "it has a function of its own".into();
            Err(host.core.caller().argument(operation.kind.name(), reason))
        }
    }
}
