//! flow-bench: what scripts/bench reads of it is there, and wrong arguments are errors.

use std::process::Command;

use flow_tests::{Process, TEST_TIMEOUT, launch, program};
use serde_json::Value;

fn lines(output: &str) -> Vec<Value> {
    output.lines().map(|line| serde_json::from_str(line).expect("JSON lines")).collect()
}

fn positive(line: &Value, names: &[&str]) {
    for name in names {
        assert!(line[name].as_f64().is_some_and(|number| number > 0.0), "{name} in {line}");
    }
}

#[test]
fn all_reduce_and_its_limit_are_measured() {
    let measured = lines(&launch(2, "flow-bench", &["allreduce", "--json", "--sizes", "4,65536"]));
    let kinds: Vec<_> =
        measured.iter().map(|line| (line["bytes"].as_u64(), line["memory"].as_str())).collect();
    let (small, large) = (Some(4), Some(65536));
    let (shared, ordinary) = (Some("shared"), Some("ordinary"));
    assert_eq!(kinds, [(small, shared), (small, ordinary), (large, shared), (large, ordinary)]);
    measured.iter().for_each(|line| positive(line, &["median_us", "ranks"]));

    let limit = lines(&launch(1, "flow-bench", &["limit", "--json", "--sizes", "4096"]));
    assert_eq!(limit.len(), 1);
    positive(&limit[0], &["bytes", "median_us"]);
}

#[test]
fn steps_are_measured() {
    let measured =
        lines(&launch(2, "flow-bench", &["step", "--model", "mlp", "--steps", "2", "--json"]));
    assert_eq!(measured.len(), 1);
    positive(&measured[0], &["local_ms", "ddp_ms", "barrier_ms", "efficiency", "ranks"]);
}

#[test]
fn checkpoints_of_global_tensors_are_measured() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().to_str().unwrap();
    let arguments =
        ["global-checkpoints", "--megabytes", "3", "--rounds", "1", "--json", "--folder", folder];
    let measured = lines(&launch(2, "flow-bench", &arguments));
    assert_eq!(measured.len(), 1);
    let names = [
        "save_ms",
        "async_save_ms",
        "in_memory_ms",
        "copy_ms",
        "ratio",
        "in_memory_ratio",
        "ranks",
    ];
    positive(&measured[0], &names);
}

#[test]
fn checkpoints_in_memory_are_measured() {
    let arguments = ["in-memory-checkpoints", "--megabytes", "3", "--rounds", "1", "--json"];
    let measured = lines(&launch(2, "flow-bench", &arguments));
    assert_eq!(measured.len(), 1);
    positive(&measured[0], &["stall_ms", "copy_ms", "ratio", "ranks"]);
}

#[test]
fn sync_batchnorm_is_measured() {
    let arguments = ["sync-batchnorm", "--blocks", "1", "--steps", "1", "--json"];
    let measured = lines(&launch(2, "flow-bench", &arguments));
    assert_eq!(measured.len(), 1);
    positive(&measured[0], &["without_ms", "with_ms", "ratio", "ranks"]);
}

#[test]
fn joins_are_measured() {
    let arguments = ["join", "--model", "mlp", "--blocks", "1", "--steps", "1", "--json"];
    let measured = lines(&launch(2, "flow-bench", &arguments));
    assert_eq!(measured.len(), 1);
    positive(&measured[0], &["without_ms", "with_ms", "ratio", "shadowed_ms", "ranks"]);
}

#[test]
fn optimizers_in_backward_are_measured() {
    let arguments =
        ["optimizer-in-backward", "--model", "mlp", "--blocks", "1", "--steps", "1", "--json"];
    let measured = lines(&launch(2, "flow-bench", &arguments));
    assert_eq!(measured.len(), 1);
    positive(&measured[0], &["after_ms", "in_ms", "ratio", "ranks"]);
    // The thread that reads the bytes may find no step under way.
    assert!(["after_mib", "in_mib"].iter().all(|name| measured[0][name].is_number()));
}

#[test]
fn sharded_optimizers_are_measured() {
    let arguments = ["zero", "--model", "mlp", "--blocks", "1", "--steps", "1", "--json"];
    let measured = lines(&launch(2, "flow-bench", &arguments));
    assert_eq!(measured.len(), 1);
    let names = [
        "adam_ms",
        "zero_ms",
        "ratio",
        "in_backward_ms",
        "in_backward_ratio",
        "adam_mib",
        "zero_mib",
        "ranks",
    ];
    positive(&measured[0], &names);
}

#[test]
fn memory_is_measured() {
    for ranks in [1, 2] {
        let arguments = ["sharded-memory", "--optimizer", "sgd", "--json"];
        let measured = lines(&launch(ranks, "flow-bench", &arguments));
        assert_eq!(measured.len(), 1);
        positive(&measured[0], &["mib", "plan_mib", "alone_mib", "ranks"]);
        // Parameters and gradients alone.
        assert!(measured[0]["mib"].as_f64() > Some(190.0), "{measured:?}");
    }
}

