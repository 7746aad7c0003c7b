//! What flow-autograd adds to libtorch.

mod common;
mod end_of_backward;
mod function;
mod graph;
mod hooks;
mod memory;
mod optimizer;
mod recompute;
