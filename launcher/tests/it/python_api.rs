//! flow-launch's wheel and what is in it: the command, and the Python interface. Scripts are in the
//! folder `python`.

use flow_harness::cli::{Running, finish, named, run, until_gone};
use flow_harness::python::{have, installed, python, python_path};
use flow_harness::{Finished, free_port, root};

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::process::Signal;
use serde_json::Value;

fn bin() -> Option<&'static Path> {
    installed()
}

/// A program in the environment that has the wheel, with no other flow-launch on PATH.
fn program(bin: &Path, name: &str) -> Command {
    let mut command = Command::new(bin.join(name));
    command
        .env("PATH", "/usr/bin:/bin")
        .env("OMP_NUM_THREADS", "1")
        .env_remove("PYTHONPATH")
        .stdin(Stdio::null());
    command
}

/// A script in the folder `python`.
fn script(bin: &Path, name: &str) -> Command {
    let mut command = program(bin, "python");
    command.arg(file(name));
    command
}

fn file(name: &str) -> String {
    format!("{}/tests/python/{name}", env!("CARGO_MANIFEST_DIR"))
}

fn lines(finished: &Finished) -> Vec<&str> {
    assert_eq!(finished.code, Some(0), "{finished:?}");
    finished.stdout.lines().collect()
}

#[test]
fn the_wheel_brings_the_command() {
    let Some(bin) = bin() else { return };
    let version = format!("flow-launch {}", env!("CARGO_PKG_VERSION"));
    assert_eq!(lines(&run(program(bin, "flow-launch").arg("--version"))), [version]);
}

#[test]
fn torchruns_command_lines() {
    let Some(bin) = bin() else { return };
    let folder = tempfile::tempdir().unwrap();
    let flags =
        ["--nproc-per-node", "2", "--standalone", &file("worker.py"), "--nproc-per-node", "x"];
    let python = bin.join("python");
    let expected =
        [0, 1].map(|rank| format!("worker {rank} 2 True {} --nproc-per-node x", python.display()));

    let module = run(program(bin, "python").args(["-m", "flow_launch.run"]).args(flags));
    assert_eq!(module.sorted_lines(), expected, "{module:?}");

    let shim = |folder: &Path| {
        run(program(bin, "python").args(["-m", "flow_launch.torchrun"]).arg(folder))
    };
    assert!(lines(&shim(folder.path()))[0].contains("export PATH="));
    let torchrun = run(program(folder.path(), "torchrun").args(flags));
    assert_eq!(torchrun.sorted_lines(), expected, "{torchrun:?}");
    // Ours may be replaced, PyTorch's not.
    assert!(lines(&shim(folder.path()))[0].contains("is flow-launch"));
    fs::write(folder.path().join("torchrun"), "#!/bin/sh\n").unwrap();
    let refused = shim(folder.path());
    assert!(
        refused.code == Some(1) && refused.stderr.contains("is another torchrun"),
        "{refused:?}"
    );
    // The exit code is the worker's.
    let mut failing = program(bin, "python");
    failing.args(["-m", "flow_launch.run", "--no-python", "sh", "-c", "exit 7"]);
    assert_eq!(run(&mut failing).code, Some(7));
}

#[test]
fn functions_and_commands_return_by_rank() {
    let Some(bin) = bin() else { return };
    let finished = run(&mut script(bin, "calls.py"));
    let reported = lines(&finished);
    assert_eq!(reported[0], "{0: 'hello 0', 1: 'hello 1'}");
    assert_eq!(reported[3], "{0: None, 1: None}");
    let mut printed = [reported[1], reported[2]];
    printed.sort_unstable();
    assert_eq!(printed, ["['0', '2']", "['1', '2']"]);
    assert_eq!(reported[6..8], ["{0: None, 1: None}"; 2]);
    assert_eq!(reported[8], "{0: (0, 'default_role', 'a-job'), 1: (1, 'default_role', 'a-job')}");
    assert_eq!(reported[9..], ["PyTorch was imported: False"]);
}

#[test]
fn what_else_can_be_started() {
    let Some(bin) = bin() else { return };
    let folder = tempfile::tempdir().unwrap();
    let events = folder.path().join("events");
    let mut command = program(bin, "python");
    let finished = run(command.args(["-O", &file("odd.py")]).arg(&events));
    let expected = [
        "{0: ('partial', 1)}",
        "{0: 'an object'}",
        "{0: ('signals', 1)} SIG_DFL",
        "events:",
        "exit code 3",
        "exit code 4",
        "left open: 0",
    ];
    assert_eq!(lines(&finished), expected, "{finished:?}");
    assert_eq!(named(&flow_harness::cli::events(&events), "end").len(), 1);
}

#[test]
fn what_is_missing_is_reported_in_one_line() {
    let Some(bin) = bin() else { return };
    let one_line = |command: &mut Command, start: &str| {
        let finished = run(command);
        let is_one = finished.stderr.lines().count() == 1 && finished.stderr.starts_with(start);
        assert!(finished.code == Some(1) && is_one, "{finished:?}");
    };
    one_line(
        program(bin, "python").args(["-m", "flow_launch.torchrun", "/dev/null"]),
        "flow_launch.torchrun: cannot",
    );
    // The package, and no command beside it.
    let sources = root().join("python");
    let mut command = Command::new(python());
    command
        .args(["-m", "flow_launch.run", "true"])
        .env("PYTHONPATH", sources)
        .env("PATH", "/usr/bin:/bin");
    one_line(&mut command, "flow_launch.run: flow-launch is neither");
}

