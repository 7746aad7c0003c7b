//! What data-parallel training needs of libtorch and `tch` does not have.
//!
//! | to | call |
//! |---|---|
//! | be told, inside `backward`, that a parameter's gradient is final | [`GradHook::install`] |
//! | run something when `backward` is otherwise done | [`at_end_of_backward`] |
//! | know whether a backward comes to a tensor, or can no longer | [`on_backward`] |
//! | know whether a gradient's memory is nobody else's, and replace it | [`owns_grad`], [`set_grad`] |
//! | know whether anybody else has a tensor | [`use_count`] |
//! | read and write a tensor's memory | [`bytes`], [`bytes_mut`], [`data_ptr`] |
//! | know whether a tensor has elements that can be sent | [`unsendable`] |
//! | tell whether two handles are of one tensor | [`identity`] |
//! | make a tensor of given memory | [`tensor_in`], [`tensor_over`] |
//! | give libtorch's large tensors other memory | [`set_cpu_allocator`] |
//! | keep an optimizer's state in a checkpoint | [`OptimizerState`] |
//! | compute on GPUs, and hand tensors and streams to NCCL and CUDA | [`load_cuda`], [`CudaTensor`], [`current_stream`] |
//!
//! Errors and panics of hooks and callbacks come out of `backward` as errors: `Tensor::f_backward`
//! returns them, and `Tensor::backward` panics with their text, as with any error of libtorch.
//!
//! This is the only crate with C++ in it (`shim.cpp`).

mod allocator;
mod cuda;
mod error;
mod ffi;
mod hook;
mod memory;
mod optimizer;

pub use allocator::{set_cpu_allocator, Block, BlockAllocator};
pub use cuda::{current_stream, load_cuda, tensor_on, torch_device, CudaTensor};
pub use error::Error;
pub use hook::{at_end_of_backward, on_backward, owns_grad, BoxError, GradHook};
pub use memory::{
    bytes, bytes_mut, data_ptr, dtype, identity, set_grad, tensor_in, tensor_over, unsendable,
    use_count,
};
pub use optimizer::OptimizerState;
