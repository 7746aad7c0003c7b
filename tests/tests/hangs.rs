//! What flow-launch says and does when workers wait long for each other.

use std::process::Command;

use flow_tests::{assert_contains, launcher, on_fake_cuda, program, Process, TEST_TIMEOUT};

#[test]
fn a_hang_is_told_and_ended() {
    let job = launcher(3, &["--hang-timeout", "6"], "check_failures", &["late", "1000"]);
    let finished = Process::start(job).finish(TEST_TIMEOUT);
    assert_eq!(finished.code, Some(124), "{finished:?}");
    assert_contains(
        &finished.stderr,
        &["ranks 0, 2 wait in all_reduce #0 (", ") for rank 1 [under way: all_reduce #0]"],
    );
    // Once when it was long, and once at the end.
    assert_eq!(finished.stderr.matches("s: rank 1 is in no collective").count(), 2, "{finished:?}");
    assert_contains(&finished.stderr, &["that is a failure, as --hang-timeout is 6 s"]);
}

/// On one node, and on nodes of one rank each.
#[test]
fn a_rank_that_does_not_join_is_a_hang() {
    for place in ["", "export GROUP_RANK=$RANK LOCAL_RANK=0 LOCAL_WORLD_SIZE=1;"] {
        let worker = program("check_failures");
        let text =
            format!("{place} [ $RANK != 1 ] || exec sleep 1000; exec {} join", worker.display());
        let mut job = Command::new(program("flow-launch"));
        job.args(["--nproc_per_node", "3", "--hang-timeout", "4", "sh", "-c", &text]);
        let finished = Process::start(job).finish(TEST_TIMEOUT);
        assert_eq!(finished.code, Some(124), "{finished:?}");
        assert_contains(
            &finished.stderr,
            &["ranks 0, 2 wait in joining the process group for rank 1"],
        );
    }
}

#[test]
fn a_rank_that_is_late_is_told_of_and_waited_for() {
    let job = launcher(3, &["--hang-timeout", "20"], "check_failures", &["late", "13"]);
    let finished = Process::start(job).finish(TEST_TIMEOUT);
    assert_contains(&finished.stderr, &["ranks 0, 2 wait in all_reduce #0 ("]);
    assert_eq!(finished.stderr.matches("no progress").count(), 1, "{finished:?}");
    finished.success();
}

#[test]
fn a_job_that_hung_may_be_restarted() {
    let flags = ["--hang-timeout", "2", "--max-restarts", "1"];
    let finished =
        Process::start(launcher(2, &flags, "check_failures", &["hang_once"])).finish(TEST_TIMEOUT);
    assert_contains(&finished.stderr, &["rank 0 waits in all_reduce #0 (", "; restart 1 of 1"]);
    finished.success();
}

/// On the fakes of GPUs and NCCL.
#[test]
fn a_hang_over_nccl_is_told_and_ended() {
    let job = launcher(3, &["--hang-timeout", "3"], "worker", &["nccl::fail", "late"]);
    let Some(job) = on_fake_cuda(job) else { return };
    let finished = Process::start(job).finish(TEST_TIMEOUT);
    assert_eq!(finished.code, Some(124), "{finished:?}");
    assert_contains(
        &finished.stderr,
        &["rank 1 is in no collective", "ranks 0, 2 wait in all_reduce #", "for rank 1"],
    );
}
