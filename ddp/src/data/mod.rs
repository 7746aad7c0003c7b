//! Which samples each rank sees, and batches of them.

pub(crate) mod batch_sampler;
pub(crate) mod batches;
pub(crate) mod iterable;
pub(crate) mod length_grouped;
pub(crate) mod loader;
pub(crate) mod loader_error;
pub(crate) mod max_tokens;
pub(crate) mod on_device;
pub(crate) mod order;
mod permutation;
mod position;
pub(crate) mod sampler;
pub(crate) mod sampler_state;
pub(crate) mod shuffle;
pub(crate) mod token_file;
pub(crate) mod weighted;
