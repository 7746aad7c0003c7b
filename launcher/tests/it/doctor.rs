//! `flow-launch doctor` on machines on which something is wrong.

use flow_harness::cli::{launcher, run, until_gone};
use flow_harness::net::Net;
use flow_harness::python::{have, python, python_path};
use flow_harness::{Finished, assert_contains, executable, program, root};

use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

/// The longest that a command of a probe may take: no probe of a test that succeeds ends by it.
const PATIENT: &str = "--timeout=250";

/// The doctor, without what this process's environment says of libtorch and NCCL.
fn doctor(arguments: &[&str]) -> Command {
    let mut command = launcher(&[&["doctor"], arguments].concat());
    for name in ["LIBTORCH", "FLOW_NCCL_PATH", "PYTHON_EXEC", "PYTHONPATH", "FLOW_RSH"] {
        command.env_remove(name);
    }
    command
}

/// The doctor after some lines of a shell.
fn after(shell: &str) -> Command {
    let doctor = doctor(&["--json", PATIENT]);
    let mut command = Command::new("sh");
    command.args(["-c", &format!("{shell}; exec \"$@\"; "), "sh"]);
    command.args(doctor.get_args().skip(1)); // without env, which may not be found
    for (name, value) in doctor.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command
}

/// What the doctor has found.
struct Found {
    finished: Finished,
    facts: Vec<Value>,
}

impl Found {
    /// Of a doctor with `--json`.
    fn by(command: &mut Command) -> Found {
        Found::of(run(command))
    }

    fn of(finished: Finished) -> Found {
        let read: Value = serde_json::from_str(&finished.stdout)
            .unwrap_or_else(|error| panic!("{error}: {finished:?}"));
        let facts = read["facts"].as_array().unwrap().clone();
        let found = Found { finished, facts };
        let is_broken = found.facts.iter().any(|fact| fact["state"] == "broken");
        assert_eq!(found.finished.code, Some(i32::from(is_broken)), "{:?}", found.finished);
        found
    }

    /// The state, value and advice of a fact.
    fn fact(&self, subject: &str) -> (&str, &str, &str) {
        let fact = self.facts.iter().find(|fact| fact["subject"] == subject);
        let fact = fact.unwrap_or_else(|| panic!("no {subject}: {:?}", self.finished));
        let text = |field: &str| fact[field].as_str().unwrap_or_default();
        assert_eq!(text("advice").is_empty(), text("state") == "ok", "{fact}");
        (text("state"), text("value"), text("advice"))
    }

    /// The fact has this state, and its value and advice these texts.
    fn is(&self, subject: &str, expected: &str, texts: &[&str]) {
        let (state, value, advice) = self.fact(subject);
        assert_eq!(state, expected, "{subject}: {value}; {advice}");
        assert_contains(&format!("{value}; {advice}"), texts);
    }
}

#[test]
fn each_fact_is_a_line() {
    let finished = run(&mut doctor(&[PATIENT]));
    let mut lines = finished.stdout.lines();
    assert!(lines.next().is_some_and(|line| line.starts_with("flow-launch ")), "{finished:?}");
    let subjects = [
        "cores",
        "NUMA",
        "memory",
        "shared memory",
        "/dev/shm",
        "open files",
        "locked memory",
        "processes",
        "host name",
        "ports",
        "GPUs",
        "Python",
        "libtorch",
        "PyTorch",
    ];
    for subject in subjects {
        let is_of_it = |line: &&str| line.get(8..).is_some_and(|rest| rest.starts_with(subject));
        assert!(lines.clone().any(|line| is_of_it(&line)), "{subject}: {finished:?}");
    }
    // A fact with which something is wrong is followed by its advice, and no other is.
    let lines: Vec<&str> = lines.collect();
    let [facts @ .., last] = &lines[..] else { panic!("{finished:?}") };
    for pair in facts.windows(2) {
        let is_wrong = pair[0].starts_with("advice ") || pair[0].starts_with("BROKEN ");
        assert_eq!(is_wrong, pair[1].trim_start().starts_with("-> "), "{pair:?}");
    }
    let is_broken = finished.code == Some(1);
    assert!(is_broken == last.contains(" broken; ") || last.contains("nothing is"), "{finished:?}");
}

