//! Jobs of the workspace's programs, under the real flow-launch or with ranks started by hand.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::once::once_in_a_run;
use crate::{Process, TEST_TIMEOUT, free_port, root};

/// The program or C library `name` of this workspace, of the running test's profile, and as new as its sources.
pub fn program(name: &str) -> PathBuf {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    let path = FOLDER.get_or_init(|| {
        let own = std::env::current_exe().expect("a program knows its own path");
        let folder = own.parent().expect("it lies in target/<profile>, a test in its deps");
        // A worker that runs its tests is as new as the others.
        if !folder.ends_with("deps") {
            return folder.to_owned();
        }
        let folder = folder.parent().expect("it is in target/<profile>");
        let flow_launch = std::env::var("CARGO_PKG_NAME").is_ok_and(|own| own == "flow-launch");
        // Cargo has built it for its own tests, which need no libtorch: other programs do.
        if !flow_launch {
            let build = || {
                build(root(), folder);
                Ok(())
            };
            once_in_a_run("programs", build).expect("they are built");
        }
        folder.to_owned()
    });
    let path = path.join(name);
    assert!(path.is_file(), "{} is missing: is it a program of this workspace?", path.display());
    path
}

/// Has cargo build what is older than its sources among the programs of the workspace of `package`,
/// into `target/<profile>`, the `folder`. Otherwise a test of one package would run the programs of
/// others as they happen to lie there. Takes no time where all are new; other processes that do the
/// same wait for cargo's lock.
pub fn build(package: &Path, folder: &Path) {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| env!("CARGO").into());
    let profile = folder.file_name().and_then(|name| name.to_str()).expect("a profile has a name");
    let profile = if profile == "debug" { "dev" } else { profile };
    let mut command = Command::new(cargo);
    command.args(["build", "--quiet", "--workspace", "--lib", "--bins", "--examples"]);
    command.args(["--profile", profile]);
    command
        .env("CARGO_TARGET_DIR", folder.parent().expect("it lies in target"))
        .current_dir(package);
    let output = command.output().expect("cargo starts");
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// `flow-launch --nproc_per_node <ranks> <flags> <worker> <arguments>`, to be started.
pub fn launcher(ranks: usize, flags: &[&str], worker: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(program("flow-launch"));
    command
        .arg("--nproc_per_node")
        .arg(ranks.to_string())
        .args(flags)
        .arg(program(worker))
        .args(arguments);
    // Less than AMX: some virtual machines announce it and let nobody use it, and oneDNN "could not
    // create a primitive".
    command.env("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16");
    command
}

/// Runs `worker` as `ranks` ranks under flow-launch to its good end; returns what they wrote.
pub fn launch(ranks: usize, worker: &str, arguments: &[&str]) -> String {
    Process::start(launcher(ranks, &[], worker, arguments)).finish(TEST_TIMEOUT).success()
}

/// A worker to be started by hand as rank `rank` of the job `job`.
pub fn rank(job: &str, rank: usize, size: usize, worker: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(program(worker));
    command.env("RANK", rank.to_string()).env("WORLD_SIZE", size.to_string());
    command.env("TORCHELASTIC_RUN_ID", job).args(arguments);
    command
}

/// Starts `size` ranks by hand: nobody stops the others when one fails.
pub fn ranks(size: usize, worker: &str, arguments: &[&str]) -> Vec<Process> {
    ranks_on_nodes(&[size], worker, arguments)
}

/// Starts ranks by hand on several nodes of this machine: so many on each.
pub fn ranks_on_nodes(nodes: &[usize], worker: &str, arguments: &[&str]) -> Vec<Process> {
    rank_commands(nodes, worker, arguments).into_iter().map(Process::start).collect()
}

/// The ranks of a job on nodes of this machine, so many on each, to be started.
pub fn rank_commands(nodes: &[usize], worker: &str, arguments: &[&str]) -> Vec<Command> {
    let job = job();
    let size = nodes.iter().sum();
    if nodes.len() == 1 {
        return (0..size).map(|r| rank(&job, r, size, worker, arguments)).collect();
    }
    let port = free_port().to_string();
    let mut commands = Vec::new();
    for (node, &count) in nodes.iter().enumerate() {
        for local in 0..count {
            let mut command = rank(&job, commands.len(), size, worker, arguments);
            command.env("LOCAL_RANK", local.to_string()).env("LOCAL_WORLD_SIZE", count.to_string());
            command
                .env("GROUP_RANK", node.to_string())
                .env("MASTER_ADDR", "127.0.0.1")
                .env("MASTER_PORT", &port);
            commands.push(command);
        }
    }
    commands
}

/// Becomes a worker that runs the tests of its scenarios, with this test's arguments.
pub fn run_tests_of(worker: PathBuf) -> ! {
    let error = Command::new(&worker).arg("--test").args(std::env::args_os().skip(1)).exec();
    panic!("{}: {error}", worker.display());
}

/// A name for a job that no other has.
pub fn job() -> String {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    format!("flow-tests-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed))
}
