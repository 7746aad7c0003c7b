//! Sharded checkpoints: each rank saves its own parts of tensors, and reads what it needs under any
//! other placement and SBP.

pub mod index;