#[test]
fn one_core_is_told() {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
    let first = allowed.trim().split([',', '-']).next().unwrap();
    if fs::read_to_string("/sys/devices/system/cpu/online").unwrap().trim() == first {
        println!("SKIPPED: an affinity to one of several cores: there is only one");
        return;
    }
    let found = Found::by(&mut after(&format!("taskset -cp {first} $$ >/dev/null")));
    found.is("cores", "advice", &["1 of ", &format!("affinity {first};"), "share one core"]);
}

#[test]
fn limits_are_told() {
    let found = Found::by(&mut after("ulimit -n 256"));
    found.is("open files", "advice", &["256, at most 256", "ulimit -Hn"]);
    let found = Found::by(&mut after("ulimit -f 1000"));
    found.is("shared memory", "broken", &["a file may have", "ulimit -f"]);
    assert_eq!(found.finished.code, Some(1));
}

#[test]
fn a_small_dev_shm_is_told() {
    let mount = "mount -t tmpfs -o size=1m tmpfs /dev/shm";
    let mut unshare = Command::new("unshare");
    let can = run(unshare.args(["--map-root-user", "--mount", "sh", "-c", mount]));
    if can.code != Some(0) {
        println!("SKIPPED: a small /dev/shm: {}", can.stderr.trim());
        return;
    }
    let small = after(mount);
    let mut command = Command::new("unshare");
    command.args(["--map-root-user", "--mount"]).arg(small.get_program()).args(small.get_args());
    let found = Found::by(&mut command);
    found.is("/dev/shm", "advice", &["1 MiB free of 1 MiB", "--shm-size"]);
    found.is("shared memory", "ok", &["memfd"]);
}

#[test]
fn a_port_that_is_taken_is_told() {
    let Some(net) = Net::new(1) else { return };
    let _taken = net.within(0, || TcpListener::bind(("0.0.0.0", 29400)).unwrap());
    let found = Found::of(net.start(0, &doctor(&["--json", PATIENT])).finish());
    found.is("ports", "advice", &["29400 cannot be had", "--rdzv-endpoint"]);
    found.is("host name", "ok", &["node0 is 10.0.0.1"]);
}

#[test]
fn without_python_the_rest_is_told() {
    let found = Found::by(&mut after("PATH=/nonexistent"));
    found.is("Python", "advice", &["not on PATH"]);
    found.is("libtorch", "advice", &["LIBTORCH is not set", "flow-launch setup-libtorch"]);
    assert_eq!(found.finished.code, Some(0));
}

/// A file that is used in place of python3.
fn fake_python(folder: &Path, script: &str) -> String {
    let path = folder.join("python");
    executable(&path, format!("#!/bin/sh\n{script}\n"));
    path.to_str().unwrap().into()
}

#[test]
fn a_python_that_hangs_is_told_and_ended() {
    let folder = tempfile::tempdir().unwrap();
    let pids = folder.path().join("pids");
    let hangs = format!("echo $$ >>{}; sleep 1000", pids.display());
    let python = fake_python(folder.path(), &hangs);
    let found = Found::by(doctor(&["--json", "--timeout=3"]).env("PYTHON_EXEC", python));
    found.is("PyTorch", "broken", &["no answer in 3 s"]);
    found.is("Python", "advice", &["no answer in 3 s"]);
    let pids = fs::read_to_string(pids).unwrap_or_default();
    let pids: Vec<i32> = pids.lines().map(|pid| pid.parse().unwrap()).collect();
    until_gone(&pids);
}

#[test]
fn a_pytorch_that_is_missing_or_does_not_load_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let bare = fake_python(folder.path(), "exec python3 -S \"$@\"");
    let found = Found::by(doctor(&["--json", PATIENT]).env("PYTHON_EXEC", &bare));
    found.is("PyTorch", "ok", &["none"]);
    found.is("Python", "ok", &["3."]);
    let torch = folder.path().join("torch");
    fs::create_dir(&torch).unwrap();
    fs::write(torch.join("__init__.py"), "raise ImportError('libcudart.so: cannot open')").unwrap();
    let mut command = doctor(&["--json", PATIENT]);
    let found = Found::by(command.env("PYTHON_EXEC", &bare).env("PYTHONPATH", folder.path()));
    found.is("PyTorch", "broken", &["import torch: libcudart.so: cannot open"]);
}

