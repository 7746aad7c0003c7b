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
use flow_plan::{compare, search, Task};

use cli::{Cli, Command, CompareArgs, PlanArgs};

fn main() -> ExitCode {
    let cli = Cli::parse();
    let output = match (cli.command, cli.plan) {
        (Some(Command::Compare(args)), _) => compare_output(&args),
        (None, Some(args)) => plan_output(&args),
        // clap asks for the model.
        (None, None) => Ok(String::new()),
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

fn plan_output(args: &PlanArgs) -> anyhow::Result<String> {
    let (model, cluster) = (read(&args.model)?, read_some(args.cluster.as_deref())?);
    let task = Task::from_json(&model, cluster.as_deref()).with_context(|| names(args))?;
    let plans = search(&task, args.ranks, &args.layout.wanted(), args.top)?;
    if args.json {
        return Ok(serde_json::to_string_pretty(&plans.best)? + "\n");
    }
    if plans.best.is_empty() {
        let (memory, layout) = (plans.smallest.memory.total, plans.smallest.layout);
        let (memory, available) = (table::bytes(memory), table::bytes(task.cluster.memory));
        bail!(
            "none of the {} layouts fits in {available} a rank; the smallest needs {memory}: \
             {layout}",
            plans.tried
        );
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
        .with_context(|| args.runs.display().to_string())?;
    if args.json {
        return Ok(serde_json::to_string_pretty(&comparisons)? + "\n");
    }
    Ok(table::comparisons(&source, &comparisons))
}

/// The files that a fault may be in.
fn names(args: &PlanArgs) -> String {
    match &args.cluster {
        None => args.model.display().to_string(),
        Some(cluster) => format!("{} with {}", args.model.display(), cluster.display()),
    }
}

fn read(path: &Path) -> anyhow::Result<String> {
    fs::read_to_string(path).with_context(|| path.display().to_string())
}

fn read_some(path: Option<&Path>) -> anyhow::Result<Option<String>> {
    path.map(read).transpose()
}
