//! What the examples share: arguments, a real data set, progress, and the options of `mnist`.

pub mod arguments;
pub mod fashion;
pub mod idx;
pub mod images;
pub mod options;
pub mod progress;
