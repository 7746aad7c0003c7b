//! Pipeline schedules: the actions of each rank on the stages of a model, in order.
//!
//! A [`Schedule`] is data. An executor does each rank's [`Schedule::actions`] one after another. Sends
//! do not wait for their receivers. From one rank to another, receives come in the order of their
//! sends, so that an executor needs no tags. [`simulate`] returns when ranks compute what, how long
//! they are idle, and how many activations they hold.

mod action;
mod check;
mod communication;
mod constructors;
mod definition;
mod done;
mod error;
mod kind;
mod one_f_one_b;
mod picture;
mod simulator;
mod zero_bubble;

pub use action::Action;
pub use definition::Schedule;
pub use error::{Result, ScheduleError};
pub use kind::ScheduleKind;
pub use picture::{picture, table};
pub use simulator::{Costs, Interval, Timeline, simulate, simulate_stages};

#[cfg(test)]
mod tests;
