//! Ranks that do not join, or wrongly.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::Result;
use flow_comm::ProcessGroup;
use flow_harness::{DETECTION_LIMIT, Process, assert_contains, program};
use rustix::process::Signal;

use super::lost::shared_memory_of;
use super::report::{describe, said};
use crate::registry::{Scenario, Test, by_hand, launched, process, signal};

pub const SCENARIOS: &[Scenario] = &[
    process("contradictions_in_the_environment_are_explained", join, &[by_hand(&[1])])
        .checked_by(explains_contradictions),
    process("two_processes_with_the_same_rank_are_named", join, &[by_hand(&[4])])
        .checked_by(names_twins),
    process(
        "ranks_that_never_join_are_named",
        join,
        &[by_hand(&[3]).env(&[("FLOW_TIMEOUT", "1.5")])],
    )
    .checked_by(names_the_missing),
    process("a_rank_that_dies_while_it_joins_is_named", join, &[by_hand(&[4])])
        .checked_by(names_the_dead),
    process("rank_0_that_ends_well_without_having_joined_is_named", join, &[launched(3)])
        .checked_by(|test| names_who_ended(test, 0)),
    process("rank_1_that_ends_well_without_having_joined_is_named", join, &[launched(3)])
        .checked_by(|test| names_who_ended(test, 1)),
];

fn join() -> Result<()> {
    match ProcessGroup::from_env() {
        Ok(_) => println!("no error"),
        Err(error) => println!("{}", describe(&error)),
    }
    Ok(())
}

/// What one process prints with these variables only.
fn alone(test: &Test, variables: &[(&str, &str)]) -> String {
    let mut command = Command::new(program("worker"));
    command.arg(&test.name).envs(variables.iter().copied());
    let lines = said(Process::start(command));
    assert_eq!(lines.len(), 1, "{lines:?}");
    lines.concat()
}

fn explains_contradictions(test: &Test) {
    let cases: [(&[(&str, &str)], &str); 6] = [
        (
            &[("RANK", "1"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2")],
            "Environment: the job has 4 ranks, 2 of them on this node: set MASTER_ADDR to the host of rank 0, and \
             MASTER_PORT to a free port there",
        ),
        (
            &[("RANK", "2"), ("WORLD_SIZE", "2")],
            "Environment: RANK=2 but WORLD_SIZE=2: RANK must be 0 to 1",
        ),
        (
            &[("RANK", "0")],
            "Environment: RANK=0 but WORLD_SIZE is not set: set both, or neither to run alone",
        ),
        (
            &[("WORLD_SIZE", "2")],
            "Environment: WORLD_SIZE=2 but RANK is not set: set both, or neither to run alone",
        ),
        (
            &[("RANK", "one"), ("WORLD_SIZE", "2")],
            "Environment: RANK=\"one\": must be a whole number, 0 or more",
        ),
        (
            &[("FLOW_TIMEOUT", "abc")],
            "Argument: rank 0: from_env: FLOW_TIMEOUT=abc must be a positive number of seconds",
        ),
    ];
    for (variables, expected) in cases {
        assert_eq!(alone(test, variables), expected);
    }
    assert_eq!(alone(test, &[]), "no error");
    assert_eq!(alone(test, &[("FLOW_TIMEOUT", "1e19")]), "no error");
}

/// The fourth process is a second rank 1. Rank 2 comes when one of the two has been refused.
fn names_twins(test: &Test) {
    let mut commands = test.commands();
    for command in &mut commands {
        command.env("WORLD_SIZE", "3").env("LOCAL_WORLD_SIZE", "3");
    }
    commands[3].env("RANK", "1").env("LOCAL_RANK", "1");
    let last = commands.remove(2);
    let mut ranks: Vec<Process> = commands.into_iter().map(Process::start).collect();
    let pids: Vec<u32> = ranks.iter().map(Process::pid).collect();
    let deadline = Instant::now() + DETECTION_LIMIT;
    // Either of the two may come first.
    let refused = loop {
        if let Some(refused) = (1..3).find(|&rank| ranks[rank].has_ended()) {
            break refused;
        }
        assert!(Instant::now() < deadline, "no twin is refused");
        std::thread::sleep(Duration::from_millis(10));
    };
    let cause = format!(
        "process {} has joined as rank 1 before: every process needs its own RANK",
        pids[3 - refused]
    );
    assert_contains(&said(ranks.remove(refused))[0], &["Join: rank 1: ", &cause]);
    ranks.push(Process::start(last));
    for rank in ranks {
        assert_eq!(said(rank), ["no error"]);
    }
}

fn names_the_missing(test: &Test) {
    let only = test.commands().remove(0);
    assert_eq!(
        said(Process::start(only)),
        ["Join: rank 0: joining the process group failed: ranks 1, 2 have not joined within 1.5s"]
    );
}

fn names_the_dead(test: &Test) {
    let commands = test.commands().into_iter().take(3);
    let mut ranks: Vec<Process> = commands.map(Process::start).collect();
    let deadline = Instant::now() + DETECTION_LIMIT;
    while ranks.iter().any(|rank| shared_memory_of(&rank.pid().to_string()).is_empty()) {
        assert!(Instant::now() < deadline, "the three do not join");
        std::thread::sleep(Duration::from_millis(10));
    }
    let victim = ranks.pop().expect("there are three");
    signal(&victim, Signal::KILL);
    let died = format!("rank 2 (pid {}) died before all ranks had joined", victim.pid());
    for (rank, process) in ranks.into_iter().enumerate() {
        assert_contains(&said(process)[0], &[&format!("Join: rank {rank}: "), &died]);
    }
}

/// That is no failure to the launcher, which therefore stops nobody. Rank 2 comes when the others
/// have given up.
fn names_who_ended(test: &Test, ended: usize) {
    let worker = format!("{} {}", program("worker").display(), test.name);
    let script = format!("[ $RANK = {ended} ] && exit; [ $RANK = 2 ] && sleep 2; exec {worker}");
    let mut command = Command::new(program("flow-launch"));
    command.args(["--nproc_per_node", "3", "sh", "-c", &script]);
    let lines = said(Process::start(command));
    assert_eq!(lines.len(), 2, "{lines:?}");
    let cause = format!("rank {ended} ended with exit code 0 before all ranks had joined");
    lines.iter().for_each(|line| assert_contains(line, &["Join: rank ", &cause]));
}