#[test]
fn global_tensors_are_measured() {
    let measured =
        lines(&launch(2, "flow-bench", &["sbp", "--model", "mlp", "--steps", "2", "--json"]));
    assert_eq!(measured.len(), 1);
    positive(&measured[0], &["sbp_ms", "ddp_ms", "ratio"]);

    let small = ["gpt", "--width", "16", "--heads", "2", "--tokens", "4", "--steps", "2", "--json"];
    let measured = lines(&launch(2, "flow-bench", &small));
    assert_eq!(measured.len(), 1);
    positive(&measured[0], &["width", "tokens", "parallel_ms", "alone_ms", "ratio", "ranks"]);

    let measured = lines(&launch(2, "flow-bench", &["overhead", "--rounds", "1", "--json"]));
    let names: Vec<_> = measured.iter().map(|line| line["name"].as_str().unwrap()).collect();
    for name in ["add", "mm", "relu", "view", "MLP step with Adam"] {
        assert!(names.contains(&name), "{name} in {names:?}");
    }
    measured.iter().for_each(|line| positive(line, &["plain_us", "global_us", "ranks"]));

    let pairs = ["boxing", "--json", "--sizes", "4096", "--pair", "S0 > B", "--pair", "P > S0"];
    let measured = lines(&launch(2, "flow-bench", &pairs));
    let names: Vec<_> = measured.iter().map(|line| line["pair"].as_str().unwrap()).collect();
    assert_eq!(names, ["S0 > B", "P > S0"]);
    measured.iter().for_each(|line| positive(line, &["bytes", "median_us", "limit_us"]));
}

#[test]
fn pipelines_are_measured() {
    let small = ["--micro-batches", "4", "--rows", "2", "--width", "8", "--layers", "4"];
    let all = ["pipeline", "--json", "--schedules", "gpipe,1f1b,interleaved,zb-h1,zb-v"];
    let measured = lines(&launch(2, "flow-bench", &[&all[..], &small[..]].concat()));
    let names: Vec<_> = measured.iter().map(|line| line["schedule"].as_str().unwrap()).collect();
    assert_eq!(names, ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"]);
    for line in &measured {
        positive(line, &["step_ms", "ideal_ms", "efficiency", "limit", "ranks"]);
        assert!(line["limit"].as_f64().is_some_and(|limit| limit <= 1.0), "{line}");
    }
}

#[test]
fn wrong_arguments_are_usage_errors() {
    let cases: [(&[&str], &str); 5] = [
        (
            &[],
            "error: a subcommand is missing: allreduce, limit, step, sync-batchnorm, join, optimizer-in-backward, virtual-ranks, tune, comm-hooks, zero, sharded, sharded-memory, checkpoints, global-checkpoints, in-memory-checkpoints, mixed-precision, sbp, gpt, overhead, boxing, pipeline, losses, launch; see --help\n",
        ),
        (
            &["allreduce", "--sizes", "-4"],
            "a buffer of f32 takes a multiple of 4 bytes, at least 4\n",
        ),
        (&["limit", "--sizes", "6"], "a buffer of f32 takes a multiple of 4 bytes, at least 4\n"),
        (
            &["step", "--model", "vgg"],
            "[possible values: mlp, lenet, wide, mobilenet, resnet50, gpt]\n",
        ),
        (&["allreduce", "--foo"], "unexpected argument '--foo' found\n"),
    ];
    for (arguments, end) in cases {
        let mut command = Command::new(program("flow-bench"));
        command.args(arguments);
        let finished = Process::start(command).finish(TEST_TIMEOUT);
        assert_eq!(finished.code, Some(2), "{finished:?}");
        assert!(
            finished.stderr.lines().count() == 1 && finished.stderr.ends_with(end),
            "{finished:?}"
        );
    }
}

#[test]
fn what_cannot_be_measured_is_an_error() {
    let cases: [(&[&str], &str); 4] = [
        (&["gpt", "--heads", "3"], "--width 512 is no multiple of --heads 3"),
        (&["gpt", "--tokens", "0"], "0 is not in 1.."),
        (&["boxing", "--sizes", "4"], "--sizes 4 is no multiple of 256"),
        (&["boxing"], "boxing takes at least 2 ranks"),
    ];
    for (arguments, part) in cases {
        let mut command = Command::new(program("flow-bench"));
        command.args(arguments);
        let finished = Process::start(command).finish(TEST_TIMEOUT);
        assert!(finished.code.is_some_and(|code| code != 0), "{finished:?}");
        assert!(finished.stderr.contains(part), "{finished:?}");
    }
}

#[test]
fn what_finds_no_memory_is_an_error() {
    for arguments in
        [["limit", "--sizes", "1000000000000000"], ["allreduce", "--sizes", "18446744073709551612"]]
    {
        let mut command = Command::new(program("flow-bench"));
        command.args(arguments);
        let finished = Process::start(command).finish(TEST_TIMEOUT);
        assert_eq!(finished.code, Some(1), "{finished:?}");
        assert!(finished.stderr.starts_with("flow-bench: "), "{finished:?}");
    }
}
