//! The same binary, started by what its users have: OpenMPI's mpirun, torchrun.

use std::process::Command;

use flow_tests::{Process, TEST_TIMEOUT, assert_contains, program, python};

/// The end of OneFlow's documented example, which takes two ranks that found each other.
fn trains(mut command: Command) {
    command.env_remove("OMP_NUM_THREADS");
    let output = Process::start(command).finish(TEST_TIMEOUT).success();
    assert_contains(
        &output,
        &["500/500 loss:4.547473508864641e-12", "500/500 loss:6.184563972055912e-11"],
    );
}

#[test]
fn by_mpirun() {
    if Command::new("mpirun").arg("--version").output().is_err() {
        println!(
            "SKIPPED: starting by mpirun: there is none (Debian, Ubuntu: apt-get install \
             openmpi-bin)"
        );
        return;
    }
    let mpirun = |ranks: &str| {
        let mut command = Command::new("mpirun");
        command
            .args(["--allow-run-as-root", "--oversubscribe", "-np", ranks])
            .arg(program("train"));
        command
    };
    trains(mpirun("2"));
    let output = Process::start(mpirun("4")).finish(TEST_TIMEOUT).success();
    assert_eq!(output.matches("w: [[2.0000], [3.0000]]").count(), 4, "{output}");
}

#[test]
fn by_torchrun() {
    if !python::have("torch") {
        return;
    }
    let mut command = Command::new(python::python());
    command.env("PYTHONPATH", python::startup());
    command.args([
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--no-python",
    ]);
    command.arg(program("train"));
    trains(command);
}
