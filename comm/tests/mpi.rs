//! Groups over several nodes, connected by MPI: started by the real mpirun, on nodes that are all
//! this machine.
#![cfg(feature = "mpi")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

/// Two ranks for each node, as flow-launch would tell them.
const NODES_OF_TWO: &str = r#"
    rank=$OMPI_COMM_WORLD_RANK
    export RANK=$rank WORLD_SIZE=$OMPI_COMM_WORLD_SIZE FLOW_TRANSPORT=${FLOW_TRANSPORT-mpi}
    export LOCAL_RANK=$((rank % 2)) LOCAL_WORLD_SIZE=2 GROUP_RANK=$((rank / 2))
    exec "$@""#;
/// The same as mpirun would tell them, each node with a host name of its own.
const HOSTS_OF_TWO: &str = r#"
    export OMPI_COMM_WORLD_LOCAL_RANK=$((OMPI_COMM_WORLD_RANK % 2)) OMPI_COMM_WORLD_LOCAL_SIZE=2
    exec unshare --uts sh -c 'hostname node$((OMPI_COMM_WORLD_RANK / 2)); exec "$@"' sh "$@""#;

fn works(program: &str, arguments: &[&str]) -> bool {
    Command::new(program).args(arguments).output().is_ok_and(|output| output.status.success())
}

/// Whether there is an mpirun; if not, says so.
fn has_mpirun() -> bool {
    let has = works("mpirun", &["--version"]);
    if !has {
        println!("SKIPPED: groups over MPI: there is no mpirun (Debian, Ubuntu: apt-get install openmpi-bin)");
    }
    has
}

/// A program of comm/examples that the ranks run.
fn program(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let target = test.ancestors().nth(3).unwrap();
    let built = Command::new(env!("CARGO"))
        .args([
            "build",
            "--release",
            "--quiet",
            "-p",
            "flow-comm",
            "--features",
            "mpi",
            "--example",
            name,
        ])
        .env("CARGO_TARGET_DIR", target)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .status();
    assert!(built.unwrap().success());
    target.join("release/examples").join(name)
}

/// Runs four ranks of `collectives`, each by a shell script, with some variables; `name` is that of
/// the test.
fn run(name: &str, script: &str, arguments: &[&str], variables: &[(&str, &str)]) -> (bool, String) {
    run_program("collectives", name, script, arguments, variables)
}

fn run_program(
    example: &str,
    name: &str,
    script: &str,
    arguments: &[&str],
    variables: &[(&str, &str)],
) -> (bool, String) {
    let job = format!("{name}-{}", std::process::id());
    let mut command = Command::new("timeout");
    command.args([
        "120",
        "mpirun",
        "--allow-run-as-root",
        "--oversubscribe",
        "-np",
        "4",
        "sh",
        "-c",
        script,
        "sh",
    ]);
    command.arg(program(example)).args(arguments).envs(variables.iter().copied());
    command.env("FLOW_TEST_JOB", &job).env("TMPDIR", env!("CARGO_TARGET_TMPDIR"));
    let Output { status, stdout, stderr } = command.output().unwrap();
    let output = String::from_utf8_lossy(&[stdout, stderr].concat()).into_owned();
    assert_ne!(status.code(), Some(124), "it hangs: {output}");
    let begin = Instant::now();
    while is_there(&job) {
        assert!(begin.elapsed() < Duration::from_secs(10), "processes are left: {output}");
        std::thread::sleep(Duration::from_millis(50));
    }
    (status.success(), output)
}

/// Whether there is a process of the job.
fn is_there(job: &str) -> bool {
    let entry = format!("FLOW_TEST_JOB={job}\0");
    let is_of_job = |process: &Path| {
        std::fs::read(process.join("environ")).is_ok_and(|environ| {
            environ.windows(entry.len()).any(|window| window == entry.as_bytes())
        })
    };
    std::fs::read_dir("/proc").unwrap().flatten().any(|process| is_of_job(&process.path()))
}

