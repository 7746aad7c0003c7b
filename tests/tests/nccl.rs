//! Process groups over NCCL, without a GPU: on fakes of the driver and NCCL, whose streams
//! are threads and whose memory is the host's. What passes here has the right order of calls,
//! events, errors and ends; it says nothing of GPUs, on which `scripts/gpu-check` runs the same
//! program.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use flow_tests::{
    assert_contains, job, launcher, on_fake_cuda, program, rank, Finished, Process, FAKE_CUDA,
    TEST_TIMEOUT,
};

const WORKER: &str = "worker";

/// Packing and unpacking, compiled by the C++ compiler.
#[test]
fn kernels() {
    let Some(command) = on_fake_cuda(Command::new(program("examples/cuda_check"))) else { return };
    assert_contains(&Process::start(command).finish(TEST_TIMEOUT).success(), &["cases are right"]);
}

/// Starts ranks by hand, so that nobody stops the others when one fails.
fn ranks(size: usize, arguments: &[&str], variables: &[(&str, &str)]) -> Option<Vec<Process>> {
    let job = job();
    let start = |r| {
        let mut command = on_fake_cuda(rank(&job, r, size, WORKER, arguments))?;
        command.envs(variables.iter().copied());
        Some(Process::start(command))
    };
    (0..size).map(start).collect()
}

/// What rank 0 says in a failure.
fn fail(way: &str, variables: &[(&str, &str)]) -> Option<Vec<String>> {
    let mut started = ranks(2, &["nccl::fail", way], variables)?;
    let text = started.remove(0).finish(TEST_TIMEOUT).success();
    Some(text.lines().map(str::to_owned).collect())
}

#[test]
fn a_rank_that_does_not_come_is_a_timeout_that_names_it() {
    let Some(lines) = fail("late", &[]) else { return };
    let first = &lines[0];
    assert_contains(
        first,
        &["rank 0: all_reduce #4 (1000 x f32, sum), 4000 bytes, over NCCL timed out after 4s"],
    );
    assert_contains(
        first,
        &["waited for rank 1 (pid", "which is at all_reduce #2 (1000 x f32, sum)"],
    );
    assert_contains(&lines[1], &["unusable since an earlier failure", "timed out"]);
    assert_contains(
        &lines[2],
        &["rank 0: barrier", "unusable since an earlier failure", "timed out"],
    );
}

#[test]
fn a_late_bucket_is_named_with_its_bytes() {
    let Some(lines) = fail("late_bucket", &[]) else { return };
    // 1000 gradients of 2 bytes, 24 more from the next multiple of 512 bytes on.
    assert_contains(
        &lines[0],
        &["all_reduce #4", "x bf16, sum, bucket 7), 2096 bytes, over NCCL timed out", "rank 1"],
    );
}

#[test]
fn different_operations_are_told_apart() {
    let Some(lines) = fail("mismatch", &[]) else { return };
    assert_contains(
        &lines[0],
        &["ranks disagree", "rank 0 called send #0 (10 x f32)", "rank 1 called broadcast #4"],
    );
}

#[test]
fn a_rank_that_dies_is_an_error_within_seconds_and_the_device_is_free() {
    let Some(mut started) = ranks(2, &["nccl::fail", "dies"], &[]) else { return };
    let begin = Instant::now();
    let text = started.remove(0).finish(TEST_TIMEOUT).success();
    assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
    assert_contains(&text, &["rank 0: all_reduce #4", "failed: rank 1 (pid", "died"]);
}

#[test]
fn an_abort_is_told_to_the_others() {
    let Some(lines) = fail("aborts", &[]) else { return };
    assert_contains(&lines[0], &["rank 1 aborted the group: the data ran out"]);
}

#[test]
fn a_rank_that_never_joins_is_named() {
    let Some(lines) = fail("never_joins", &[]) else { return };
    assert_contains(&lines[0], &["rank 0: ", "timed out after 4s", "rank 1"]);
}

#[test]
fn an_error_at_the_call_is_told_with_its_operation() {
    // The first sum is number 0.
    let Some(lines) = fail("repeats", &[("FLOW_FAKE_FAIL", "0:3:2")]) else { return };
    assert_contains(&lines[0], &["rank 0: all_reduce #", "failed: ncclAllReduce: "]);
}

