//! Shared by the examples: the frame of a program, data sets, progress, and options.

pub mod arguments;
pub mod cifar10;
pub mod fashion;
pub mod gpt_block;
pub mod idx;
pub mod images;
pub mod lenet;
pub mod options;
pub mod program;
pub mod progress;
pub mod text;
#[cfg(feature = "parallel")]
pub mod views;