#[track_caller]
fn assert_all_well((success, output): (bool, String)) {
    assert!(success, "{output}");
    assert!(
        (0..4).all(|rank| output.contains(&format!("rank {rank} of 4: all is well"))),
        "{output}"
    );
}

#[test]
fn collectives_groups_and_messages() {
    if has_mpirun() {
        assert_all_well(run("collectives", NODES_OF_TWO, &[], &[]));
    }
}

#[test]
fn every_rank_on_a_node_of_its_own() {
    let script =
        NODES_OF_TWO.replace("% 2", "% 1").replace("/ 2", "/ 1").replace("SIZE=2", "SIZE=1");
    if has_mpirun() {
        assert_all_well(run("alone", &script, &[], &[]));
    }
}

#[test]
fn on_one_node_mpi_is_not_needed() {
    if has_mpirun() {
        assert_all_well(run("one", r#"exec "$@""#, &[], &[]));
    }
}

#[test]
fn mpirun_alone_is_enough() {
    if !has_mpirun() {
        return;
    }
    if !works("unshare", &["--uts", "hostname", "node0"]) {
        println!("SKIPPED: hosts started by mpirun: no host name can be set in a namespace here");
        return;
    }
    // The names of the hosts lead nowhere.
    let variables = [("FLOW_LOCAL_ADDR", "127.0.0.1")];
    assert_all_well(run("hosts", HOSTS_OF_TWO, &[], &variables));
    let (success, output) =
        run("by-tcp", HOSTS_OF_TWO, &[], &[("FLOW_TRANSPORT", "tcp"), variables[0]]);
    assert!(!success && output.contains("set MASTER_ADDR"), "{output}");
}

#[test]
fn the_death_of_a_rank_ends_the_job() {
    for rank in ["2", "3"] {
        if has_mpirun() {
            let (success, output) = run("killed", NODES_OF_TWO, &["killed", rank], &[]);
            assert!(!success && output.contains("signal 9"), "{output}");
        }
    }
}

#[test]
fn a_timeout_names_who_is_missing() {
    for rank in ["2", "3"] {
        if has_mpirun() {
            let (success, output) =
                run("late", NODES_OF_TWO, &["late", rank], &[("FLOW_TIMEOUT", "3")]);
            assert!(
                !success && output.contains(&format!("after 3s: waited for rank {rank} (pid")),
                "{output}"
            );
        }
    }
}

#[test]
fn ranks_that_mpi_does_not_know_are_told_what_to_do() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = free.local_addr().unwrap().port().to_string();
    drop(free);
    let alone = [
        ("RANK", "0"),
        ("WORLD_SIZE", "2"),
        ("LOCAL_RANK", "0"),
        ("LOCAL_WORLD_SIZE", "1"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", port.as_str()),
    ];
    let started = |transport: &str| {
        let output = Command::new(program("collectives"))
            .envs(alone)
            .env("FLOW_TRANSPORT", transport)
            .output()
            .unwrap();
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let error = started("mpi");
    assert!(
        error.contains("rank 0 of 2, but rank 0 of 1 to MPI: start the job with the mpirun"),
        "{error}"
    );
    let error = started("ucx");
    assert!(error.contains("there is no transport \"ucx\" here, only tcp, mpi"), "{error}");
}

#[test]
fn a_program_may_use_mpi_itself() {
    if !has_mpirun() {
        return;
    }
    let own_mpi = |threading| run_program("own_mpi", "own-mpi", NODES_OF_TWO, &[threading], &[]);
    assert_all_well(own_mpi("multiple"));
    for (argument, reason) in [
        (
            "serialized",
            "for Serialized threads, and Flow has one that calls MPI as well: initialize it with MPI_THREAD_MULTIPLE",
        ),
        ("finalized", "the program has finalized MPI already"),
    ] {
        let (success, output) = own_mpi(argument);
        assert!(!success && output.contains(reason), "{output}");
    }
}
