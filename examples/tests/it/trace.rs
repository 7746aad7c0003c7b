//! `flow-launch --trace`: the timeline of a real training, and its summary.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use crate::common::noise::write_noise;
use flow_tests::{Process, TEST_TIMEOUT, launcher, program};
use serde_json::Value;

const STEPS: usize = 500;

/// The number of events by category, name and rank in the timeline of a program of two ranks.
fn events(
    file: &Path,
    program: &str,
    arguments: &[&str],
) -> BTreeMap<(String, String, u64), usize> {
    let training = launcher(2, &["--trace", file.to_str().unwrap()], program, arguments);
    Process::start(training).finish(TEST_TIMEOUT).success();
    let timeline: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let mut counts = BTreeMap::new();
    for event in timeline["traceEvents"].as_array().unwrap() {
        let text = |key: &str| event[key].as_str().unwrap_or_default().to_owned();
        *counts.entry((text("cat"), text("name"), event["pid"].as_u64().unwrap())).or_insert(0) +=
            1;
    }
    counts
}

/// `mnist` steps its optimizer by `try_backward_step`.
#[test]
fn steps_of_the_optimizer_are_in_the_timeline() {
    let folder = tempfile::tempdir().unwrap();
    write_noise(folder.path(), 200, 10);
    let data = folder.path().to_str().unwrap();
    let arguments = ["--data", data, "--batch-size", "10", "--epochs", "2"];
    let counts = events(&folder.path().join("trace.json"), "mnist", &arguments);
    for rank in 0..2 {
        for name in ["forward", "backward", "optimizer"] {
            let count = counts.get(&("phase".to_owned(), name.to_owned(), rank));
            assert_eq!(count, Some(&20), "{name} of rank {rank}: {counts:?}");
        }
    }
}

#[test]
fn a_training_has_a_timeline() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("trace.json");
    let counts = events(&file, "train", &[]);
    for rank in 0..2 {
        // The first backward also waits until all ranks have the order of the buckets.
        for (category, name, expected) in [
            ("phase", "forward", STEPS),
            ("phase", "backward", STEPS),
            ("wait", "wait", STEPS + 1),
            ("comm", "all_reduce", STEPS),
        ] {
            let count = counts.get(&(category.to_owned(), name.to_owned(), rank));
            assert_eq!(count, Some(&expected), "{category} {name} of rank {rank}: {counts:?}");
        }
    }

    let mut summary = Command::new(program("flow-launch"));
    summary.arg("trace").arg(&file);
    let summary = Process::start(summary).finish(TEST_TIMEOUT).success();
    assert!(summary.starts_with(&format!("2 ranks, {STEPS} steps, ")), "{summary}");
}
