//! What the examples share: arguments, real data sets, progress, and options.

pub mod arguments;
pub mod cifar10;
pub mod fashion;
pub mod idx;
pub mod images;
pub mod options;
pub mod progress;
pub mod views;
