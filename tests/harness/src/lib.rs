//! The harness of all multi-process tests. It needs no libtorch, so that flow-launch and flow-comm
//! are tested without.
//!
//! - [`Process`]: a process whose output is collected; [`Finished`]: how it ended.
//! - [`launch`], [`ranks`], [`ranks_on_nodes`]: jobs of the workspace's programs, which are built
//!   first where they are older than their sources.
//! - [`runs_apart`]: a test in a process of its own; [`once_in_a_run`]: work for all processes of tests.
//! - [`cli`]: flow-launch itself, with shell scripts as workers.
//! - [`executable`]: programs and scripts that a test writes.
//! - [`net`]: several machines.
//! - [`python`]: the interpreter, its modules, and flow-launch's wheel.

mod apart;
pub mod cli;
mod ending;
mod executable;
mod job;
pub mod net;
mod once;
mod port;
mod process;
pub mod python;

use std::path::Path;
use std::time::Duration;

pub use apart::runs_apart;
pub use executable::executable;
pub use job::{
    build, job, launch, launcher, program, rank, rank_commands, ranks, ranks_on_nodes, run_tests_of,
};
pub use once::once_in_a_run;
pub use port::{free_port, is_free_port};
pub use process::{Finished, Process, assert_contains};

/// The longest that a job of a test may take before it counts as stuck.
pub const TEST_TIMEOUT: Duration = Duration::from_secs(300);

/// How soon ranks must have noticed a failure: long enough for a loaded machine, far less than the
/// groups' own timeout of half an hour.
pub const DETECTION_LIMIT: Duration = Duration::from_secs(30);

/// The top of the checkout.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("it lies in tests/harness")
}

/// Raises this process's limit on open files as far as it may, for what makes many connections.
/// Returns the limit.
pub fn raise_file_limit() -> u64 {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit).expect("a process may raise its limit to the maximum");
    limit.maximum.unwrap_or(u64::MAX)
}
