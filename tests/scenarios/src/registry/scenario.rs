//! Scenarios, as files of them write them.

use anyhow::Result;
use flow_comm::ProcessGroup;

use super::job::Job;
use super::test::Test;

/// What a rank does with its group.
pub type RankFn = fn(&ProcessGroup) -> Result<()>;

/// A file's name, and its scenarios.
pub type File = (&'static str, &'static [Scenario]);

/// What the ranks of a job do.
pub struct Scenario {
    pub(super) name: &'static str,
    pub(super) run: Run,
    pub(super) jobs: &'static [Job],
    /// None: the job is to end well.
    pub(super) check: Option<fn(&Test)>,
}

#[derive(Clone, Copy)]
pub(super) enum Run {
    Rank(RankFn),
    Process(fn() -> Result<()>),
}

/// A scenario named `name`: each rank calls `run`, in each of `jobs`.
pub const fn scenario(name: &'static str, run: RankFn, jobs: &'static [Job]) -> Scenario {
    Scenario { name, run: Run::Rank(run), jobs, check: None }
}

/// A scenario whose processes make their groups themselves, or none.
pub const fn process(
    name: &'static str,
    run: fn() -> Result<()>,
    jobs: &'static [Job],
) -> Scenario {
    Scenario { name, run: Run::Process(run), jobs, check: None }
}

impl Scenario {
    /// The test starts the job and decides whether it passes.
    pub const fn checked_by(self, check: fn(&Test)) -> Self {
        Self { check: Some(check), ..self }
    }

    /// Whether it runs in such a job beside others.
    pub(super) fn shares(&self, job: &Job) -> bool {
        job.shared && self.check.is_none() && matches!(self.run, Run::Rank(_))
    }
}
