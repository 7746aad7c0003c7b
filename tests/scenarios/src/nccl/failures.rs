//! Failures over NCCL, each a way that ranks can go wrong. A rank prints the error that it gets,
//! and those of the next calls.

use std::time::Duration;

use anyhow::Result;
use flow_comm::nccl::CudaGroup;
use flow_comm::{DType, P2pOp, ProcessGroup, ReduceOp};
use flow_harness::{Finished, Process, TEST_TIMEOUT, assert_contains};

use super::memory::{Array, Gpu};
use crate::registry::{Job, Scenario, Test, by_hand, launched, scenario};

/// Where time-outs are what is checked.
const TIMEOUT: Duration = Duration::from_secs(4);

/// Nobody stops the others when one fails.
const TWO: Job = by_hand(&[2]).on_fake_cuda();
const THREE: Job = by_hand(&[3]).on_fake_cuda();

pub const SCENARIOS: &[Scenario] = &[
    scenario("late", late, &[TWO]).checked_by(|test| {
        let lines = first_rank(test);
        let operation = "rank 0: all_reduce #4 (1000 x f32, sum), 4000 bytes, over NCCL";
        assert_contains(&lines[0], &[operation, "timed out after 4s"]);
        let place = "which is at all_reduce #2 (1000 x f32, sum)";
        assert_contains(&lines[0], &["waited for rank 1 (pid", place]);
        assert_contains(&lines[1], &["unusable since an earlier failure", "timed out"]);
        let barrier = "rank 0: barrier";
        assert_contains(&lines[2], &[barrier, "unusable since an earlier failure", "timed out"]);
    }),
    scenario("late_bucket", late_bucket, &[TWO]).checked_by(|test| {
        // 1000 gradients of 2 bytes, 24 more from the next multiple of 512 bytes on.
        let bucket = "x bf16, sum, bucket 7), 2096 bytes, over NCCL timed out";
        assert_contains(&first_rank(test)[0], &["all_reduce #4", bucket, "rank 1"]);
    }),
    scenario("mismatch", mismatch, &[TWO]).checked_by(|test| {
        let sides = ["rank 0 called all_reduce #4 (10 x f32", "rank 1 called broadcast #4"];
        assert_contains(&first_rank(test)[0], &["ranks disagree", sides[0], sides[1]]);
    }),
    scenario("a_message_that_nobody_receives_times_out", unreceived, &[TWO]).checked_by(|test| {
        let operation = "rank 0: send #0 (10 x f32), 40 bytes, over NCCL timed out after 4s";
        let place = "which is at broadcast #4";
        assert_contains(&first_rank(test)[0], &[operation, "waited for rank 1 (pid", place]);
    }),
    scenario("a_batch_that_times_out_names_its_peers", batch, &[THREE]).checked_by(|test| {
        let operation = "rank 0: batch_send_recv #0 of send to 1, recv from 1, 80 bytes, over NCCL";
        let line = &first_rank(test)[0];
        assert_contains(line, &[operation, "timed out after 4s: waited for rank 1 (pid"]);
        assert!(!line.contains("waited for rank 2") && !line.contains("; rank 2"), "{line}");
    }),
    scenario("a_late_rank_of_uneven_blocks_is_no_mismatch", late_of_uneven, &[THREE]).checked_by(
        |test| {
            let late = ["timed out after 4s: waited for rank 2 (pid", "which is at all_reduce"];
            let line = &first_rank(test)[0];
            assert_contains(line, &["rank 0: all_to_all_v #4 (4 x f32)", late[0], late[1]]);
            assert!(!line.contains("waited for rank 1"), "{line}");
        },
    ),
    scenario("wrong_counts_are_errors", wrong_counts, &[launched(2).on_fake_cuda()]),
    scenario("dies", dies, &[TWO]).checked_by(|test| {
        let text = test.ranks().remove(0).finish(TEST_TIMEOUT).success();
        assert_contains(&text, &["rank 0: all_reduce #4", "failed: rank 1 (pid", "died"]);
    }),
    // NCCL's sum fails where it has lost a connection.
    scenario(
        "a_lost_connection_names_the_rank_that_died",
        lost_connection,
        &[TWO.env(&[("FLOW_FAKE_ASYNC_FAIL", "0:4:6")])],
    )
    .checked_by(|test| {
        let text = test.ranks().remove(0).finish(TEST_TIMEOUT).success();
        assert_contains(&text, &["rank 0: all_reduce #", "failed: rank 1 (pid", "died"]);
    }),
    scenario("aborts", aborts, &[TWO]).checked_by(|test| {
        assert_contains(&first_rank(test)[0], &["rank 1 aborted the group: the data ran out"]);
    }),
    scenario("never_joins", never_joins, &[TWO]).checked_by(|test| {
        assert_contains(&first_rank(test)[0], &["rank 0: ", "timed out after 4s", "rank 1"]);
    }),
    // Its sum is refused by which the ranks connect, and for which the other one waits.
    scenario("a_rank_that_cannot_connect", late, &[TWO.env(&[("FLOW_FAKE_FAIL", "1:1:2")])])
        .checked_by(|test| {
            let cause = "rank 1: joining over NCCL failed: ncclAllReduce: ";
            assert_contains(&first_rank(test)[0], &["rank 0: joining over NCCL failed", cause]);
        }),
    // Two sums connect the ranks; the scenario's are numbers 3 to 22.
    scenario("an_error_at_the_call", repeats, &[TWO.env(&[("FLOW_FAKE_FAIL", "0:5:2")])])
        .checked_by(|test| {
            let cause = "failed: ncclAllReduce: ";
            assert_contains(&first_rank(test)[0], &["rank 0: all_reduce #", cause]);
        }),
    // The last sum: no later call finds it.
    scenario(
        "an_error_of_the_communicator",
        repeats,
        &[TWO.env(&[("FLOW_FAKE_ASYNC_FAIL", "0:22:6")])],
    )
    .checked_by(|test| {
        let cause = "ncclCommGetAsyncError: ";
        assert_contains(&first_rank(test)[0], &["rank 0: all_reduce #", cause]);
    }),
    scenario(
        "a_fault_of_the_device_is_no_timeout",
        late,
        &[TWO.env(&[("FLOW_FAKE_FAULT", "0:7")])], // those of the second sum
    )
    .checked_by(|test| {
        let cause = "CUDA_ERROR_ILLEGAL_ADDRESS";
        assert_contains(&first_rank(test)[0], &["rank 0: all_reduce #4", "failed: ", cause]);
    }),
    scenario("a_program_that_ignores_a_failure_is_ended", ignores, &[TWO]).checked_by(|test| {
        let Finished { code, stderr, .. } = test.ranks().remove(0).finish(TEST_TIMEOUT);
        assert_ne!(code, Some(0));
        let end = "so its process ends here";
        assert_contains(&stderr, &["rank 0: all_reduce #4", "timed out", end]);
    }),
    scenario(
        "more_ranks_than_gpus_is_an_error_before_training",
        late,
        &[by_hand(&[3]).on_fake_cuda().env(&[("FLOW_FAKE_GPUS", "2")])],
    )
    .checked_by(|test| {
        let ranks = test.ranks().into_iter().map(|rank| rank.finish(TEST_TIMEOUT).success());
        let reason = "asked for 3 ranks with a GPU each on this machine, found 2 GPUs";
        ranks.for_each(|text| assert_contains(&text, &[reason, "--nproc_per_node gpu"]));
    }),
    scenario(
        "without_nccl_the_error_says_what_is_missing",
        late,
        &[launched(2).on_fake_cuda().env(&[("FLOW_NCCL_PATH", "/nowhere/libnccl.so.2")])],
    )
    .checked_by(|test| {
        let text = test.launcher().finish(TEST_TIMEOUT).success();
        let path = "/nowhere/libnccl.so.2";
        assert_contains(&text, &["no NCCL 2.18.0 or newer", path, "FLOW_NCCL_PATH"]);
    }),
    scenario(
        "an_old_nccl_is_an_error",
        late,
        &[launched(2).on_fake_cuda().env(&[("FLOW_FAKE_VERSION", "21005")])],
    )
    .checked_by(|test| {
        let text = test.launcher().finish(TEST_TIMEOUT).success();
        assert_contains(&text, &["is 2.10.5", "no NCCL 2.18.0 or newer"]);
    }),
];

