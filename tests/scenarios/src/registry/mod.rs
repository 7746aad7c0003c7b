//! Scenarios: what each rank of a job does, the jobs in which it is tested, and what the test
//! expects of them.
//!
//! To add one, write a function and a line:
//!
//! 1. `fn name(group: &ProcessGroup) -> Result<()>` in a file of this crate, or of
//!    `tests/src/bin/ddp_worker` if it needs libtorch. It fails where something is wrong.
//! 2. `scenario("what_holds", name, &[launched(3), by_hand(&[1, 2])])` in that file's `SCENARIOS`.
//!
//! Each job is a test. It passes if all ranks end well. Where ranks are to be killed, or to fail,
//! `.checked_by(function)` gives the test's own part: it starts the job, kills, and reads what the
//! ranks say.
//!
//! `worker FILE::NAME` is one rank; `worker --test` runs the tests, with the options of any Rust
//! test (a part of a name, `--list`). `cargo test --release -p flow-scenarios NAME` builds first.

mod job;
mod test;

use std::process::ExitCode;

use anyhow::{bail, Context, Result};
use flow_comm::ProcessGroup;

pub use job::{by_hand, in_process, launched, machines, mpirun, Job};
pub use test::{lines, signal, Test};

/// What a rank does with its group.
pub type RankFn = fn(&ProcessGroup) -> Result<()>;

/// A file's name, and its scenarios.
pub type File = (&'static str, &'static [Scenario]);

/// What the ranks of a job do.
pub struct Scenario {
    name: &'static str,
    run: Run,
    jobs: &'static [Job],
    check: fn(&Test),
}

#[derive(Clone, Copy)]
enum Run {
    Rank(RankFn),
    Process(fn() -> Result<()>),
}

/// A scenario named `name`: each rank calls `run`, in each of `jobs`.
pub const fn scenario(name: &'static str, run: RankFn, jobs: &'static [Job]) -> Scenario {
    Scenario { name, run: Run::Rank(run), jobs, check: Test::passes }
}

/// A scenario whose processes make their groups themselves, or none.
pub const fn process(
    name: &'static str,
    run: fn() -> Result<()>,
    jobs: &'static [Job],
) -> Scenario {
    Scenario { name, run: Run::Process(run), jobs, check: Test::passes }
}

impl Scenario {
    /// The test starts the job and decides whether it passes.
    pub const fn checked_by(self, check: fn(&Test)) -> Self {
        Self { check, ..self }
    }
}

/// The main function of a worker program with these files of scenarios. `around` calls what a rank
/// does.
pub fn main(files: &[File], around: fn(&ProcessGroup, RankFn) -> Result<()>) -> Result<ExitCode> {
    let mut arguments = std::env::args().skip(1);
    let wanted = arguments.next().context("usage: worker FILE::NAME | --test [OPTIONS]")?;
    if wanted == "--test" {
        return Ok(test::run(files));
    }
    let mut scenarios = files.iter().flat_map(|(file, scenarios)| {
        scenarios.iter().map(move |scenario| (format!("{file}::{}", scenario.name), scenario))
    });
    let Some((name, scenario)) = scenarios.find(|(name, _)| *name == wanted) else {
        bail!("there is no scenario {wanted}: --test --list prints all");
    };
    let rank = std::process::id();
    match scenario.run {
        Run::Process(run) => run().context(name.clone())?,
        Run::Rank(run) => {
            let run = |group: ProcessGroup| {
                around(&group, run).with_context(|| format!("{name}, rank {}", group.rank()))
            };
            match std::env::var(job::IN_PROCESS) {
                Ok(ranks) => on_threads(ProcessGroup::in_process(ranks.parse()?)?, run)?,
                Err(_) => run(ProcessGroup::from_env()?)?,
            }
        }
    }
    // A process that the scenario has forked ends here too, and is no rank.
    if std::process::id() == rank {
        println!("{name} passed");
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs each rank on a thread.
fn on_threads(
    groups: Vec<ProcessGroup>,
    run: impl Fn(ProcessGroup) -> Result<()> + Sync,
) -> Result<()> {
    std::thread::scope(|scope| {
        let run = &run;
        let ranks = groups.into_iter().map(|group| scope.spawn(move || run(group)));
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().try_for_each(|rank| rank.join().expect("no rank panics"))
    })
}
