//! `flow-plan`: predicts step time and memory of the layouts of a training job.

mod cli;
mod explain;
mod table;

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{bail, Context};
use clap::Parser;
use flow_plan::schedule::{self, Schedule};
use flow_plan::{compare, search, Task};

use cli::{Cli, Command, CompareArgs, PlanArgs, ScheduleArgs};

fn main() -> ExitCode {
    let cli = parse();
    let output = match &cli.command {
        Some(Command::Compare(args)) => compare_output(args),
        Some(Command::Schedule(args)) => schedule_output(args),
        None => plan_output(&cli.plan),
    };
    match output {
        Ok(text) => match std::io::stdout().write_all(text.as_bytes()) {
            Ok(()) => ExitCode::SUCCESS,
            // Whoever reads has seen enough, as `head` has.
            Err(_) => ExitCode::FAILURE,
        },
        Err(error) => {
            eprintln!("flow-plan: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The arguments. Help and version go to stdout; what is wrong with them is one line, and exit code
/// 2.
fn parse() -> Cli {
    Cli::try_parse().unwrap_or_else(|error| {
        if !error.use_stderr() {
            error.exit();
        }
        let text = error.to_string();
        let is_usage =
            |line: &&str| line.starts_with("Usage:") || line.starts_with("For more information");
        let lines = text.lines().map(str::trim).take_while(|line| !is_usage(line));
        let line = lines.filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" ");
        eprintln!("flow-plan: {}", line.trim_start_matches("error: "));
        std::process::exit(2)
    })
}

fn plan_output(args: &PlanArgs) -> anyhow::Result<String> {
    let (Some(model), Some(ranks)) = (&args.model, args.ranks) else {
        bail!("give MODEL.json and --ranks N");
    };
    let (text, cluster) = (read(model)?, read_some(args.cluster.as_deref())?);
    let task = Task::from_json(&text, cluster.as_deref());
    let task = task.with_context(|| files(model, args.cluster.as_deref()))?;
    let plans = search(&task, ranks, &args.layout.wanted(), args.top)?;
    if plans.best.is_empty() {
        let (memory, layout) = (plans.smallest.memory.total, plans.smallest.layout);
        let (memory, available) = (table::bytes(memory), table::bytes(task.cluster.memory));
        bail!(
            "none of the {} layouts fits in {available} a rank; the smallest needs {memory}: \
             {layout}",
            plans.tried
        );
    }
    if args.json {
        return Ok(serde_json::to_string_pretty(&plans.best)? + "\n");
    }
    let mut text = table::plans(&plans);
    if args.explain {
        for plan in &plans.best {
            text += "\n";
            text += &explain::prediction(plan, &task.cluster);
        }
    }
    Ok(text)
}

fn compare_output(args: &CompareArgs) -> anyhow::Result<String> {
    let (runs, cluster) = (read(&args.runs)?, read_some(args.cluster.as_deref())?);
    let (source, comparisons) = compare(&runs, cluster.as_deref())
        .with_context(|| files(&args.runs, args.cluster.as_deref()))?;
    if args.json {
        return Ok(serde_json::to_string_pretty(&comparisons)? + "\n");
    }
    Ok(table::comparisons(&source, &comparisons))
}

fn schedule_output(args: &ScheduleArgs) -> anyhow::Result<String> {
    let ScheduleArgs { pp, micro_batches, chunks, .. } = *args;
    let costs = |stages: f64| schedule::Costs {
        forward: args.forward / stages,
        backward_input: args.backward_input / stages,
        backward_weight: args.backward_weight / stages,
        send: args.send,
    };
    let Some(kind) = args.schedule else {
        return Ok(schedule::table(pp, chunks, micro_batches, &costs(1.0))?);
    };
    let named = Schedule::named(kind.name(), pp, chunks, micro_batches)?;
    let stages = named.stages() / named.ranks();
    let timeline = schedule::simulate(&named, &costs(stages as f64))?;
    Ok(schedule::picture(&timeline))
}

/// The files that a fault may be in.
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
