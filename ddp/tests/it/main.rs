//! Samplers, loaders and checkpoints of one process.

mod checkpoint;
mod draws;
mod iterable;
mod loader;
mod sampler;
mod tokens;
