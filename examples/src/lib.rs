//! What the examples share: reading real data sets.

pub mod fashion;
pub mod idx;
