//! Collectives on `tch` tensors: blocking, asynchronous and differentiable, on CPUs and GPUs.
//!
//! | here | in `torch.distributed` |
//! |---|---|
//! | [`TensorCollectives::all_reduce_tensor`], `reduce_` | `all_reduce`, `reduce` |
//! | [`TensorCollectives::broadcast_tensor`] | `broadcast` |
//! | [`TensorCollectives::all_gather_tensor`] | `all_gather` |
//! | [`TensorCollectives::all_gather_into_tensor`] | the same |
//! | [`TensorCollectives::reduce_scatter_tensor`] | `reduce_scatter_tensor` |
//! | [`TensorCollectives::all_to_all_tensor`] | `all_to_all_single` |
//! | `all_gather_v_`, `reduce_scatter_v_`, `all_to_all_v_` | the same with uneven sizes |
//! | [`TensorCollectives::gather_tensor`], `scatter_` | `gather`, `scatter` |
//! | [`TensorCollectives::send_tensor`], `recv_` | `send`, `recv` |
//! | [`TensorCollectives::batch_send_recv_tensors`], [`P2pOp`] | `batch_isend_irecv`, `P2POp` |
//! | the same with `_async`, and [`Work`] | `async_op=True`, `isend`, `irecv`, and `Work` |
//! | [`ProcessGroup::barrier`] | `barrier` |
//! | [`functional`] | `torch.distributed.nn.functional` |
//! | [`sync_batch_norm`] | the `forward` of `torch.nn.SyncBatchNorm` |
//! | [`TensorCollectives::all_reduce_coalesced`] | `all_reduce_coalesced` |
//! | [`CoalescedBroadcast`] | `_broadcast_coalesced` |
//! | [`TensorCollectives::use_device`] | `torch.cuda.set_device(local_rank)` |
//! | [`ArenaAllocatorGuard`] | none: CPU tensors that collectives need not copy |
//!
//! ```no_run
//! # fn main() -> anyhow::Result<()> {
//! use flow_tensor::{functional, ProcessGroup, ReduceOp, TensorCollectives};
//! use tch::{Device, Kind, Tensor};
//!
//! let group = ProcessGroup::from_env()?;
//! let mut x = Tensor::ones([2, 3], (Kind::Float, Device::Cpu));
//! group.all_reduce_tensor(&mut x, ReduceOp::Sum)?;
//!
//! let gathering = group.all_gather_tensor_async(x.shallow_clone())?;
//! // ... other work ...
//! let all = gathering.wait()?; // [ranks, 2, 3]
//!
//! let w = all.set_requires_grad(true);
//! let mine = functional::reduce_scatter(&group, &w, ReduceOp::Sum)?;
//! mine.sum(Kind::Float).backward(); // w.grad(), by an all-gather
//! # Ok(()) }
//! ```

mod allocator;
mod batch;
mod coalesced;
mod collectives;
mod device;
mod error;
pub mod functional;
mod nonblocking;
mod operation;
mod prepared;
mod rows;
mod sync_batch_norm;
mod tensors;

pub use allocator::ArenaAllocatorGuard;
pub use coalesced::CoalescedBroadcast;
pub use collectives::TensorCollectives;
pub use device::DeviceKind;
pub use error::{Error, Result};
pub use flow_autograd::BatchNorm;
pub use flow_comm::{P2pOp, ProcessGroup, ReduceOp};
pub use nonblocking::Work;
pub use sync_batch_norm::sync_batch_norm;
pub use tensors::{HostTensor, OVERLAPS, cuda_group, cuda_tensor, current_stream, overlaps};
