//! Collectives, one a file: the methods of [`ProcessGroup`](crate::ProcessGroup) and of
//! [`CudaGroup`](crate::nccl::CudaGroup) with their checks of arguments, and what they do. On the
//! host that is what a rank contributes, who reads it, and what a reader does with it. On GPUs it is
//! what NCCL is called with.
//!
//! From `read` on, files are about the host.
//!
//! | file | subject |
//! |---|---|
//! | `all_gather`, `all_to_all`, `barrier`, `broadcast` | collectives that read from other ranks |
//! | `gather`, `reduce_scatter`, `scatter` | more collectives that read from other ranks |
//! | `read` | the loop of the collectives above |
//! | `all_reduce`, `reduce` | collectives whose result replaces the input |
//! | `reduce_in_place` | the loop of `all_reduce` and `reduce` on one node |
//! | `launch` | a bucket from its launch to its end |
//! | `bucket` | the reductions of data-parallel training, beside backward |
//! | `peers` | collectives of any layout: the caller reads from the others |
//! | `pieces` | where a bucket lies |
//! | `hierarchical` | all_reduce and buckets over several nodes |
//! | `addends` | what is added up there |
//! | `host` | what all of them run on |
//! | `kernel` | adding up memory of several ranks |

mod addends;
pub mod all_gather;
mod all_reduce;
mod all_to_all;
mod barrier;
mod broadcast;
pub mod bucket;
mod gather;
pub mod hierarchical;
pub mod host;
mod kernel;
pub mod launch;
mod partition;
mod peers;
mod pieces;
mod read;
mod reduce;
mod reduce_in_place;
mod reduce_scatter;
mod scatter;

pub use peers::Peers;
