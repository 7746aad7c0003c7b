//! A worker program: one rank of a scenario, several on threads, or the tests.

use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use flow_comm::ProcessGroup;

use super::job::IN_PROCESS;
use super::scenario::{File, RankFn, Run};
use super::trials;

/// The main function of a worker program with these files of scenarios. `around` calls what a rank
/// does.
pub fn main(files: &[File], around: fn(&ProcessGroup, RankFn) -> Result<()>) -> Result<ExitCode> {
    let mut arguments = std::env::args().skip(1);
    let wanted = arguments.next().context("usage: worker FILE::NAME | --test [OPTIONS]")?;
    if wanted == "--test" {
        return Ok(trials::run(files));
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
            match std::env::var(IN_PROCESS) {
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
