//! What the examples share: reading arguments and real data sets, and checkpoints.

pub mod arguments;
pub mod checkpoint;
pub mod fashion;
pub mod idx;
