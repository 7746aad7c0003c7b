//! Workers' output and the launcher's own: from pipes to the console and to files.

pub mod lines;
pub mod log_file;
pub mod log_files;
pub mod pty;
pub mod routing;
mod screen;
pub mod sink;
pub mod tee;
pub mod terminal;