/// What rank 0 prints.
fn first_rank(test: &Test) -> Vec<String> {
    let mut ranks: Vec<Process> = test.ranks();
    let text = ranks.remove(0).finish(TEST_TIMEOUT).success();
    text.lines().map(str::to_owned).collect()
}

/// A group over NCCL that has summed once.
struct Started<'a> {
    group: &'a ProcessGroup,
    nccl: std::sync::Arc<CudaGroup>,
    gpu: Gpu,
    buffer: Array,
}

/// None, with the reason printed, if there is no such group.
fn start(group: &ProcessGroup) -> Result<Option<Started<'_>>> {
    let device = match group.use_cuda() {
        Ok(device) => device,
        Err(error) => {
            println!("{error}");
            return Ok(None);
        }
    };
    let nccl = match group.nccl(device.ordinal()) {
        Ok(nccl) => nccl,
        Err(error) => {
            println!("{error}");
            print(&group.barrier());
            return Ok(None);
        }
    };
    let gpu = Gpu::new(&device)?;
    let buffer = gpu.array(DType::F32, &[1.0; 1000])?;
    let mut started = Started { group, nccl, gpu, buffer };
    started.sum()?;
    started.nccl.synchronize()?;
    group.barrier()?;
    Ok(Some(started))
}

impl Started<'_> {
    fn is_second(&self) -> bool {
        self.group.rank() == 1
    }

    fn sum(&mut self) -> flow_comm::Result<()> {
        self.nccl.all_reduce(&mut self.buffer, ReduceOp::Sum, &self.gpu.stream)
    }

    /// Waits for the device, as programs do that read a loss: only an abort sets it free. Then asks
    /// what was wrong.
    fn stuck(&self) -> flow_comm::Result<()> {
        let waited = self.gpu.stream.synchronize();
        self.nccl.check()?;
        waited.map_err(|error| flow_comm::Error::System {
            rank: 0,
            operation: "waiting".into(),
            reason: error.to_string(),
        })
    }

    fn report(&self, outcome: flow_comm::Result<()>) -> Result<()> {
        print(&outcome);
        print(&self.nccl.check());
        print(&self.group.barrier());
        Ok(())
    }
}

