//! How ranks on several machines meet.

use std::process::Command;

use flow_harness::net::{Agent, Net, ipv4};
use flow_harness::python::python;
use flow_harness::{Process, TEST_TIMEOUT, job};

use crate::several::Several;
use crate::{PARTS, is_named, is_skipped, killed, script, with_flow};

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
    for (name, ranks, line, lines) in
        [("collectives.py", 3, "same", 1), ("limits.py", 2, ": good", 5)]
    {
        let Some(net) = Net::new(2) else { return };
        let mut several = Several::new();
        for (part, port) in PARTS.into_iter().zip(["29512", "29513"]) {
            several.add(part, &[("MASTER_PORT", port)], name, &[]);
        }
        let start = |number: usize| {
            let mut command = Command::new(python());
            let variables = [
                ("RANK", number.to_string()),
                ("WORLD_SIZE", ranks.to_string()),
                ("MASTER_ADDR", ipv4(0)),
                ("GLOO_SOCKET_IFNAME", "eth0".into()),
            ];
            net.start(number % 2, with_flow(command.args(several.words())).envs(variables))
        };
        let agents: Vec<_> = (0..ranks).map(start).collect();
        agents.into_iter().for_each(|agent| several.is_good(ranks, agent.finish()));
        for printed in several.printed(ranks) {
            let good = printed.stdout.lines().filter(|printed| printed.ends_with(line)).count();
            assert_eq!(good, ranks * lines, "{name}: {printed:?}");
        }
    }
}

/// It is named with its machine.
#[test]
fn a_rank_that_is_killed_on_another_machine() {
    if is_skipped() {
        return;
    }
    let Some(net) = Net::new(2) else { return };
    let folder = tempfile::tempdir().unwrap();
    let cases = ["backward", "ddp"];
    let start = |number: usize| {
        let mut command = killed(&folder.path().join("store"), number, &cases);
        net.start(number, command.env("MASTER_ADDR", ipv4(0)))
    };
    is_named([0, 1].map(start).map(Agent::finish), &cases, "node1");
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