#[test]
fn flow_torch_is_told() {
    if !have("torch") {
        return;
    }
    let checkout = root().join("pytorch");
    let with_torch = |library: &Path, variable: &str, value: &Path| {
        let mut command = doctor(&["--json", PATIENT]);
        command.env("PYTHON_EXEC", python()).env("FLOW_COMM_LIBRARY", library);
        command.env("PYTHONPATH", format!("{}:{}", checkout.display(), python_path()));
        Found::by(command.env(variable, value))
    };
    let nothing = Path::new("/nonexistent");
    let found = with_torch(nothing, "FLOW_CACHE", nothing);
    found.is("PyTorch", "ok", &["2."]);
    found.is("libtorch", "ok", &["is Python's"]);
    found.is("flow_torch", "advice", &["/nonexistent is missing"]);

    let library = program("flow-launch").with_file_name("libflow_comm.so");
    if !library.is_file() {
        println!("SKIPPED: flow_torch's C++ part: no libflow_comm.so: cargo build --workspace");
        return;
    }
    let empty = tempfile::tempdir().unwrap();
    let found = with_torch(&library, "FLOW_CACHE", empty.path());
    found.is("flow_torch", "ok", &["compiled at first use, by "]);
    let mut command = doctor(&["--json", PATIENT]);
    command.env("PYTHON_EXEC", python()).env("FLOW_COMM_LIBRARY", &library);
    command.env("PYTHONPATH", format!("{}:{}", checkout.display(), python_path()));
    let found = Found::by(command.env("FLOW_CACHE", empty.path()).env("CXX", "/nonexistent/c++"));
    found.is("flow_torch", "advice", &["there is no /nonexistent/c++: install g++"]);
}

#[test]
fn a_wrong_libtorch_and_nccl_are_told() {
    let mut command = doctor(&["--json", PATIENT]);
    let found =
        Found::by(command.env("LIBTORCH", "/nonexistent").env("FLOW_NCCL_PATH", "/nonexistent.so"));
    found.is("libtorch", "broken", &["LIBTORCH is /nonexistent: it has no lib/libtorch_cpu.so"]);
    let (state, value, _) = found.fact("NCCL");
    assert!(state == "ok" || value.contains("/nonexistent.so: cannot open"), "{value}");
}

/// A remote shell that runs the command here, after other commands.
fn shell(folder: &Path, script: &str) -> String {
    let path = folder.join("ssh");
    executable(&path, format!("#!/bin/sh\n{script}\nexec sh -c \"$2\"\n"));
    path.to_str().unwrap().into()
}

#[test]
fn other_hosts_are_examined() {
    let folder = tempfile::tempdir().unwrap();
    let limited = shell(folder.path(), "ulimit -f 1000");
    let hosts = ["--json", PATIENT, "--hosts", "elsewhere:2,localhost", "--rsh", &limited];
    let found = Found::by(&mut doctor(&hosts));
    found.is("localhost", "ok", &["needs no ssh"]);
    found.is("elsewhere", "ok", &["flow-launch ", " there; 1 broken"]);
    found.is("elsewhere: shared memory", "broken", &["ulimit -f"]);
}

#[test]
fn a_host_that_cannot_be_reached_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let refuses = shell(folder.path(), "echo \"ssh: Permission denied for $1\" >&2; exit 255");
    let file = folder.path().join("hosts");
    fs::write(&file, "me@elsewhere slots=2\n").unwrap();
    let file = file.to_str().unwrap();
    let found = Found::by(&mut doctor(&["--json", PATIENT, "--hostfile", file, "--rsh", &refuses]));
    let advice = format!("`{refuses} me@elsewhere true` must work");
    found.is("me@elsewhere", "broken", &["ssh: Permission denied for me@elsewhere", &advice]);
    let hangs = shell(folder.path(), "sleep 1000");
    let hosts = ["--json", "--timeout=0.5", "--hosts", "elsewhere", "--rsh", &hangs];
    let found = Found::by(&mut doctor(&hosts));
    found.is("elsewhere", "broken", &["no answer in 1 s", "must work without a password"]);
}

#[test]
fn a_program_of_that_name_is_started_after_dashes() {
    let folder = tempfile::tempdir().unwrap();
    executable(folder.path().join("doctor"), "#!/bin/sh\necho the program\n");
    let path = format!("{}:{}", folder.path().display(), std::env::var("PATH").unwrap());
    let finished = run(doctor(&["--json", PATIENT]).env("PATH", &path));
    assert_contains(
        &finished.stderr,
        &["doctor is a command of flow-launch", "flow-launch -- doctor"],
    );
    let finished = run(launcher(&["--", "doctor"]).env("PATH", &path));
    assert_eq!((finished.code, finished.stdout.as_str()), (Some(0), "the program\n"));
}
