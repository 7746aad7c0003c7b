//! How ranks on several machines meet.

use std::process::Command;

use flow_harness::net::{ipv4, Net};
use flow_harness::python::python;
use flow_harness::{job, Process, TEST_TIMEOUT};

use crate::{is_skipped, script, with_flow};

/// A rank of `machines.py`.
fn rank(number: usize, store: &str) -> Command {
    let mut command = Command::new(python());
    command.arg(script("machines.py")).args([store, &number.to_string()]);
    with_flow(&mut command);
    command
}

fn expected(number: usize) -> String {
    format!("rank {number}: 3 [6, 6] [0, 1, 2]\n")
}

/// Three ranks that call themselves two machines. One of them, and no other, was started by
/// flow-launch, and would use its store.
#[test]
fn ranks_meet_by_one_store() {
    if is_skipped() {
        return;
    }
    let store = std::env::temp_dir().join(job());
    let start = |number| {
        let mut command = rank(number, store.to_str().unwrap());
        if number == 1 {
            let launched = [("RANK", "1"), ("WORLD_SIZE", "3"), ("FLOW_TOKEN", "secret")];
            command.env("FLOW_STORE", "unix://nobody").envs(launched);
        }
        Process::start(command)
    };
    for (number, process) in [0, 1, 2].map(start).into_iter().enumerate() {
        let finished = process.finish(TEST_TIMEOUT);
        assert_eq!(finished.stdout, expected(number), "{finished:?}");
    }
    let _ = std::fs::remove_file(store);
}

/// Two machines, and MASTER_ADDR is not the one of rank 0.
#[test]
fn the_first_rank_is_on_another_machine_than_the_store() {
    if is_skipped() {
        return;
    }
    let Some(net) = Net::new(2) else { return };
    let store = format!("{}:29511", ipv4(1));
    let start = |number| net.start(number / 2, &rank(number, &store));
    for (number, agent) in [0, 1, 2].map(start).into_iter().enumerate() {
        let finished = agent.finish();
        assert_eq!(finished.stdout, expected(number), "{finished:?}");
    }
}
