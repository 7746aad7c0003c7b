//! Ranks that die, leave or abort.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::Result;
use flow_comm::ProcessGroup;
use flow_harness::{DETECTION_LIMIT, assert_contains};
use rustix::process::Signal;

use super::endless::{Loop, endless, looping};
use super::report::{THREE, report, said, sleep_until_killed, sum};
use crate::registry::{Scenario, Test, by_hand, process, scenario, signal};

pub const SCENARIOS: &[Scenario] = &[
    scenario("killed_in_small_all_reduces", |group| endless(group, Loop::Small, None), THREE)
        .checked_by(|test| killed(test, &["all_reduce #"])),
    scenario("killed_in_all_reduces_in_place", |group| endless(group, Loop::Shared, None), THREE)
        .checked_by(|test| killed(test, &["all_reduce #"])),
    scenario("killed_in_staged_all_reduces", |group| endless(group, Loop::Ordinary, None), THREE)
        .checked_by(|test| killed(test, &["all_reduce #"])),
    scenario("killed_in_all_gathers", |group| endless(group, Loop::Gather, None), THREE)
        .checked_by(|test| killed(test, &["all_gather #"])),
    scenario("killed_in_async_all_reduces", |group| endless(group, Loop::Async, None), THREE)
        .checked_by(|test| killed(test, &["all_reduce #"])),
    // In a ring, so that each of the others sends to the killed rank or receives from it.
    scenario("killed_in_messages", |group| endless(group, Loop::Messages, None), THREE)
        .checked_by(|test| killed(test, &["send to rank ", "recv from rank "])),
    scenario(
        "all_but_one_killed",
        |group| endless(group, Loop::Ordinary, None),
        &[by_hand(&[4]), by_hand(&[2, 2])],
    )
    .checked_by(all_but_one_killed),
    process("a_rank_that_drops_its_group_is_named", drops, THREE).checked_by(names_the_leaver),
    scenario("a_rank_that_exits_is_named", exits, THREE).checked_by(names_who_exits),
    scenario("an_abort_of_rank_0_reaches_all", |group| aborts(group, 0), THREE)
        .checked_by(|test| abort_reaches_all(test, 0)),
    scenario("an_abort_of_rank_1_reaches_all", |group| aborts(group, 1), THREE)
        .checked_by(|test| abort_reaches_all(test, 1)),
    scenario("an_abort_of_rank_2_reaches_all", |group| aborts(group, 2), THREE)
        .checked_by(|test| abort_reaches_all(test, 2)),
];

/// The inodes of the shared memory that a process maps.
pub fn shared_memory_of(pid: &str) -> BTreeSet<String> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    let ours = maps.lines().filter(|line| line.contains("memfd:flow-arena"));
    ours.filter_map(|line| line.split_whitespace().nth(4).map(str::to_owned)).collect()
}

/// Whether any process of the machine maps one of `inodes`.
pub fn is_mapped(inodes: &BTreeSet<String>) -> bool {
    let processes = std::fs::read_dir("/proc").expect("/proc is there");
    let mut names = processes.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    names.any(|name| !shared_memory_of(&name).is_disjoint(inodes))
}

/// Names in /dev/shm that could be ours.
fn named_shared_memory() -> BTreeSet<String> {
    let names = std::fs::read_dir("/dev/shm").into_iter().flatten();
    names
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name.contains("flow"))
        .collect()
}

/// Rank 1 of three is killed at several moments; the others name it, in one of `operations`.
fn killed(test: &Test, operations: &[&str]) {
    for pause in [0, 7, 40] {
        let mut ranks = looping(test);
        let memory: BTreeSet<String> =
            ranks.iter().flat_map(|rank| shared_memory_of(&rank.pid().to_string())).collect();
        assert!(memory.len() == test.job.nodes().len() && is_mapped(&memory), "{memory:?}");
        std::thread::sleep(Duration::from_millis(pause));
        let victim = ranks.remove(1);
        signal(&victim, Signal::KILL);
        let pid = victim.pid();
        for (rank, process) in [0, 2].into_iter().zip(ranks) {
            let said = said(process);
            let named = |operation: &&str| {
                said[0].starts_with(&format!("PeerLost: rank {rank}: {operation}"))
            };
            assert!(operations.iter().any(named), "none of {operations:?} is in {said:?}");
            assert_contains(&said[0], &[&format!("rank 1 (pid {pid} on "), "died"]);
            assert_contains(
                &said[1],
                &["then Poisoned", &format!("rank {rank}: barrier #"), "rank 1 (pid"],
            );
        }
        drop(victim);
        assert!(!is_mapped(&memory), "{memory:?} is still mapped");
    }
    assert_eq!(named_shared_memory(), BTreeSet::new());
}

fn all_but_one_killed(test: &Test) {
    let mut ranks = looping(test);
    let survivor = ranks.remove(2);
    ranks.iter().for_each(|rank| signal(rank, Signal::KILL));
    assert_contains(&said(survivor)[0], &["PeerLost: rank 2: all_reduce #", "died"]);
}

fn drops() -> Result<()> {
    let group = ProcessGroup::from_env()?;
    group.barrier()?;
    if group.rank() == 1 {
        drop(group);
        println!("left");
        sleep_until_killed();
    }
    report(sum(&group), &group)
}

fn names_the_leaver(test: &Test) {
    let mut ranks = test.ranks();
    let mut leaver = ranks.remove(1);
    leaver.wait_for("left");
    for process in ranks {
        let said = said(process);
        let peer = format!("failed: rank 1 (pid {} on ", leaver.pid());
        assert_contains(
            &said[0],
            &["PeerLost", "all_reduce #1 (4 x f32, sum)", &peer, "has left the group"],
        );
        assert_contains(&said[1], &["then Poisoned"]);
    }
}

fn exits(group: &ProcessGroup) -> Result<()> {
    group.barrier()?;
    if group.rank() == 1 {
        std::process::exit(0);
    }
    report(sum(group), group)
}

fn names_who_exits(test: &Test) {
    let mut ranks = test.ranks();
    let pid = ranks.remove(1).finish(DETECTION_LIMIT).pid;
    for process in ranks {
        let peer = format!("rank 1 (pid {pid} on ");
        assert_contains(&said(process)[0], &["PeerLost", "all_reduce #1", &peer]);
    }
}

fn aborts(group: &ProcessGroup, by: usize) -> Result<()> {
    group.barrier()?;
    if group.rank() == by {
        group.abort("the data ran out");
    }
    report(sum(group), group)
}

fn abort_reaches_all(test: &Test, by: usize) {
    for process in test.ranks() {
        let cause = format!("rank {by} aborted the group: the data ran out");
        assert_contains(&said(process)[0], &["Poisoned", "all_reduce #1", &cause]);
    }
}
