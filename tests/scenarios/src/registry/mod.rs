//! Scenarios: what each rank of a job does, the jobs in which it is tested, and what the test
//! expects of them.
//!
//! To add one, write a function and a line:
//!
//! 1. `fn name(group: &ProcessGroup) -> Result<()>` in a file of this crate, or of
//!    `tests/src/bin/ddp_worker` if it needs libtorch. It fails where something is wrong.
//! 2. `scenario("what_holds", name, &[launched(3), by_hand(&[1, 2])])` in that file's `SCENARIOS`.
//!
//! Each job is a test; a job that is `.shared()` is one test for all scenarios of the file that need
//! it. It passes if all ranks end well. Where ranks are to be killed, or to fail,
//! `.checked_by(function)` gives the test's own part: it starts the job, kills, and reads what the
//! ranks say.
//!
//! `worker FILE::NAME` is one rank; `worker --test` runs the tests, with the options of any Rust
//! test (a part of a name, `--list`). `cargo test --release -p flow-scenarios NAME` builds first.

mod job;
mod scenario;
mod test;
mod trials;
mod worker;

pub use job::{Job, by_hand, in_process, launched, machines, mpirun};
pub use scenario::{File, RankFn, Scenario, process, scenario};
pub use test::{Test, lines, signal};
pub use worker::main;
