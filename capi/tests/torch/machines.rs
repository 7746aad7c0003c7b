//! How ranks on several machines meet.

use std::process::Command;

use flow_harness::net::{Net, ipv4};
use flow_harness::python::python;
use flow_harness::{Process, TEST_TIMEOUT, assert_contains, job};

use crate::{PARTS, is_skipped, script, with_flow, with_part};

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

/// The same as on one: all collectives, messages with tags and from any source, forms of tensors,
/// sub-groups, timeouts.
#[test]
fn what_is_over_gloo_is_the_same_on_two_machines() {
    if is_skipped() {
        return;
    }
    for (part, (name, ranks, line, lines)) in PARTS.into_iter().flat_map(|part| {
        [("collectives.py", 3, "same", 1), ("limits.py", 2, ": good", 5)].map(|of| (part, of))
    }) {
        let Some(net) = Net::new(2) else { return };
        let start = |number: usize| {
            let mut command = Command::new(python());
            let (number_, ranks) = (number.to_string(), ranks.to_string());
            let variables = [
                ("RANK", number_.as_str()),
                ("WORLD_SIZE", &ranks),
                ("MASTER_ADDR", &ipv4(0)),
                ("MASTER_PORT", "29512"),
                ("GLOO_SOCKET_IFNAME", "eth0"),
            ];
            net.start(number % 2, with_part(command.arg(script(name)), part).envs(variables))
        };
        for agent in (0..ranks).map(start).collect::<Vec<_>>() {
            let finished = agent.finish();
            let good = finished.stdout.lines().filter(|printed| printed.ends_with(line)).count();
            assert!(finished.code == Some(0) && good == lines, "{name}: {finished:?}");
        }
    }
}

/// It is named with its machine.
#[test]
fn a_rank_that_is_killed_on_another_machine() {
    if is_skipped() {
        return;
    }
    for how in ["backward", "ddp"] {
        let Some(net) = Net::new(2) else { return };
        let store = std::env::temp_dir().join(job());
        let start = |number: usize| {
            let mut command = Command::new(python());
            command.args([&script("killed.py"), how, store.to_str().unwrap(), &number.to_string()]);
            net.start(number, with_flow(&mut command).env("MASTER_ADDR", ipv4(0)))
        };
        let [first, second] = [0, 1].map(start);
        let first = first.finish();
        second.finish();
        assert_eq!(first.code, Some(3), "{first:?}");
        assert_contains(&first.stdout, &["rank 0: all_reduce #", " failed: rank 1 (pid ", "node1"]);
        let _ = std::fs::remove_file(store);
    }
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
