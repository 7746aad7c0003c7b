//! `flow-plan`: predicts step time and memory of the layouts of a training job.

mod cli;
mod explain;
mod table;

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::Parser;
use flow_plan::schedule::{self, Schedule};
use flow_plan::{Task, compare, search};

use cli::{Cli, Command, CompareArgs, ScheduleArgs, SearchArgs};

fn main() -> ExitCode {
    let cli = parse();
    let output = match &cli.command {
        Some(Command::Compare(args)) => compare_output(args),
        Some(Command::Schedule(args)) => schedule_output(args),
        None => search_output(&cli.search),
    };
    match output {
        Ok(text) => match std::io::stdout().write_all(text.as_bytes()) {
            Ok(()) => ExitCode::SUCCESS,
            // The reader has closed the pipe, as `head` does.
            Err(_) => ExitCode::FAILURE,
        },
        Err(error) => {
            eprintln!("flow-plan: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Parses the arguments. Help and version go to stdout. A wrong argument is one line on stderr and
/// exit code 2.
fn parse() -> Cli {
    Cli::try_parse().unwrap_or_else(|error| {
        if !error.use_stderr() {
            error.exit();
        }
        let text = error.to_string();
        let lines: Vec<&str> = text
            .lines()
            .map(str::trim)
            .take_while(|line| !line.starts_with("Usage:"))
            .take_while(|line| !line.starts_with("For more information"))
            .filter(|line| !line.is_empty())
            .collect();
        eprintln!("flow-plan: {}", lines.join(" ").trim_start_matches("error: "));
        std::process::exit(2)
    })
}

fn search_output(args: &SearchArgs) -> anyhow::Result<String> {
    let (Some(model), Some(ranks)) = (&args.model, args.ranks) else {
        bail!("give MODEL.json and --ranks N");
    };
    let text = read(model)?;
    let cluster = read_some(args.cluster.as_deref())?;
    let task = Task::from_json(&text, cluster.as_deref())
        .with_context(|| files(model, args.cluster.as_deref()))?;
    let found = search(&task, ranks, &args.layout.wanted(), args.top)?;
    if found.best.is_empty() {
        bail!(
            "none of the {} layouts fits in {} a rank; the smallest needs {}: {}",
            found.tried,
            table::bytes(task.cluster.memory),
            table::bytes(found.smallest.memory.total),
            found.smallest.layout
        );
    }
    if args.json {
        return Ok(serde_json::to_string_pretty(&found.best)? + "\n");
    }
    let mut text = table::layouts(&found);
    if args.explain {
        for prediction in &found.best {
            text += "\n";
            text += &explain::prediction(prediction, &task.cluster);
        }
    }
    Ok(text)
}

fn compare_output(args: &CompareArgs) -> anyhow::Result<String> {
    let runs = read(&args.runs)?;
    let cluster = read_some(args.cluster.as_deref())?;
    let (source, comparisons) = compare(&runs, cluster.as_deref())
        .with_context(|| files(&args.runs, args.cluster.as_deref()))?;
    if args.json {
        return Ok(serde_json::to_string_pretty(&comparisons)? + "\n");
    }
    Ok(table::comparisons(&source, &comparisons))
}

fn schedule_output(args: &ScheduleArgs) -> anyhow::Result<String> {
    let ScheduleArgs { pp, micro_batches, chunks, .. } = *args;
    let mut costs = schedule::Costs {
        forward: args.forward,
        backward_input: args.backward_input,
        backward_weight: args.backward_weight,
        send: args.send,
    };
    let Some(kind) = args.schedule else {
        return Ok(schedule::table(pp, chunks, micro_batches, &costs)?);
    };
    let named = Schedule::named(kind.name(), pp, chunks, micro_batches)?;
    // The arguments are the times of a rank: each of its stages takes a part of them.
    let stages = (named.stages() / named.ranks()) as f64;
    costs.forward /= stages;
    costs.backward_input /= stages;
    costs.backward_weight /= stages;
    let timeline = schedule::simulate(&named, &costs)?;
    Ok(schedule::picture(&timeline))
}

/// Names the files that a fault may be in.
fn files(file: &Path, cluster: Option<&Path>) -> String {
    match cluster {
        None => file.display().to_string(),
        Some(cluster) => format!("{} with {}", file.display(), cluster.display()),
    }
}

fn read(path: &Path) -> anyhow::Result<String> {
    fs::read_to_string(path).with_context(|| path.display().to_string())
}

fn read_some(path: Option<&Path>) -> anyhow::Result<Option<String>> {
    path.map(read).transpose()
}
