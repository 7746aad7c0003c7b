//! Scenarios: what each rank of a job does and checks, and the jobs in which the tests run it.
//!
//! To add one, write a function and a line:
//!
//! 1. `fn name(group: &ProcessGroup) -> Result<()>` in a file of `src/bin/worker`, or of
//!    `src/bin/ddp_worker` if it needs libtorch. It fails where something is not as it must be.
//! 2. `scenario("what_holds", name, &[launched(3), by_hand(&[1, 2])])` in that file's `SCENARIOS`.
//!
//! `cargo test --release -p flow-tests --test scenarios what_holds` then runs a test for each job.
//! A scenario without jobs is for tests that take part, and kill ranks for instance: they start
//! `worker file::name`. `worker --list` prints all scenarios and jobs.

use anyhow::{bail, Context, Result};
use flow_comm::ProcessGroup;
use serde_json::{json, Value};

/// What each rank does.
pub type Run = fn(&ProcessGroup) -> Result<()>;

/// What the ranks of a job do.
pub struct Scenario {
    name: &'static str,
    run: Run,
    jobs: &'static [Job],
}

/// A scenario named `name`: each rank calls `run`, in each of `jobs`.
pub const fn scenario(name: &'static str, run: Run, jobs: &'static [Job]) -> Scenario {
    Scenario { name, run, jobs }
}

/// One way to start a scenario.
#[derive(Clone, Copy)]
pub struct Job {
    /// The number of ranks on each node.
    nodes: &'static [usize],
    launched: Option<usize>,
    /// A name and an environment variable with its value.
    mode: Option<(&'static str, &'static str, &'static str)>,
    fake_cuda: bool,
}

/// So many ranks under flow-launch, on one node.
pub const fn launched(ranks: usize) -> Job {
    Job { nodes: &[], launched: Some(ranks), mode: None, fake_cuda: false }
}

/// So many ranks on each node, started without flow-launch: rank 0 serves the rendezvous. All nodes
/// are this machine.
pub const fn by_hand(nodes: &'static [usize]) -> Job {
    Job { nodes, launched: None, mode: None, fake_cuda: false }
}

impl Job {
    /// In the mode `name`, which this environment variable sets.
    pub const fn mode(
        self,
        name: &'static str,
        variable: &'static str,
        value: &'static str,
    ) -> Self {
        Self { mode: Some((name, variable, value)), ..self }
    }

    /// On the fake CUDA and NCCL instead of the CPU.
    pub const fn on_fake_cuda(self) -> Self {
        Self { fake_cuda: true, ..self }
    }

    fn title(&self) -> String {
        let ranks = |count: usize| format!("{count} rank{}", if count == 1 { "" } else { "s" });
        let mut title = match (self.launched, self.nodes) {
            (Some(count), _) => ranks(count),
            (None, [count]) => format!("{} by hand", ranks(*count)),
            (None, nodes) => {
                let nodes: Vec<String> = nodes.iter().map(usize::to_string).collect();
                format!("nodes of {}", nodes.join("+"))
            }
        };
        if let Some((name, ..)) = self.mode {
            title = format!("{title}, {name}");
        }
        if self.fake_cuda {
            title.push_str(", fake CUDA");
        }
        title
    }
}

/// The main function of a worker program with these files of scenarios: runs the one that the first
/// argument names, by way of `around`, and prints `NAME passed`; or lists all for `--list`.
pub fn work(
    files: &[(&str, &[Scenario])],
    around: fn(&ProcessGroup, Run) -> Result<()>,
) -> Result<()> {
    let wanted = std::env::args().nth(1).context("usage: worker FILE::NAME | --list")?;
    let scenarios = files.iter().flat_map(|(file, scenarios)| {
        scenarios.iter().map(move |scenario| (format!("{file}::{}", scenario.name), scenario))
    });
    if wanted == "--list" {
        scenarios.for_each(|(name, scenario)| println!("{}", listed(&name, scenario)));
        return Ok(());
    }
    let mut scenarios = scenarios;
    let Some((name, scenario)) = scenarios.find(|(name, _)| *name == wanted) else {
        bail!("there is no scenario {wanted}: --list prints all");
    };
    let rank = std::process::id();
    let group = ProcessGroup::from_env()?;
    around(&group, scenario.run).with_context(|| format!("{name}, rank {}", group.rank()))?;
    // A process that the scenario has forked ends here too, and is no rank.
    if std::process::id() == rank {
        println!("{name} passed");
    }
    Ok(())
}

fn listed(name: &str, scenario: &Scenario) -> Value {
    let job = |job: &Job| {
        json!({
            "title": job.title(),
            "launched": job.launched,
            "nodes": job.nodes,
            "variable": job.mode.map(|(_, variable, value)| [variable, value]),
            "fake_cuda": job.fake_cuda,
        })
    };
    json!({ "name": name, "jobs": scenario.jobs.iter().map(job).collect::<Vec<_>>() })
}
