//! Predicts layouts and pipeline schedules of training jobs. All functions are pure: no process, no
//! tensor, no I/O.
//!
//! [`schedule`] says what each rank of a pipeline does, and when. The other modules are the planner.
//! A [`Task`] is a model, a cluster and a batch. [`predict`] returns the time and memory of a
//! [`Layout`] of a task, and [`search`] finds the fastest layouts. The program `flow-plan` prints what
//! these functions return.

pub mod activations;
pub mod bubble;
mod cluster;
mod cost;
mod data_parallel;
mod error;
mod layout;
mod memory;
mod model;
mod prediction;
mod runs;
pub mod schedule;
mod search;
mod split;
mod task;
mod training;

pub use cluster::{Cluster, Efficiency, Link};
pub use error::{Error, Result};
pub use layout::{Constraints, Layout, Recompute};
pub use memory::Memory;
pub use model::{Layer, Model, Transformer};
pub use prediction::{Limit, Part, Prediction, Time, Traffic, predict};
pub use runs::{Comparison, Measured, compare};
pub use schedule::ScheduleKind;
pub use search::{SearchResult, search};
pub use split::split;
pub use task::Task;
pub use training::{Gathering, Training};
