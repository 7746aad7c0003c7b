//! Failures that flow-launch has a part in.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::Result;
use flow_comm::ProcessGroup;
use flow_harness::cli::until;
use flow_harness::net::Agent;
use flow_harness::{DETECTION_LIMIT, TEST_TIMEOUT, assert_contains};
use nix::sys::signal::{SigSet, Signal as Masked};
use rustix::process::Signal;

use super::endless::{Loop, endless};
use super::lost::{is_mapped, shared_memory_of};
use crate::registry::{Scenario, Test, launched, machines, process, scenario, signal};

pub const SCENARIOS: &[Scenario] = &[
    process(
        "the_signal_that_killed_a_rank_is_named",
        deaf,
        &[launched(3).flags(&["--grace", "10"])],
    )
    .checked_by(names_the_signal),
    scenario(
        "the_launcher_killed_takes_all_ranks_and_their_memory_along",
        |group| endless(group, Loop::Shared, None),
        &[launched(3)],
    )
    .checked_by(nothing_is_left),
    scenario(
        "a_cut_link_ends_the_job_on_both_sides",
        |group| endless(group, Loop::Ordinary, None),
        &[machines(&[2, 2])],
    )
    .checked_by(ends_when_cut),
    scenario(
        "a_cut_link_ends_a_job_of_messages_on_both_sides",
        |group| endless(group, Loop::Messages, None),
        &[machines(&[2, 2])],
    )
    .checked_by(ends_when_cut),
    scenario(
        "a_machine_without_power_ends_the_job_on_the_other",
        |group| endless(group, Loop::Shared, None),
        &[machines(&[2, 2])],
    )
    .checked_by(ends_without_power),
];

/// Rank 1 kills itself; the others do not react to SIGTERM.
fn deaf() -> Result<()> {
    let mut deaf = SigSet::empty();
    deaf.add(Masked::SIGTERM);
    deaf.thread_block()?;
    endless(&ProcessGroup::from_env()?, Loop::Ordinary, Some(20))
}

fn names_the_signal(test: &Test) {
    let finished = test.launcher().finish(TEST_TIMEOUT);
    assert_eq!(finished.code, Some(128 + 9), "{finished:?}");
    let said: Vec<&str> =
        finished.stdout.lines().filter(|line| line.starts_with("PeerLost")).collect();
    assert_eq!(said.len(), 2, "{finished:?}");
    for line in said {
        let operation = "all_reduce #20 (200000 x f32, avg)";
        assert_contains(line, &[operation, "rank 1 (pid ", "signal 9 (SIGKILL)"]);
    }
}

fn nothing_is_left(test: &Test) {
    let mut process = test.launcher();
    process.wait_for("looping\nlooping\nlooping\n");
    let children = format!("/proc/{0}/task/{0}/children", process.pid());
    let children = std::fs::read_to_string(children).expect("the kernel lists children");
    let memory: BTreeSet<String> = children.split_whitespace().flat_map(shared_memory_of).collect();
    assert!(memory.len() == 1 && is_mapped(&memory), "{memory:?} of {children}");
    signal(&process, Signal::KILL);
    assert_ne!(process.finish(DETECTION_LIMIT).code, Some(0));
    // The workers are not ours to wait for.
    for _ in 0..1000 {
        if !is_mapped(&memory) {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("workers {children} still hold their shared memory");
}

fn until_they_loop(agents: &[Agent]) {
    for agent in agents {
        until("both workers loop", || agent.stdout().matches("looping").count() == 2);
    }
}

/// The agent ends because the other machine was lost.
fn fails(agent: Agent) {
    let finished = agent.finish();
    let says = |text| finished.stderr.contains(text);
    assert!(
        finished.code != Some(0) && (says("was lost") || says("cannot be reached")),
        "{finished:?}"
    );
}

fn ends_when_cut(test: &Test) {
    let Some((net, agents)) = test.machines() else { return };
    until_they_loop(&agents);
    net.cut(1);
    agents.into_iter().for_each(fails);
    net.until_nothing_is_left();
}

fn ends_without_power(test: &Test) {
    let Some((net, mut agents)) = test.machines() else { return };
    until_they_loop(&agents);
    net.power_off(1);
    drop(agents.pop());
    agents.into_iter().for_each(fails);
    net.until_nothing_is_left();
}
