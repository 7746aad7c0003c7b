//! Groups whose nodes MPI connects, started by the real mpirun: what is particular to MPI. The
//! scenarios of other files run over MPI too.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use ::mpi::Threading;
use ::mpi::collective::SystemOperation;
use ::mpi::traits::CommunicatorCollectives;
use anyhow::{Context, Result, ensure};
use flow_comm::{ProcessGroup, ReduceOp};
use flow_harness::cli::until;
use flow_harness::{DETECTION_LIMIT, Finished, Process, assert_contains, free_port};
use rustix::process::{Signal, getpid, kill_process};

use crate::registry::{Job, Scenario, Test, mpirun, process, scenario};

const NODES: &[Job] = &[mpirun(&[2, 2])];

pub const SCENARIOS: &[Scenario] = &[
    scenario("the_death_of_a_leader_ends_the_job", |group| killed(group, 2), NODES)
        .checked_by(death_ends_the_job),
    scenario("the_death_of_another_rank_ends_the_job", |group| killed(group, 3), NODES)
        .checked_by(death_ends_the_job),
    scenario("a_timeout_names_a_missing_leader", |group| late(group, 2), NODES)
        .checked_by(|test| timeout_names(test, 2)),
    scenario("a_timeout_names_another_missing_rank", |group| late(group, 3), NODES)
        .checked_by(|test| timeout_names(test, 3)),
    scenario("hosts_that_only_mpirun_knows_are_enough", sum_of_ranks, NODES).checked_by(hosts),
    process("ranks_that_mpi_does_not_know_learn_what_to_do", join, NODES).checked_by(unknown),
    process("a_program_may_use_mpi_itself", use_mpi, NODES),
    process("a_program_that_uses_mpi_on_one_thread_is_refused", || serialized().map(drop), NODES)
        .checked_by(|test| {
            let reason = "for Serialized threads, and Flow has one that calls MPI as well: \
                          initialize it with MPI_THREAD_MULTIPLE";
            refused(test, reason);
        }),
    process("a_program_that_has_finalized_mpi_is_refused", finalized, NODES)
        .checked_by(|test| refused(test, "the program has finalized MPI already")),
];

fn sum_of_ranks(group: &ProcessGroup) -> Result<()> {
    let mut sum = [group.rank() as i64];
    group.all_reduce(&mut sum, ReduceOp::Sum)?;
    ensure!(sum == [6], "{sum:?}");
    Ok(())
}

fn killed(group: &ProcessGroup, rank: usize) -> Result<()> {
    group.barrier()?;
    if group.rank() == rank {
        kill_process(getpid(), Signal::KILL)?;
    }
    sum_of_ranks(group)
}

fn late(group: &ProcessGroup, rank: usize) -> Result<()> {
    group.barrier()?;
    if group.rank() == rank {
        std::thread::sleep(Duration::from_secs(60));
    }
    group.set_timeout(Duration::from_secs(3));
    sum_of_ranks(group)
}

fn join() -> Result<()> {
    ProcessGroup::from_env()?;
    Ok(())
}

/// Runs it to its end, after which no process is left.
fn finish(test: &Test, mut command: Command) -> Finished {
    let job = test.folder.path().display().to_string();
    command.env("FLOW_TEST_JOB", &job);
    let finished = Process::start(command).finish(DETECTION_LIMIT);
    until("no process of the job is left", || !is_there(&job));
    finished
}

/// Whether there is a process of the job.
fn is_there(job: &str) -> bool {
    let entry = format!("FLOW_TEST_JOB={job}\0");
    let is_of_job = |process: &Path| {
        std::fs::read(process.join("environ")).is_ok_and(|environ| {
            environ.windows(entry.len()).any(|window| window == entry.as_bytes())
        })
    };
    let processes = std::fs::read_dir("/proc").expect("/proc is there");
    processes.flatten().any(|process| is_of_job(&process.path()))
}

fn fails(test: &Test, reasons: &[&str]) {
    let finished = finish(test, test.commands().remove(0));
    assert_ne!(finished.code, Some(0), "{finished:?}");
    assert_contains(&(finished.stdout + &finished.stderr), reasons);
}

fn death_ends_the_job(test: &Test) {
    fails(test, &["signal 9"]);
}

