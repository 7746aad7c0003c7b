//! Messages about a job for its user, and events for programs.

pub mod error_file;
pub mod events;
pub mod failure;
pub mod text;
