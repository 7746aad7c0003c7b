//! A worker program: one rank of a scenario, several on threads, or the tests.

use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use flow_comm::ProcessGroup;

use super::job::IN_PROCESS;
use super::scenario::{File, RankFn, Run, Scenario};
use super::trials;

type Around = fn(&ProcessGroup, RankFn) -> Result<()>;

/// The main function of a worker program with these files of scenarios. `around` calls what a rank
/// does.
pub fn main(files: &'static [File], around: Around) -> Result<ExitCode> {
    let mut arguments = std::env::args().skip(1);
    let wanted = arguments.next().context("usage: worker FILE::NAME | --test [OPTIONS]")?;
    if wanted == "--test" {
        return Ok(trials::run(files));
    }
    let rank = std::process::id();
    let chosen = chosen(files, &wanted);
    if chosen.is_empty() {
        bail!("there is no scenario {wanted}: --test --list prints all");
    }
    for (name, scenario) in chosen {
        if name != wanted {
            eprintln!("{name}");
        }
        run(&name, scenario, around)?;
        // A process that the scenario has forked ends here too, and is no rank.
        if std::process::id() != rank {
            return Ok(ExitCode::SUCCESS);
        }
    }
    println!("{wanted} passed");
    Ok(ExitCode::SUCCESS)
}

/// The scenario of this name, or all that share the job of this name.
fn chosen(files: &'static [File], wanted: &str) -> Vec<(String, &'static Scenario)> {
    let mut chosen = Vec::new();
    for (file, scenarios) in files {
        for scenario in *scenarios {
            let name = format!("{file}::{}", scenario.name);
            let mut shared = scenario.jobs.iter().filter(|job| scenario.shares(job));
            if name == wanted || shared.any(|job| job.name_in(file) == wanted) {
                chosen.push((name, scenario));
            }
        }
    }
    chosen
}

fn run(name: &str, scenario: &Scenario, around: Around) -> Result<()> {
    let run = match scenario.run {
        Run::Process(run) => return run().with_context(|| name.to_owned()),
        Run::Rank(run) => run,
    };
    let run = |group: ProcessGroup| {
        around(&group, run).with_context(|| format!("{name}, rank {}", group.rank()))
    };
    match std::env::var(IN_PROCESS) {
        Ok(ranks) => on_threads(ProcessGroup::in_process(ranks.parse()?)?, run),
        Err(_) => run(ProcessGroup::from_env()?),
    }
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
