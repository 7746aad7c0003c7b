//! The wheel, installed as users do, under each launcher and library. No program imports it: `import
//! torch` finds the back-end.

use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

use flow_harness::cli::{launcher, run};
use flow_harness::python::{have, python, python_path, wheel};
use flow_harness::{Finished, free_port};
use tempfile::TempDir;

use crate::{is_skipped, script, torchrun};

/// The folder where the wheel is installed, with the C++ part for this PyTorch; None, said aloud,
/// where it cannot be made.
fn site() -> Option<&'static Path> {
    static FOLDER: OnceLock<Option<TempDir>> = OnceLock::new();
    if is_skipped() {
        return None;
    }
    FOLDER.get_or_init(install).as_ref().map(TempDir::path)
}

fn install() -> Option<TempDir> {
    let folder = tempfile::tempdir().unwrap();
    let site = tempfile::tempdir().unwrap();
    let file = match wheel(folder.path(), &python()) {
        Ok(file) => file,
        Err(reason) => {
            println!("SKIPPED: flow-launch's wheel: {reason}");
            return None;
        }
    };
    let mut install = Command::new("python3");
    install.args(["-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target"]);
    run(install.arg(site.path()).arg(file).env_remove("PYTHONPATH")).success();
    Some(site)
}

/// Nothing can be compiled, and nothing was: what runs is the wheel's.
fn with_wheel<'a>(command: &'a mut Command, site: &Path) -> &'a mut Command {
    let path = format!("{}:{}", site.display(), python_path());
    command
        .env("PYTHONPATH", path)
        .env("CXX", "/nonexistent/c++")
        .env("FLOW_CACHE", site.join("nothing"))
        .env("OMP_NUM_THREADS", "1")
        .env("PYTHONWARNINGS", "ignore")
}

fn is_flow(finished: &Finished) {
    assert_eq!(finished.code, Some(0), "{finished:?}");
    assert_eq!(finished.stdout, "flow Backend [2.0, 2.0, 2.0]\n".repeat(2), "{finished:?}");
}

#[test]
#[ignore = "takes minutes: see docs/torch.md"]
fn no_import_is_needed() {
    let Some(site) = site() else { return };
    let (python, script) = (python(), script("unmodified.py"));
    let flags = ["--nproc-per-node", "2", "--no-python", &python, &script];
    for (backend, replaces) in [("flow", "0"), ("gloo", "1")] {
        let mut job = launcher(&flags);
        job.arg(backend).env("FLOW_TORCH", replaces);
        is_flow(&run(with_wheel(&mut job, site)));
    }
    is_flow(&run(with_wheel(torchrun().args([&script, "flow"]), site)));
}

/// Also before torch, which then imports the package by its entry point while that is being
/// imported.
#[test]
#[ignore = "takes minutes: see docs/torch.md"]
fn an_import_is_allowed() {
    let Some(site) = site() else { return };
    let mut import = Command::new(python());
    import.args(["-c", "import flow_torch, torch; print(torch.distributed.Backend.FLOW)"]);
    assert_eq!(run(with_wheel(&mut import, site)).success(), "flow\n");
}

/// mpirun with two ranks, and a store for them; None, said aloud, where there is no mpirun.
fn mpirun() -> Option<Command> {
    let mut command = Command::new("mpirun");
    if Command::new("mpirun").arg("--version").output().is_err() {
        println!("SKIPPED: flow_torch under mpirun: there is no mpirun");
        return None;
    }
    command.args(["--allow-run-as-root", "--oversubscribe", "-n", "2", &python()]);
    command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", free_port().to_string());
    Some(command)
}

#[test]
#[ignore = "takes minutes: see docs/torch.md"]
fn under_mpirun() {
    let Some(site) = site() else { return };
    let Some(mut mpirun) = mpirun() else { return };
    is_flow(&run(with_wheel(mpirun.args([&script("unmodified.py"), "flow"]), site)));
}

/// What `libraries.py` prints on its ranks, with flow and with gloo: the same weights.
fn trains_as_over_gloo(site: &Path, start: impl Fn() -> Command, library: &str) {
    let weights = |replaces: &str, backend: &str| {
        let mut command = start();
        command.args([&script("libraries.py"), library]).env("FLOW_TORCH", replaces);
        let finished = run(with_wheel(&mut command, site).env("GLOO_SOCKET_IFNAME", "lo"));
        let begin = format!("result: {backend} ");
        let lines = finished.stdout.lines().filter_map(|line| line.strip_prefix(&begin));
        let lines: Vec<_> = lines.map(String::from).collect();
        assert!(finished.code == Some(0) && lines.len() == 2, "{finished:?}");
        assert_eq!(lines[0], lines[1], "{finished:?}");
        lines
    };
    assert_eq!(weights("1", "flow"), weights("0", "gloo"));
}

#[test]
#[ignore = "takes minutes: see docs/torch.md"]
fn accelerate() {
    let Some(site) = site() else { return };
    if !have("accelerate") {
        return;
    }
    let launch = || {
        let mut command = Command::new(python());
        // What the launcher calls several GPUs are several processes; the program says they have CPUs.
        command.args(["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]);
        command
    };
    trains_as_over_gloo(site, launch, "accelerate");
    if mpirun().is_some() {
        trains_as_over_gloo(site, || mpirun().unwrap(), "accelerate");
    }
}

#[test]
#[ignore = "takes minutes: see docs/torch.md"]
fn lightning() {
    let Some(site) = site() else { return };
    if !have("lightning") {
        return;
    }
    for library in ["lightning", "fabric"] {
        // Lightning starts the other rank itself.
        trains_as_over_gloo(site, || Command::new(python()), library);
        trains_as_over_gloo(site, torchrun, library);
    }
}