fn timeout_names(test: &Test, rank: usize) {
    fails(test, &[&format!("after 3s: waited for rank {rank} (pid")]);
}

fn refused(test: &Test, reason: &str) {
    fails(test, &[reason]);
}

/// Each node has a host name of its own, which leads nowhere; no launcher says what nodes there
/// are.
fn hosts(test: &Test) {
    const SCRIPT: &str = r#"
        export OMPI_COMM_WORLD_LOCAL_RANK=$((OMPI_COMM_WORLD_RANK % 2)) OMPI_COMM_WORLD_LOCAL_SIZE=2
        exec unshare --uts sh -c 'hostname node$((OMPI_COMM_WORLD_RANK / 2)); exec "$@"' sh "$@""#;
    let probe = Command::new("unshare").args(["--uts", "hostname", "node0"]).output();
    if !probe.is_ok_and(|output| output.status.success()) {
        println!("SKIPPED: hosts started by mpirun: no host name can be set in a namespace here");
        return;
    }
    let command = |transport: Option<&str>| {
        let mut command = test.mpirun(4, SCRIPT);
        command.env("FLOW_LOCAL_ADDR", "127.0.0.1");
        command.envs(transport.map(|transport| ("FLOW_TRANSPORT", transport)));
        command
    };
    let passed = format!("{} passed\n", test.name).repeat(4);
    assert_eq!(finish(test, command(None)).success(), passed);
    let by_tcp = finish(test, command(Some("tcp")));
    assert!(by_tcp.code != Some(0) && by_tcp.stderr.contains("set MASTER_ADDR"), "{by_tcp:?}");
}

fn unknown(test: &Test) {
    let port = free_port().to_string();
    let error = |transport: &str| {
        let mut command = Command::new(std::env::current_exe().expect("it knows its own path"));
        command.arg(&test.name).env("RANK", "0").env("WORLD_SIZE", "2");
        command
            .env("LOCAL_RANK", "0")
            .env("LOCAL_WORLD_SIZE", "1")
            .env("FLOW_TRANSPORT", transport);
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port);
        let finished = Process::start(command).finish(DETECTION_LIMIT);
        assert_ne!(finished.code, Some(0), "{finished:?}");
        finished.stderr
    };
    let ranks = "rank 0 of 2, but rank 0 of 1 to MPI: start the job with the mpirun";
    assert_contains(&error("mpi"), &[ranks]);
    assert_contains(&error("ucx"), &["there is no transport \"ucx\" here, only tcp, mpi"]);
}

/// Collectives of MPI and of a group at once.
fn use_mpi() -> Result<()> {
    let (universe, provided) = ::mpi::initialize_with_threading(Threading::Multiple)
        .context("MPI is initialized already")?;
    ensure!(provided >= Threading::Multiple, "this MPI is for {provided:?} threads only");
    let world = universe.world();
    let group = ProcessGroup::from_env()?;
    let rank = group.rank();
    let size = group.world_size();
    for round in 0..100 {
        let own = rank as i64 + round;
        let mut sums = [0, 0];
        std::thread::scope(|scope| {
            let by_group = scope.spawn(|| -> Result<i64> {
                let mut data = [own];
                group
                    .new_group(&(0..size).collect::<Vec<_>>())?
                    .context("all are in it")?
                    .all_reduce(&mut data, ReduceOp::Sum)?;
                Ok(data[0])
            });
            world.all_reduce_into(&own, &mut sums[0], SystemOperation::sum());
            sums[1] = by_group.join().expect("it does not panic")?;
            anyhow::Ok(())
        })?;
        ensure!(sums[0] == sums[1], "rank {rank}: {sums:?} in round {round}");
    }
    // A group that outlives MPI is of no more use, and does no harm.
    drop(universe);
    std::thread::sleep(Duration::from_millis(100));
    ensure!(group.barrier().is_err(), "MPI is finalized");
    Ok(())
}

fn serialized() -> Result<ProcessGroup> {
    let _universe = ::mpi::initialize_with_threading(Threading::Serialized)
        .context("MPI is initialized already")?;
    Ok(ProcessGroup::from_env()?)
}

fn finalized() -> Result<()> {
    drop(::mpi::initialize_with_threading(Threading::Multiple));
    join()
}
