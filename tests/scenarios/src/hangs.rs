//! What flow-launch says and does when workers wait long for each other.

use std::process::Command;
use std::time::Duration;

use anyhow::Result;
use flow_comm::{ProcessGroup, ReduceOp};
use flow_harness::{Finished, Process, TEST_TIMEOUT, assert_contains, program};

use crate::nccl::failures;
use crate::registry::{Scenario, Test, launched, process, scenario};

pub const SCENARIOS: &[Scenario] = &[
    scenario(
        "a_hang_is_reported_and_ended",
        |group| late(group, 1000),
        &[launched(3).flags(&["--hang-timeout", "6"])],
    )
    .checked_by(reports_and_ends),
    scenario(
        "a_rank_that_is_late_is_reported_and_waited_for",
        |group| late(group, 13),
        &[launched(3).flags(&["--hang-timeout", "20"])],
    )
    .checked_by(reports_and_waits),
    process("a_rank_that_does_not_join_is_a_hang", join, &[launched(3)])
        .checked_by(|test| ends_joining(test, "")),
    process("a_rank_that_does_not_join_is_a_hang_over_nodes", join, &[launched(3)]).checked_by(
        |test| ends_joining(test, "export GROUP_RANK=$RANK LOCAL_RANK=0 LOCAL_WORLD_SIZE=1;"),
    ),
    scenario(
        "a_job_that_hung_may_be_restarted",
        hang_once,
        &[launched(2).flags(&["--hang-timeout", "2", "--max-restarts", "1"])],
    )
    .checked_by(restarts),
    scenario(
        "a_wait_for_any_rank_is_named",
        wait_for_any,
        &[launched(3).flags(&["--hang-timeout", "3"])],
    )
    .checked_by(names_any_rank),
    scenario(
        "a_hang_over_nccl_is_reported_and_ended",
        failures::late,
        &[launched(3).flags(&["--hang-timeout", "3"]).on_fake_cuda()],
    )
    .checked_by(reports_over_nccl),
];

fn finish(test: &Test) -> Finished {
    test.launcher().finish(TEST_TIMEOUT)
}

fn sum(group: &ProcessGroup) -> Result<()> {
    Ok(group.all_reduce(&mut [1.0_f32; 4], ReduceOp::Sum)?)
}

fn late(group: &ProcessGroup, seconds: u64) -> Result<()> {
    if group.rank() == 1 {
        std::thread::sleep(Duration::from_secs(seconds));
    }
    sum(group)
}

fn reports_and_ends(test: &Test) {
    let finished = finish(test);
    assert_eq!(finished.code, Some(124), "{finished:?}");
    assert_contains(
        &finished.stderr,
        &["ranks 0, 2 wait in all_reduce #0 (", ") for rank 1 [under way: all_reduce #0]"],
    );
    // Once when it was long, and once at the end.
    assert_eq!(finished.stderr.matches("s: rank 1 is in no collective").count(), 2, "{finished:?}");
    assert_contains(&finished.stderr, &["that is a failure, as --hang-timeout is 6 s"]);
}

fn reports_and_waits(test: &Test) {
    let finished = finish(test);
    assert_contains(&finished.stderr, &["ranks 0, 2 wait in all_reduce #0 ("]);
    assert_eq!(finished.stderr.matches("no progress").count(), 1, "{finished:?}");
    finished.success();
}

fn join() -> Result<()> {
    ProcessGroup::from_env()?;
    Ok(())
}

/// Rank 1 does not join.
fn ends_joining(test: &Test, variables: &str) {
    let worker = format!("{} {}", program("worker").display(), test.name);
    let script = format!("{variables} [ $RANK != 1 ] || exec sleep 1000; exec {worker}");
    let mut job = Command::new(program("flow-launch"));
    job.args(["--nproc_per_node", "3", "--hang-timeout", "4", "sh", "-c", &script]);
    let finished = Process::start(job).finish(TEST_TIMEOUT);
    assert_eq!(finished.code, Some(124), "{finished:?}");
    let waits = "ranks 0, 2 wait in joining the process group for rank 1";
    assert_contains(&finished.stderr, &[waits]);
}

fn hang_once(group: &ProcessGroup) -> Result<()> {
    let first = std::env::var("TORCHELASTIC_RESTART_COUNT").as_deref() == Ok("0");
    if group.rank() == 1 && first {
        std::thread::sleep(Duration::from_secs(1000));
    }
    sum(group)
}

fn restarts(test: &Test) {
    let finished = finish(test);
    assert_contains(&finished.stderr, &["rank 0 waits in all_reduce #0 (", "; restart 1 of 1"]);
    finished.success();
}

fn wait_for_any(group: &ProcessGroup) -> Result<()> {
    if group.rank() > 0 {
        std::thread::sleep(Duration::from_secs(1000));
    }
    group.recv_any(&mut [0_u8; 9], 5)?;
    Ok(())
}

fn names_any_rank(test: &Test) {
    let finished = finish(test);
    assert_eq!(finished.code, Some(124), "{finished:?}");
    assert_contains(&finished.stderr, &["rank 0 waits in recv from any rank (9 x u8, tag 5)"]);
}

fn reports_over_nccl(test: &Test) {
    let finished = finish(test);
    assert_eq!(finished.code, Some(124), "{finished:?}");
    let waits = "ranks 0, 2 wait in all_reduce #";
    assert_contains(&finished.stderr, &["rank 1 is in no collective", waits, "for rank 1"]);
}
