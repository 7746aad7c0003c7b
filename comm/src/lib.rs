//! Process groups and collectives for training on many processes, without libtorch: memory and
//! types only.
//!
//! | here | in torch.distributed |
//! |---|---|
//! | [`ProcessGroup::from_env`] | `init_process_group(init_method="env://")` |
//! | [`ProcessGroup::new_group`] | `new_group` |
//! | [`ProcessGroup::split`] | `MPI_Comm_split` |
//! | [`ProcessGroup::reconfigure`] | `reconfigure` of a back-end, since PyTorch 2.14 |
//! | [`Mesh`] | `DeviceMesh` |
//! | [`ProcessGroup::new_group_of`] | `new_group(use_local_synchronization=True)` |
//! | [`ProcessGroup::all_reduce`] and the other collectives | functions of the same names |
//! | [`ProcessGroup::start`], [`Work::wait`] | `async_op=True`, `Work.wait` |
//! | [`ProcessGroup::batch_send_recv`], [`P2pOp`] | `batch_isend_irecv`, `P2POp` |
//! | [`Member::flight_recorder`] | the flight recorder of `ProcessGroupNCCL` |
//! | [`ProcessGroup::in_process`] | the threaded process group of its own tests |
//! | [`Member::alloc_shared`] | none: memory that collectives use in place |
//! | [`ProcessGroup::alloc_on_machine`] | none: memory that the ranks of a machine have in common |
//! | [`ProcessGroup::barrier_on_machine`] | none: a barrier of the ranks of each machine |
//! | [`nccl::CudaGroup`] | `ProcessGroupNCCL` |
//! | [`store::Store`] | `TCPStore` |
//!
//! ```
//! use flow_comm::{ProcessGroup, ReduceOp};
//!
//! let group = ProcessGroup::from_env()?; // alone: a group of one
//! let mut sum = [group.rank() as f32 + 1.0];
//! group.all_reduce(&mut sum, ReduceOp::Sum)?;
//! # assert_eq!(sum, [1.0]);
//! # Ok::<(), flow_comm::Error>(())
//! ```
//!
//! Groups work over shared memory on one machine, and over TCP between machines; see
//! [`ProcessGroup`]. On GPUs they work over NCCL; see [`ProcessGroup::use_cuda`] and
//! [`nccl::CudaGroup`].

mod arguments;
mod background;
mod bootstrap;
mod bucket_name;
mod buffer;
mod collectives;
mod descriptor;
pub mod env;
mod error;
mod failure;
mod group;
mod internode;
mod interrupt;
mod json;
mod kind;
mod label;
mod liveness;
mod memory;
pub mod nccl;
mod operation_context;
mod p2p;
mod peer_info;
mod reconfigure;
mod settings;
mod shm;
mod stall;
pub mod trace;
mod transport;
mod virtual_ranks;
mod work;
mod world;

pub use background::Background;
pub use bucket_name::JOIN_NOTICE;
pub use buffer::{Buffer, SharedBuffer};
pub use collectives::Peers;
pub use error::{Error, Result};
pub use flow_kernels::{DType, Element, ReduceOp, bf16, digest, f16};
pub use flow_store as store;
pub use flow_store::fork::ForkSafe;
pub use group::{ArenaHandle, Axis, DEFAULT_TIMEOUT, Lane, Member, Mesh, ProcessGroup};
pub use interrupt::set_interrupt_check;
pub use label::Label;
pub use p2p::P2pOp;
pub use shm::arena::{Arena, Block};
pub use shm::machine_buffer::{MachineBuffer, MachinePart, WeakMachineBuffer};
pub use shm::mapped_file::MappedFile;
pub use shm::segments::Segments;
pub use virtual_ranks::VirtualRanks;
pub use work::{Work, Worker};