fn print(outcome: &flow_comm::Result<()>) {
    match outcome {
        Ok(()) => println!("no error"),
        Err(error) => println!("{error}"),
    }
}

/// The error of rank 0 is the first one.
fn first_times_out(group: &ProcessGroup) {
    group.set_timeout(if group.rank() == 0 { TIMEOUT } else { 4 * TIMEOUT });
}

/// Longer than the others wait.
fn sleep() -> Result<()> {
    println!("sleeping");
    std::thread::sleep(4 * TIMEOUT);
    Ok(())
}

/// Rank 1 does nothing more.
pub fn late(group: &ProcessGroup) -> Result<()> {
    group.set_timeout(TIMEOUT);
    let Some(mut started) = start(group)? else { return Ok(()) };
    if started.is_second() {
        return sleep();
    }
    let outcome = started.sum().and_then(|()| started.stuck());
    started.report(outcome)
}

fn late_bucket(group: &ProcessGroup) -> Result<()> {
    group.set_timeout(TIMEOUT);
    let Some(started) = start(group)? else { return Ok(()) };
    if started.is_second() {
        return sleep();
    }
    let Started { nccl, gpu, .. } = &started;
    let mut bucket = nccl.bucket(7, DType::F32, DType::BF16, &[1000, 24])?;
    let mut gradients = [gpu.array(DType::F32, &[1.0; 1000])?, gpu.array(DType::F32, &[1.0; 24])?];
    nccl.reduce_bucket(&mut bucket, &mut gradients, std::slice::from_ref(&gpu.stream))?;
    nccl.join(&gpu.stream)?;
    started.report(started.stuck())
}

fn mismatch(group: &ProcessGroup) -> Result<()> {
    group.set_timeout(TIMEOUT);
    let Some(started) = start(group)? else { return Ok(()) };
    let Started { nccl, gpu, .. } = &started;
    if started.is_second() {
        let mut other = gpu.array(DType::F64, &[1.0; 10])?;
        nccl.broadcast(std::slice::from_mut(&mut other), 0, &gpu.stream)?;
    } else {
        let mut buffer = gpu.array(DType::F32, &[1.0; 10])?;
        nccl.all_reduce(&mut buffer, ReduceOp::Sum, &gpu.stream)?;
    }
    started.report(started.stuck())
}

/// Rank 1 calls a collective instead.
fn unreceived(group: &ProcessGroup) -> Result<()> {
    first_times_out(group);
    let Some(started) = start(group)? else { return Ok(()) };
    let Started { nccl, gpu, .. } = &started;
    let mut buffer = gpu.array(DType::F32, &[1.0; 10])?;
    if started.is_second() {
        nccl.broadcast(std::slice::from_mut(&mut buffer), 0, &gpu.stream)?;
    } else {
        nccl.send(&buffer, 1, &gpu.stream)?;
    }
    started.report(started.stuck())
}

/// Rank 1 calls nothing more, nor does rank 2, whom nobody needs.
fn batch(group: &ProcessGroup) -> Result<()> {
    first_times_out(group);
    let Some(started) = start(group)? else { return Ok(()) };
    if group.rank() > 0 {
        return sleep();
    }
    let Started { nccl, gpu, .. } = &started;
    let mut sent = gpu.array(DType::F32, &[1.0; 10])?;
    let mut received = gpu.array(DType::F32, &[0.0; 10])?;
    let send = P2pOp::Send { data: &mut sent, to: 1 };
    let receive = P2pOp::Recv { buffer: &mut received, from: 1 };
    nccl.batch_send_recv(&mut [send, receive], &gpu.stream)?;
    started.report(started.stuck())
}

