//! Samplers, loaders and checkpoints of one process.

mod checkpoint;
mod draws;
mod grad_scaler;
mod iterable;
mod loader;
mod own_orders;
mod sampler;
mod tokens;