#[test]
fn nodes_return_what_their_own_workers_do() {
    let Some(bin) = bin() else { return };
    for backend in ["static", "c10d"] {
        let port = free_port();
        let nodes = ["0", "1"].map(|node| {
            let mut command = script(bin, "node.py");
            command.args([backend, &format!("127.0.0.1:{port}"), node]).env("FLOW_TOKEN", "secret");
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        });
        let finished = nodes.map(finish);
        let mut reported: Vec<_> = finished.iter().flat_map(lines).collect();
        reported.sort_unstable();
        assert_eq!(reported, ["{0: '0 of 2'}", "{1: '1 of 2'}"], "{backend}");
    }
}

#[test]
fn failures_are_exceptions() {
    let Some(bin) = bin() else { return };
    let expected = |package: &str| {
        [
            format!("{package} fail 1 1 1 {{1: 1, 0: -15}} ValueError: no class has number 12"),
            format!("{package} fail 1 1 -9 {{1: -9, 0: -15}} "),
            format!("{package} fail 1 1 7 {{1: 7, 0: -15}} "),
            "flow-launch's exit code is 2".into(),
            "<lambda> and its arguments cannot be sent to workers".into(),
        ]
    };
    assert_eq!(lines(&run(&mut script(bin, "failures.py"))), expected("flow_launch"));
    if have("torch") {
        let finished = run(script(bin, "failures.py").env("PYTHONPATH", python_path()));
        assert_eq!(lines(&finished), expected("torch"));
    }
}

#[test]
fn an_error_passes_through_a_launcher_that_is_a_worker() {
    let Some(bin) = bin().filter(|_| have("torch")) else { return };
    let folder = tempfile::tempdir().unwrap();
    let error = folder.path().join("error.json");
    let mut command = script(bin, "nested.py");
    let finished =
        run(command.env("PYTHONPATH", python_path()).env("TORCHELASTIC_ERROR_FILE", &error));
    assert_eq!(finished.code, Some(1), "{finished:?}");
    let error: Value = serde_json::from_slice(&fs::read(&error).unwrap()).unwrap();
    assert_eq!(error["message"]["message"], "ValueError: no class has number 12", "{error}");
}

/// Nothing is left of a job whose program is stopped, or killed.
#[test]
fn the_job_ends_with_its_program() {
    let Some(bin) = bin() else { return };
    for signal in [Signal::TERM, Signal::KILL] {
        let mut running = Running::start(&mut script(bin, "sleeps.py"));
        let pids = running.numbers(2);
        running.signal(signal);
        let finished = running.finish();
        until_gone(&pids);
        if signal == Signal::TERM {
            assert_eq!(lines(&finished), [format!("Process {} got signal: 15 SIGTERM", pids[0])]);
        }
    }
}

#[test]
fn configurations_become_flags() {
    let Some(bin) = bin().filter(|_| have("torch")) else { return };
    let finished = run(script(bin, "flags.py").env("PYTHONPATH", python_path()));
    let several = |conf: &str| {
        format!(
            "--nnodes=1:2 --nproc-per-node=3 --rdzv-id=a-job --role=actor --max-restarts=4 \
             --local-addr=127.0.0.1 --numa-binding=node --signals-to-handle=SIGTERM,SIGUSR1 \
             --duplicate-stdout-filters=a,,b,c --log-dir=/tmp --redirects=1 --tee=0:3,1:2 \
             --local-ranks-filter=0,1 --rdzv-backend=c10d --rdzv-endpoint=[::1]:29400 \
             --rdzv-conf={conf} --virtual-local-rank"
        )
    };
    // PyTorch's appends a timeout, to which flow-launch prefers the other.
    let (pytorchs, ours) = (several("join_timeout=60,timeout=900"), several("join_timeout=60"));
    let fixed = "--nnodes=2:2 --nproc-per-node=1 --rdzv-id=x --role=default_role --max-restarts=3 \
                 --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT --master-addr=::1 \
                 --master-port=29500 --node-rank=1 --rdzv-conf=timeout=9";
    assert_eq!(lines(&finished), [&pytorchs, fixed, &ours, fixed]);
}

#[test]
fn pytorchs_own_launcher_can_be_replaced() {
    let Some(bin) = bin().filter(|_| have("torch")) else { return };
    let port = free_port().to_string();
    let finished = run(script(bin, "patched.py").arg(port).env("PYTHONPATH", python_path()));
    let reported = lines(&finished);
    assert_eq!(reported[0], "{0: ('0', True), 1: ('1', True)}");
    let python = bin.join("python");
    let worker =
        |rank: usize| format!("worker {rank} 2 True {} --nproc-per-node x", python.display());
    for pair in reported[1..7].chunks(2) {
        assert!(
            pair.contains(&worker(0).as_str()) && pair.contains(&worker(1).as_str()),
            "{pair:?}"
        );
    }
    assert_eq!(reported[7..], ["exit code 1"]);
}