/// Rank 2 does nothing more. The other two exchange a message, and then call a collective in which
/// each has its own counts.
fn late_of_uneven(group: &ProcessGroup) -> Result<()> {
    first_times_out(group);
    let Some(started) = start(group)? else { return Ok(()) };
    let Started { nccl, gpu, .. } = &started;
    let mut message = gpu.array(DType::F32, &[1.0; 10])?;
    let (inputs, outputs) = match group.rank() {
        0 => {
            nccl.send(&message, 1, &gpu.stream)?;
            ([1, 2, 1], [1, 3, 1])
        }
        1 => {
            nccl.recv(&mut message, 0, &gpu.stream)?;
            ([3, 1, 1], [2, 1, 1])
        }
        _ => return sleep(),
    };
    let ones = |counts: [usize; 3]| gpu.array(DType::F32, &vec![1.0; counts.iter().sum()]);
    let input = ones(inputs)?;
    let mut output = ones(outputs)?;
    nccl.all_to_all_v(&input, &inputs, &mut output, &outputs, &gpu.stream)?;
    started.report(started.stuck())
}

/// Each is an error of this rank alone, and the group is of use after it.
fn wrong_counts(group: &ProcessGroup) -> Result<()> {
    let Some(mut started) = start(group)? else { return Ok(()) };
    let Started { nccl, gpu, .. } = &started;
    let input = gpu.array(DType::F32, &[1.0; 4])?;
    let mut output = gpu.array(DType::F32, &[0.0; 4])?;
    let mut exchange = |inputs: &[usize], outputs: &[usize]| match nccl.all_to_all_v(
        &input,
        inputs,
        &mut output,
        outputs,
        &gpu.stream,
    ) {
        Ok(()) => "no error".into(),
        Err(error) => error.to_string(),
    };
    let max = usize::MAX;
    let too_many = exchange(&[max, 5], &[2, 2]); // 4 in all, in 64 bits
    assert_contains(&too_many, &["all_to_all_v", "input_counts sum up to more than any memory"]);
    let own = group.rank();
    let other = 1 - group.rank();
    let [mut inputs, mut outputs] = [[0; 2]; 2];
    (inputs[own], inputs[other], outputs[own], outputs[other]) = (1, 3, 3, 1);
    let unequal = format!("input_counts[{own}] is 1 but output_counts[{own}] is 3");
    assert_contains(&exchange(&inputs, &outputs), &[&unequal]);
    assert_contains(&exchange(&[4], &[2, 2]), &["input_counts has 1 entries for 2 ranks"]);
    assert_contains(&exchange(&[1, 1], &[1, 1]), &["input has 4 elements, its counts say 2"]);
    started.sum()?;
    started.nccl.synchronize()?;
    Ok(())
}

fn dies(group: &ProcessGroup) -> Result<()> {
    let Some(mut started) = start(group)? else { return Ok(()) };
    if started.is_second() {
        std::process::abort();
    }
    let outcome = started.sum().and_then(|()| started.stuck());
    started.report(outcome)
}

/// The other rank has ended when the sum begins.
fn lost_connection(group: &ProcessGroup) -> Result<()> {
    let Some(mut started) = start(group)? else { return Ok(()) };
    let mut pids = [0; 2];
    group.all_gather(&[std::process::id() as i32], &mut pids)?;
    if started.is_second() {
        std::process::abort();
    }
    // Nobody has reaped it yet.
    let status = format!("/proc/{}/status", pids[1]);
    while !std::fs::read_to_string(&status)?.contains("State:\tZ") {
        std::thread::sleep(Duration::from_millis(1));
    }
    let outcome = started.sum().and_then(|()| started.stuck());
    started.report(outcome)
}

fn aborts(group: &ProcessGroup) -> Result<()> {
    let Some(mut started) = start(group)? else { return Ok(()) };
    if started.is_second() {
        started.nccl.abort("the data ran out");
        return started.report(started.nccl.check());
    }
    let outcome = started.sum().and_then(|()| started.stuck());
    started.report(outcome)
}

fn never_joins(group: &ProcessGroup) -> Result<()> {
    group.set_timeout(TIMEOUT);
    if group.rank() == 1 {
        group.use_cuda()?;
        return sleep();
    }
    let Some(started) = start(group)? else { return Ok(()) };
    started.report(Ok(()))
}

/// Sums that the fake lets fail.
fn repeats(group: &ProcessGroup) -> Result<()> {
    group.set_timeout(TIMEOUT);
    let Some(mut started) = start(group)? else { return Ok(()) };
    let outcome = (0..20).try_for_each(|_| started.sum()).and_then(|()| started.stuck());
    started.report(outcome)
}

/// A program that never looks: the process must end.
fn ignores(group: &ProcessGroup) -> Result<()> {
    group.set_timeout(TIMEOUT);
    let Some(mut started) = start(group)? else { return Ok(()) };
    if started.is_second() {
        return sleep();
    }
    started.sum()?;
    std::thread::sleep(Duration::from_secs(100));
    Ok(())
}
