//! Every scenario of the worker programs, in each of its jobs, as a test of its own. See
//! `src/registry.rs` for how to add one.

use std::process::ExitCode;

use flow_tests::{
    fake_cuda_is_found, launcher, program, rank_commands, use_fake_cuda, Process, TEST_TIMEOUT,
};
use libtest_mimic::{Arguments, Trial};
use serde_json::Value;

const WORKERS: [&str; 2] = ["worker", "ddp_worker"];

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let jobs = WORKERS.iter().flat_map(|worker| jobs(worker));
    let mut jobs: Vec<(&str, String, Value)> = jobs.collect();
    if jobs.iter().any(|(_, _, job)| job["fake_cuda"] == true) && !fake_cuda_is_found() {
        jobs.retain(|(_, _, job)| job["fake_cuda"] == false);
    }
    let trial = |(worker, name, job): (&'static str, String, Value)| {
        let title = format!("{name} ({})", job["title"].as_str().expect("a job has a title"));
        Trial::test(title, move || {
            passes(worker, &name, &job);
            Ok(())
        })
    };
    libtest_mimic::run(&arguments, jobs.into_iter().map(trial).collect()).exit_code()
}

/// A worker's scenarios, once for each of their jobs.
fn jobs(worker: &'static str) -> impl Iterator<Item = (&'static str, String, Value)> {
    let mut list = std::process::Command::new(program(worker));
    list.arg("--list");
    let list = Process::start(list).finish(TEST_TIMEOUT).success();
    let lines: Vec<Value> =
        list.lines().map(|line| serde_json::from_str(line).expect("a line is JSON")).collect();
    lines.into_iter().flat_map(move |scenario| {
        let name = scenario["name"].as_str().expect("a scenario has a name").to_owned();
        let jobs = scenario["jobs"].as_array().expect("a scenario has jobs").clone();
        jobs.into_iter().map(move |job| (worker, name.clone(), job))
    })
}

/// Runs one job to its good end, which every rank must report.
fn passes(worker: &str, name: &str, job: &Value) {
    let count = |count: &Value| count.as_u64().expect("a number of ranks") as usize;
    let nodes: Vec<usize> = job["nodes"].as_array().into_iter().flatten().map(count).collect();
    let mut commands = match &job["launched"] {
        Value::Null => rank_commands(&nodes, worker, &[name]),
        ranks => vec![launcher(count(ranks), &[], worker, &[name])],
    };
    let waits = tempfile::tempdir().expect("a folder of its own");
    for command in &mut commands {
        command.env("OMP_NUM_THREADS", "1").env("RUST_BACKTRACE", "0");
        if let [variable, value] = job["variable"].as_array().map_or(&[][..], Vec::as_slice) {
            let text = |value: &Value| value.as_str().expect("a text").to_owned();
            command.env(text(variable), text(value));
        }
        if job["fake_cuda"] == true {
            use_fake_cuda(command);
            command.env("FLOW_FAKE_WAITS", waits.path().join("waits"));
            command.env("FLOW_TEST_DEVICE", "cuda");
        }
    }
    let processes: Vec<Process> = commands.into_iter().map(Process::start).collect();
    let each = if job["launched"].is_null() { 1 } else { count(&job["launched"]) };
    for process in processes {
        let output = process.finish(TEST_TIMEOUT).success();
        assert_eq!(output, format!("{name} passed\n").repeat(each));
    }
}
