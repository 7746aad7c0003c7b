//! Workers' output and the launcher's own: from pipes to the console and to files.
//!
//! | file | subject |
//! |---|---|
//! | `lines.rs` | a stream -> segments (pure) |
//! | `queue.rs` | segments of many streams -> one output (pure) |
//! | `screen.rs` | incomplete lines on a terminal (pure) |
//! | `footer.rs` | lines at the foot of a terminal, above which output scrolls (pure) |
//! | `routing.rs` | where each stream goes (pure) |
//! | `tee.rs`, `log_file.rs`, `log_files.rs` | copying a stream there; the files |
//! | `sink.rs` | writing to standard output and standard error without blocking |
//! | `remainder.rs` | what detached processes write after the job's end |
//! | `pty.rs`, `terminal.rs` | a terminal for rank 0; the modes of the user's terminal |

pub mod footer;
pub mod lines;
pub mod log_file;
pub mod log_files;
pub mod pty;
pub mod queue;
pub mod remainder;
pub mod routing;
mod screen;
pub mod sink;
pub mod tee;
pub mod terminal;
