//! Libraries that train with PyTorch, and parts of PyTorch itself: each script in the folder
//! `libraries` prints the same under flow-launch as under torchrun.
//! `scripts/setup --python-libraries` gets the libraries; PYTHON has PyTorch.

use flow_harness::cli::{launcher, run};
use flow_harness::python::{have, installed, python, python_path};
use flow_harness::{Finished, free_port, root};

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

/// A file in the folder `libraries`.
fn file(name: &str) -> String {
    format!("{}/tests/libraries/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// Runs this to its end without a network, not even a name server.
fn finish(command: &mut Command) -> Finished {
    for offline in ["HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"] {
        command.env(offline, "1");
    }
    command.env("GLOO_SOCKET_IFNAME", "lo");
    run(command.env("PYTHONPATH", python_path()).env("OMP_NUM_THREADS", "1"))
}

/// What ranks print after `result: `, sorted.
fn results(printed: &str) -> Vec<String> {
    let mut lines: Vec<_> = printed
        .lines()
        .filter_map(|line| Some(line.split_once("result: ")?.1.to_string()))
        .collect();
    lines.sort_unstable();
    lines
}

fn lines(command: &mut Command) -> Vec<String> {
    let finished = finish(command);
    assert_eq!(finished.code, Some(0), "{command:?}: {finished:?}");
    results(&finished.stdout)
}

/// flow-launch and torchrun, with two ranks of a Python program.
fn launchers() -> [Command; 2] {
    let flags = ["--standalone", "--nproc-per-node", "2"];
    let (mut ours, mut torchrun) = (launcher(&flags), Command::new(python()));
    ours.env("PYTHON_EXEC", python());
    torchrun.args(["-m", "torch.distributed.run"]).args(flags);
    [ours, torchrun]
}

/// A script that prints the same under flow-launch as under torchrun.
fn same_as_under_torchrun(script: &str) {
    let [ours, torchruns] = launchers().map(|mut launcher| lines(launcher.arg(file(script))));
    assert_eq!(ours.len(), 2, "{ours:?}");
    assert_eq!(ours, torchruns);
}

/// A script, the modules that it needs beside torch, and how many lines it prints.
type Script = (&'static str, &'static [&'static str], usize);

/// Scripts that print the same under flow-launch as under torchrun. Returns what those print whose
/// modules are there.
fn all_same_as_under_torchrun(scripts: &[Script]) -> BTreeMap<&'static str, Vec<String>> {
    let mut found = scripts.to_vec();
    found.retain(|(_, modules, _)| modules.iter().all(|module| have(module)));
    if found.is_empty() {
        return BTreeMap::new();
    }
    let [ours, torchruns] = launchers().map(|launcher| results_of_several(launcher, &found));
    for ((ours, torchruns), (script, _, count)) in ours.iter().zip(&torchruns).zip(&found) {
        assert_eq!(ours.len(), *count, "{script} under flow-launch: {ours:?}");
        assert_eq!(ours, torchruns, "{script}");
    }
    found.iter().map(|(script, ..)| *script).zip(ours).collect()
}

/// What each of these scripts prints on two ranks. They share a job, in which PyTorch is imported
/// once.
fn results_of_several(mut launcher: Command, scripts: &[Script]) -> Vec<Vec<String>> {
    let folder = tempfile::tempdir().unwrap();
    launcher.arg(root().join("pytorch/tests/several.py")).arg(folder.path());
    for (number, (script, ..)) in scripts.iter().enumerate() {
        launcher.args((number > 0).then_some("--")).arg(file(script));
    }
    let finished = finish(&mut launcher);
    // A script that has not begun has written nothing.
    let of_ranks = |number, name| {
        [0, 1].map(|rank| {
            let path = folder.path().join(format!("{number}.{rank}.{name}"));
            std::fs::read_to_string(path).unwrap_or_default()
        })
    };
    let printed = (0..scripts.len()).map(|number| of_ranks(number, "out").concat());
    let printed: Vec<String> = printed.collect();
    let errors: Vec<_> = (0..scripts.len()).map(|number| of_ranks(number, "err")).collect();
    assert_eq!(finished.code, Some(0), "{launcher:?}: {finished:?} {printed:?} {errors:?}");
    printed.iter().map(|printed| results(printed)).collect()
}

/// What is printed by a Python command whose jobs `flow_launch.patch` has flow-launch start.
fn patched(bin: &Path, command: &str) -> Vec<String> {
    let mut python = Command::new(bin.join("python"));
    python.args(["-m", "flow_launch.patch"]).args(command.split_whitespace());
    let path = std::env::var("PATH").unwrap();
    let libraries = root().join(".python-libraries/bin");
    python.env("PATH", format!("{}:{path}", libraries.display())).env("MUST_BE_FLOW_LAUNCH", "1");
    lines(&mut python)
}

#[test]
fn environment() {
    if have("torch") {
        same_as_under_torchrun("with_environment.py");
    }
}

#[test]
fn the_store_lives_as_long_as_the_job() {
    if have("torch") {
        same_as_under_torchrun("with_store.py");
    }
}

#[test]
fn pytorch_and_what_calls_it() {
    if !have("torch") {
        return;
    }
    let printed = all_same_as_under_torchrun(&[
        ("with_pytorch.py", &[], 2),
        ("with_debug_server.py", &["tabulate"], 2),
        ("with_ignite.py", &["ignite"], 2),
        ("with_torchft.py", &["torchft"], 4),
    ]);
    let lines = &printed["with_pytorch.py"];
    assert!(lines.iter().all(|line| line.ends_with(" True")), "{lines:?}");
}

#[test]
fn trainers() {
    if !have("torch") {
        return;
    }
    let printed = all_same_as_under_torchrun(&[
        ("with_accelerate.py", &["accelerate"], 2),
        ("with_transformers.py", &["transformers", "accelerate"], 2),
        ("with_lightning.py", &["lightning"], 4),
        ("with_deepspeed.py", &["deepspeed"], 2),
    ]);
    if let Some(lines) = printed.get("with_lightning.py") {
        assert!(lines.iter().all(|line| line.contains("TorchElasticEnvironment")), "{lines:?}");
    }
    let Some(lines) = printed.get("with_accelerate.py") else { return };
    let Some(bin) = installed() else { return };
    let script = file("with_accelerate.py");
    let port = free_port();
    let command = format!(
        "accelerate launch --multi_gpu --num_processes 2 --main_process_port {port} {script}"
    );
    assert_eq!(patched(bin, &command), *lines);
}

#[test]
fn fabric_run() {
    if !have("torch") || !have("lightning") {
        return;
    }
    let Some(bin) = installed() else { return };
    let script = file("with_fabric_run.py");
    let port = free_port();
    let command = format!(
        "fabric run --accelerator cpu --strategy ddp --devices 2 --main-port {port} {script}"
    );
    let lines = patched(bin, &command);
    assert_eq!(lines, ["rank 0 of 2: 3.0", "rank 1 of 2: 3.0"]);
}
