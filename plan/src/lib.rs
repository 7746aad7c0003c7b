//! How a job is spread over its ranks, as pure functions: no process, no tensor, no I/O.
//!
//! [`schedule`] says what each rank of a pipeline does, and when.

pub mod schedule;
