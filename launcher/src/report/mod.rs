//! What is said about a job: to its user, and to programs.

pub mod error_file;
pub mod events;
pub mod failure;
pub mod text;
