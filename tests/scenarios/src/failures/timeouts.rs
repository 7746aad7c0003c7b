//! Ranks that do not come in time.

use std::time::Duration;

use anyhow::Result;
use flow_comm::ProcessGroup;
use flow_harness::{Process, assert_contains};
use rustix::process::Signal;

use super::endless::{Loop, endless, looping};
use super::report::{THREE, report, said, sleep_until_killed, sum};
use crate::registry::{Scenario, Test, by_hand, scenario, signal};

pub const SCENARIOS: &[Scenario] = &[
    scenario("a_rank_that_never_comes_is_named", absent, THREE).checked_by(names_the_absent),
    scenario("a_stopped_rank_is_named_and_learns_of_it", stopped_early, &[by_hand(&[3])])
        .checked_by(names_the_stopped),
    scenario(
        "a_rank_that_is_stopped_for_a_while_is_waited_for",
        stopped_late,
        &[by_hand(&[1, 1]), by_hand(&[2])],
    )
    .checked_by(waits_for_the_stopped),
];

/// The first to run out of time fails the group, maybe a moment before the others run out of time
/// themselves.
fn assert_timed_out(ranks: Vec<Process>, culprit: &str) {
    let said: Vec<_> = ranks.into_iter().map(said).collect();
    assert!(said.iter().any(|lines| lines[0].starts_with("Timeout")), "{said:?}");
    for lines in &said {
        assert!(lines[0].starts_with("Timeout") || lines[0].starts_with("Poisoned"), "{said:?}");
        assert_contains(&lines[0], &["timed out after", culprit, "which has arrived"]);
        assert_contains(&lines[1], &["then Poisoned"]);
    }
}

fn absent(group: &ProcessGroup) -> Result<()> {
    if group.rank() == 2 {
        println!("absent");
        sleep_until_killed();
    }
    group.set_timeout(Duration::from_secs(1));
    report(sum(group), group)
}

fn names_the_absent(test: &Test) {
    let mut ranks = test.ranks();
    let absent = ranks.pop().expect("there are three");
    let culprit = format!("timed out after 1s: waited for rank 2 (pid {} on ", absent.pid());
    assert_timed_out(ranks, &culprit);
}

fn stopped_early(group: &ProcessGroup) -> Result<()> {
    group.set_timeout(Duration::from_secs(2));
    endless(group, Loop::Ordinary, None)
}

fn names_the_stopped(test: &Test) {
    let mut ranks = looping(test);
    let stopped = ranks.remove(1);
    signal(&stopped, Signal::STOP);
    assert_timed_out(ranks, &format!("waited for rank 1 (pid {} on ", stopped.pid()));
    signal(&stopped, Signal::CONT);
    assert_contains(&said(stopped)[0], &["timed out after 2s: waited for rank 1 (pid"]);
}

fn stopped_late(group: &ProcessGroup) -> Result<()> {
    group.set_timeout(Duration::from_secs(6));
    endless(group, Loop::Ordinary, None)
}

/// The second time it is stopped until the time is over.
fn waits_for_the_stopped(test: &Test) {
    let mut ranks = looping(test);
    signal(&ranks[1], Signal::STOP);
    std::thread::sleep(Duration::from_secs(2));
    signal(&ranks[1], Signal::CONT);
    std::thread::sleep(Duration::from_millis(500));
    signal(&ranks[1], Signal::STOP);
    let stopped = ranks.remove(1);
    let culprit = format!("timed out after 6s: waited for rank 1 (pid {} on ", stopped.pid());
    assert_contains(&said(ranks.remove(0))[0], &["Timeout", &culprit]);
    signal(&stopped, Signal::CONT);
    assert_contains(&said(stopped)[0], &["timed out after 6s"]);
}
