//! What the examples share: reading arguments and real data sets.

pub mod arguments;
pub mod fashion;
pub mod idx;
