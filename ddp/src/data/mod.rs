//! Which samples each rank sees, and batches of them.

pub(crate) mod loader;
mod permutation;
pub(crate) mod sampler;
