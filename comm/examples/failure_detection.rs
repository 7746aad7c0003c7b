//! How long it takes until the ranks of a job know that one of them was killed:
//! `cargo run --release -p flow-comm --example failure_detection [ROUNDS]`.
//!
//! The program starts itself as four ranks, on one node and then on two, without flow-launch. They
//! all-reduce until the last rank kills itself with SIGKILL. The others print how long after that
//! their all-reduce returned its error. The program prints the median and the slowest.

use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::ensure;
use flow_comm::{ProcessGroup, ReduceOp};

const WORLD_SIZE: usize = 4;
const COLLECTIVES: usize = 200;

fn main() -> anyhow::Result<()> {
    let argument = std::env::args().nth(1);
    if argument.as_deref() == Some("rank") {
        return rank();
    }
    let rounds = argument.map_or(Ok(20), |rounds| rounds.parse())?;
    for nodes in [1, 2] {
        let mut times = Vec::new();
        for _ in 0..rounds {
            times.extend(job(nodes)?);
        }
        times.sort_unstable();
        let median = times[times.len() / 2];
        let slowest = times[times.len() - 1];
        println!("{nodes} node(s): median {median:.1?}, slowest {slowest:.1?}");
    }
    Ok(())
}

/// Prints the time.
fn print_now() {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    println!("{}", now.as_nanos());
}

/// Prints when this rank kills itself, or when it knows that another has.
fn rank() -> anyhow::Result<()> {
    let group = ProcessGroup::from_env()?;
    let mut data = vec![1f32; 1024];
    for _ in 0..COLLECTIVES {
        group.all_reduce(&mut data, ReduceOp::Max)?;
    }
    if group.rank() == WORLD_SIZE - 1 {
        print_now();
        rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL)?;
    }
    let result = group.all_reduce(&mut data, ReduceOp::Max);
    print_now();
    ensure!(result.is_err(), "the last rank was killed, and nobody noticed");
    Ok(())
}

/// How long each of the ranks that are left took.
fn job(nodes: usize) -> anyhow::Result<Vec<Duration>> {
    let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port().to_string();
    let local_world_size = WORLD_SIZE / nodes;
    let ranks: Vec<_> = (0..WORLD_SIZE)
        .map(|rank| {
            Command::new(std::env::current_exe()?)
                .arg("rank")
                .env("RANK", rank.to_string())
                .env("WORLD_SIZE", WORLD_SIZE.to_string())
                .env("LOCAL_RANK", (rank % local_world_size).to_string())
                .env("LOCAL_WORLD_SIZE", local_world_size.to_string())
                .env("GROUP_RANK", (rank / local_world_size).to_string())
                .env("MASTER_ADDR", "127.0.0.1")
                .env("MASTER_PORT", &port)
                .stdout(Stdio::piped())
                .spawn()
        })
        .collect::<Result<_, _>>()?;
    let mut times = Vec::new();
    for (rank, child) in ranks.into_iter().enumerate() {
        let output = child.wait_with_output()?;
        ensure!(output.status.success() || rank == WORLD_SIZE - 1, "rank {rank} failed");
        times.push(Duration::from_nanos(String::from_utf8(output.stdout)?.trim().parse()?));
    }
    let killed = times.pop().unwrap_or_default();
    Ok(times.into_iter().map(|noticed| noticed.saturating_sub(killed)).collect())
}
