//! Parts of libtorch that data-parallel training needs and `tch` does not have.
//!
//! | to | call |
//! |---|---|
//! | run code inside `backward` when a parameter's gradient is final | [`GradHook::install`] |
//! | run something when `backward` is otherwise done | [`at_end_of_backward`] |
//! | add a differentiable operation whose forward and backward are Rust | [`custom_function`] |
//! | run code when a backward reaches an operation | [`on_backward`] |
//! | change the gradient that comes back to a tensor | [`map_gradient`] |
//! | run the backward of several tensors, as a whole or in two halves | [`Graph`] |
//! | compute activations anew in backward instead of keeping them | [`recompute`] |
//! | have operations take other tensors in place of some | [`Replacements`] |
//! | count the bytes that a forward keeps | [`allocated_by`] |
//! | draw the same random numbers again | [`RngState`], [`with_rng_state`], [`with_seed`] |
//! | check that a gradient is not shared, and replace it | [`grad_is_exclusive`], [`set_grad`] |
//! | count the handles to a tensor | [`use_count`] |
//! | say that a tensor has been changed | [`bump_version`] |
//! | read and write a tensor's memory | [`bytes`], [`bytes_mut`], [`data_ptr`] |
//! | check that a tensor's elements can be sent | [`unsendable`] |
//! | compare the identity of two handles | [`identity`] |
//! | make a tensor of given memory | [`tensor_from_memory`], [`tensor_from_raw`] |
//! | give libtorch's large tensors other memory | [`set_cpu_allocator`] |
//! | compute a layer's batch norm in training another way | [`replace_batch_norm`] |
//! | keep an optimizer's state in a checkpoint | [`OptimizerState`] |
//! | have tensors whose operations are carried out in Rust | [`global`] |
//! | compute on GPUs | [`load_cuda`], [`CudaTensor`], [`current_stream`] |
//!
//! Errors and panics of hooks and callbacks come out of `backward` as errors: `Tensor::f_backward`
//! returns them, and `Tensor::backward` panics with their text, as with any error of libtorch.
//!
//! This is the only crate with C++ in it (`src/shim`).

mod allocated;
mod allocator;
mod batch_norm;
mod cuda;
mod error;
mod ffi;
mod function;
pub mod global;
mod gradient;
mod graph;
mod hook;
mod memory;
mod optimizer;
mod random;
mod recompute;
mod replace;
mod transient;

pub use allocated::allocated_by;
pub use allocator::{Block, BlockAllocator, set_cpu_allocator};
pub use batch_norm::{BatchNorm, batch_norm_sums, replace_batch_norm, replaces_batch_norm};
pub use cuda::{CudaTensor, current_stream, load_cuda, tensor_from_device_memory, torch_device};
pub use error::{BoxError, Error};
pub use function::{Forward, custom_function, grad_enabled};
pub use gradient::map_gradient;
pub use graph::{Graph, WeightGraph};
pub use hook::{GradHook, at_end_of_backward, grad_is_exclusive, on_backward};
pub use memory::{
    bump_version, bytes, bytes_mut, data_ptr, dtype, identity, resolved, set_grad,
    tensor_from_memory, tensor_from_raw, unsendable, use_count,
};
pub use optimizer::{OptimizerState, SavedState, StateDict, StatePart, StateParts};
pub use random::{RngState, with_rng_state, with_seed};
pub use recompute::{recompute, versions};
pub use replace::Replacements;
pub use transient::TransientMemory;
