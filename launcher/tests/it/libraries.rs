//! Libraries that train with PyTorch, and parts of PyTorch itself: each script in the folder
//! `libraries` prints the same under flow-launch as under torchrun.
//! `scripts/setup --python-libraries` gets the libraries; PYTHON has PyTorch.

use flow_harness::cli::{launcher, run};
use flow_harness::python::{have, installed, python, python_path};
use flow_harness::{Finished, free_port, root};

use std::path::Path;
use std::process::Command;

/// A file in the folder `libraries`.
fn file(name: &str) -> String {
    format!("{}/tests/libraries/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// What the ranks print after `result: `, sorted, when this is run without a network, not even a
/// name server.
fn lines(command: &mut Command) -> (Vec<String>, Finished) {
    for offline in ["HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"] {
        command.env(offline, "1");
    }
    command.env("GLOO_SOCKET_IFNAME", "lo");
    let finished = run(command.env("PYTHONPATH", python_path()).env("OMP_NUM_THREADS", "1"));
    assert_eq!(finished.code, Some(0), "{command:?}: {finished:?}");
    let mut lines: Vec<_> = finished
        .stdout
        .lines()
        .filter_map(|line| Some(line.split_once("result: ")?.1.to_string()))
        .collect();
    lines.sort_unstable();
    (lines, finished)
}

/// What a script prints on two ranks under flow-launch, which must be so many lines, and the same
/// as under torchrun.
fn same_as_under_torchrun(script: &str, count: usize) -> Vec<String> {
    let flags = ["--standalone", "--nproc-per-node", "2", &file(script)];
    let (ours, our_run) = lines(launcher(&flags).env("PYTHON_EXEC", python()));
    assert_eq!(ours.len(), count, "under flow-launch: {our_run:?}");
    let (torchruns, their_run) =
        lines(Command::new(python()).args(["-m", "torch.distributed.run"]).args(flags));
    assert_eq!(ours, torchruns, "under flow-launch: {our_run:?}\nunder torchrun: {their_run:?}");
    ours
}

/// What is printed by a Python command whose jobs `flow_launch.patch` has flow-launch start.
fn patched(bin: &Path, command: &str) -> Vec<String> {
    let mut python = Command::new(bin.join("python"));
    python.args(["-m", "flow_launch.patch"]).args(command.split_whitespace());
    let path = std::env::var("PATH").unwrap();
    let libraries = root().join(".python-libraries/bin");
    python.env("PATH", format!("{}:{path}", libraries.display())).env("MUST_BE_FLOW_LAUNCH", "1");
    lines(&mut python).0
}

#[test]
fn pytorch() {
    if have("torch") {
        let lines = same_as_under_torchrun("with_pytorch.py", 2);
        assert!(lines.iter().all(|line| line.ends_with(" True")), "{lines:?}");
    }
}

#[test]
fn environment() {
    if have("torch") {
        same_as_under_torchrun("with_environment.py", 2);
    }
}

#[test]
fn the_store_lives_as_long_as_the_job() {
    if have("torch") {
        same_as_under_torchrun("with_store.py", 2);
    }
}

#[test]
fn debug_server() {
    if have("torch") && have("tabulate") {
        same_as_under_torchrun("with_debug_server.py", 2);
    }
}

#[test]
fn accelerate() {
    if !have("torch") || !have("accelerate") {
        return;
    }
    let lines = same_as_under_torchrun("with_accelerate.py", 2);
    let Some(bin) = installed() else { return };
    let script = file("with_accelerate.py");
    let port = free_port();
    let command = format!(
        "accelerate launch --multi_gpu --num_processes 2 --main_process_port {port} {script}"
    );
    assert_eq!(patched(bin, &command), lines);
}

#[test]
fn lightning() {
    if !have("torch") || !have("lightning") {
        return;
    }
    let lines = same_as_under_torchrun("with_lightning.py", 4);
    assert!(lines.iter().all(|line| line.contains("TorchElasticEnvironment")), "{lines:?}");
    let Some(bin) = installed() else { return };
    let script = file("with_fabric_run.py");
    let port = free_port();
    let command = format!(
        "fabric run --accelerator cpu --strategy ddp --devices 2 --main-port {port} {script}"
    );
    let lines = patched(bin, &command);
    assert_eq!(lines, ["rank 0 of 2: 3.0", "rank 1 of 2: 3.0"]);
}

#[test]
fn transformers() {
    if have("torch") && have("transformers") && have("accelerate") {
        same_as_under_torchrun("with_transformers.py", 2);
    }
}

#[test]
fn deepspeed() {
    if have("torch") && have("deepspeed") {
        same_as_under_torchrun("with_deepspeed.py", 2);
    }
}

#[test]
fn ignite() {
    if have("torch") && have("ignite") {
        same_as_under_torchrun("with_ignite.py", 2);
    }
}

#[test]
fn torchft() {
    if have("torch") && have("torchft") {
        same_as_under_torchrun("with_torchft.py", 4);
    }
}
