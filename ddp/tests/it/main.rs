//! Samplers, loaders and checkpoints of one process.

mod checkpoint;
mod loader;
mod sampler;