#[test]
fn an_error_of_the_device_is_found_and_aborted() {
    let Some(lines) = fail("repeats", &[("FLOW_FAKE_ASYNC_FAIL", "0:3:6")]) else { return };
    assert_contains(&lines[0], &["rank 0: all_reduce #", "ncclCommGetAsyncError: "]);
}

#[test]
fn a_fault_of_the_device_is_no_timeout() {
    let Some(lines) = fail("late", &[("FLOW_FAKE_FAULT", "0:1000")]) else { return };
    assert_contains(
        &lines[0],
        &["rank 0: all_reduce #4", "failed: ", "CUDA_ERROR_ILLEGAL_ADDRESS"],
    );
}

#[test]
fn a_program_that_ignores_a_failure_is_ended() {
    let Some(mut started) = ranks(2, &["nccl::fail", "ignores"], &[]) else { return };
    let Finished { code, stderr, .. } = started.remove(0).finish(TEST_TIMEOUT);
    assert_ne!(code, Some(0));
    assert_contains(&stderr, &["rank 0: all_reduce #4", "timed out", "so its process ends here"]);
}

#[test]
fn more_ranks_than_gpus_is_an_error_before_training() {
    let Some(started) = ranks(3, &["nccl::fail", "late"], &[("FLOW_FAKE_GPUS", "2")]) else {
        return;
    };
    let texts: Vec<String> =
        started.into_iter().map(|process| process.finish(TEST_TIMEOUT).success()).collect();
    for text in &texts {
        assert_contains(
            text,
            &[
                "asked for 3 ranks with a GPU each on this machine, found 2 GPUs",
                "--nproc_per_node gpu",
            ],
        );
    }
}

#[test]
fn without_nccl_the_error_says_what_is_missing() {
    let Some(mut command) = on_fake_cuda(launcher(2, &[], WORKER, &["nccl::fail", "late"])) else {
        return;
    };
    command.env("FLOW_NCCL_PATH", "/nowhere/libnccl.so.2");
    let text = Process::start(command).finish(TEST_TIMEOUT).success();
    assert_contains(&text, &["no NCCL 2.18.0 or newer", "/nowhere/libnccl.so.2", "FLOW_NCCL_PATH"]);
    let Some(mut command) = on_fake_cuda(launcher(2, &[], WORKER, &["nccl::fail", "late"])) else {
        return;
    };
    command.env("FLOW_FAKE_VERSION", "21005");
    let text = Process::start(command).finish(TEST_TIMEOUT).success();
    assert_contains(&text, &["is 2.10.5", "no NCCL 2.18.0 or newer"]);
}

#[test]
fn all_ranks_issue_the_same_calls_in_order() {
    let folder = Path::new(FAKE_CUDA).join(format!("log-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("the folder can be made");
    let Some(mut command) = on_fake_cuda(launcher(2, &[], WORKER, &["nccl::order"])) else {
        return;
    };
    command.env("FLOW_FAKE_LOG", folder.join("calls"));
    Process::start(command).finish(TEST_TIMEOUT).success();
    let calls = |rank: usize| {
        let text = std::fs::read_to_string(folder.join(format!("calls.{rank}")))
            .expect("the fake wrote it");
        let collectives = text
            .lines()
            .filter(|line| ["ncclAllReduce", "ncclBroadcast"].iter().any(|c| line.starts_with(c)));
        collectives.map(str::to_owned).collect::<Vec<String>>()
    };
    let (first, second) = (calls(0), calls(1));
    assert_eq!(first, second);
    // Three registered buckets, then the broadcast, then the barrier.
    let counts = [100, 300, 200].map(|count| format!("count={count} "));
    for (call, count) in first.iter().zip(&counts) {
        assert_contains(call, &["ncclAllReduce", count, "registered=1"]);
    }
    assert!(
        first[3].starts_with("ncclBroadcast") && first[4].starts_with("ncclAllReduce"),
        "{first:?}"
    );
    for rank in [0, 1] {
        let text = std::fs::read_to_string(folder.join(format!("calls.{rank}")))
            .expect("the fake wrote it");
        let ends: Vec<&str> =
            text.lines().rev().take(4).filter_map(|line| line.split(' ').next()).collect();
        assert_eq!(
            ends,
            ["ncclCommDestroy", "ncclCommFinalize", "ncclCommDestroy", "ncclCommFinalize"],
            "{text}"
        );
    }
    std::fs::remove_dir_all(&folder).expect("the folder can be removed");
}
