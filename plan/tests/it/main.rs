//! Predictions, and the program `flow-plan`.

mod page;
mod program;
mod properties;
mod values;
