//! The record of operations: the flight recorder, and `FLOW_TRACE`, which writes each rank's
//! timeline.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use flow_comm::{DType, Lane, ProcessGroup, ReduceOp};
use flow_harness::{DETECTION_LIMIT, Process};
use nix::sys::wait::{WaitStatus, wait};
use nix::unistd::{ForkResult, fork};
use rustix::process::{Signal, getpid, kill_process};
use serde_json::Value;

use crate::beside;
use crate::nccl::memory::Gpu;
use crate::registry::{Job, Scenario, Test, by_hand, launched, process, scenario};

const TWO: &[Job] = &[by_hand(&[2]), by_hand(&[1, 1])];
const ROUNDS: u64 = 50;

pub const SCENARIOS: &[Scenario] = &[
    scenario(
        "the_flight_recorder_has_the_last_operations",
        records,
        &[launched(2), by_hand(&[1, 1])],
    ),
    scenario("an_operation_has_one_number", numbers, &[launched(2), by_hand(&[1, 1])]),
    scenario("each_join_has_a_name", names, &[launched(2)]),
    process("each_rank_writes_what_it_did_and_when", work, TWO).checked_by(each_writes),
    process("a_rank_that_exits_in_a_group_writes", exits, TWO).checked_by(each_writes_its_sum),
    process("a_forked_process_leaves_the_timeline_alone", fork_and_work, &[by_hand(&[2])])
        .checked_by(each_writes_its_sum),
    process("operations_over_nccl_are_written", work_on_gpu, &[by_hand(&[2]).on_fake_cuda()])
        .checked_by(nccl_is_written),
    process("a_rank_that_sees_a_failure_writes_what_failed", fails, TWO)
        .checked_by(|test| failure_is_written(test, "all_reduce", 1)),
    process("a_failure_over_nccl_is_written", fails_on_gpu, &[by_hand(&[2]).on_fake_cuda()])
        .checked_by(|test| failure_is_written(test, "all_reduce", 4)),
];

fn sum(group: &ProcessGroup) -> flow_comm::Result<()> {
    group.all_reduce(&mut [1.0_f32; 1000], ReduceOp::Sum)
}

fn records(group: &ProcessGroup) -> Result<()> {
    let group = group.duplicate()?;
    let other = 1 - group.rank();
    for _ in 0..ROUNDS {
        sum(&group)?;
    }
    match group.rank() {
        0 => group.send(&[7_u8; 9], other)?,
        _ => group.recv(&mut [0_u8; 9], other)?,
    }
    let all = group.flight_recorder();
    let (messages, sums): (Vec<_>, Vec<_>) =
        all.iter().partition(|record| record.operation != "all_reduce");
    ensure!(messages.len() == 1 && sums.len() == ROUNDS as usize, "{all:?}");
    let expected = if group.rank() == 0 { ("send", 9) } else { ("recv", 9) };
    ensure!((messages[0].operation, messages[0].bytes) == expected, "{messages:?}");
    for (number, record) in sums.iter().enumerate() {
        let done = record.done.context("it is over")?;
        ensure!(record.sequence == number as u64 && record.bytes == 4000, "{record:?}");
        ensure!(record.queued <= record.started && record.started <= done, "{record:?}");
        ensure!(record.bucket.is_none() && record.group == sums[0].group, "{record:?}");
    }
    // One is under way until the other rank comes to it.
    if group.rank() == 0 {
        let work = beside::all_reduce(&group, vec![1.0_f32; 10], ReduceOp::Sum)?;
        // A thread begins it.
        let last = loop {
            let records = group.flight_recorder();
            if let Some(last) = records.into_iter().find(|record| record.sequence == ROUNDS) {
                break last;
            }
            std::thread::yield_now();
        };
        ensure!(last.operation == "all_reduce" && last.done.is_none(), "{last:?}");
        group.send(&[0_u8], 1)?;
        work.wait()?;
    } else {
        group.recv(&mut [0_u8], 0)?;
        group.all_reduce(&mut [1.0_f32; 10], ReduceOp::Sum)?;
    }
    // Only the last are kept.
    for _ in 0..300 {
        group.barrier()?;
    }
    let kept = group.flight_recorder();
    ensure!(kept.iter().all(|record| record.operation == "barrier"), "{kept:?}");
    let last = kept.last().context("some are kept")?;
    ensure!(kept.len() >= 200 && last.sequence == ROUNDS + 300, "{} kept: {last:?}", kept.len());
    Ok(())
}

/// On both ranks all operations have the same numbers, each once, in whatever form they are called.
fn numbers(group: &ProcessGroup) -> Result<()> {
    let group = group.duplicate()?;
    let uneven = || {
        group.start(Lane::Collectives, "all_to_all_v", |group| {
            group.all_to_all_v(&[1_i64, 2], &[1, 1], &mut [0_i64; 2], &[1, 1])
        })
    };
    // Queued beside others, whose numbers are taken meanwhile.
    let works = (0..3).map(|_| uneven()).collect::<flow_comm::Result<Vec<_>>>()?;
    let barriers =
        (0..3).map(|_| beside::barrier(&group)).collect::<flow_comm::Result<Vec<_>>>()?;
    for work in works {
        work.wait()?;
    }
    for work in barriers {
        work.wait()?;
    }
    group.all_to_all_v(&[1_i64, 2], &[1, 1], &mut [0_i64; 2], &[1, 1])?;
    let gathered = group.start(Lane::Collectives, "all_gather_v", |group| {
        group.all_gather_v(&[1_i64], &mut [0_i64; 2], &[1, 1])
    })?;
    gathered.wait()?;
    let reduced = group.start(Lane::Collectives, "reduce_scatter_v", |group| {
        group.reduce_scatter_v(&[1_i64, 2], &mut [0_i64], &[1, 1], ReduceOp::Sum)
    })?;
    reduced.wait()?;
    let records = group.flight_recorder();
    let found: Vec<(u64, &str)> =
        records.iter().map(|record| (record.sequence, record.operation)).collect();
    let uneven = "all_to_all_v";
    let barrier = "barrier";
    let operations = [
        uneven,
        uneven,
        uneven,
        barrier,
        barrier,
        barrier,
        uneven,
        "all_gather_v",
        "reduce_scatter_v",
    ];
    ensure!(found == (0..).zip(operations).collect::<Vec<_>>(), "{found:?}");
    ensure!(group.sequence() == operations.len() as u64);
    Ok(())
}

/// The names are alike on all ranks, and differ between groups.
fn names(first: &ProcessGroup) -> Result<()> {
    let name = |group: &ProcessGroup| -> Result<String> {
        group.barrier()?;
        Ok(group.flight_recorder().last().context("a record")?.group.clone())
    };
    let membership = flow_comm::env::Membership::from_env()?;
    let second = ProcessGroup::join(&membership, DETECTION_LIMIT)?;
    let named = ProcessGroup::join_named(&membership, "evaluation", DETECTION_LIMIT)?;
    let own = [name(first)?, name(&second)?, name(&named)?, name(&second.duplicate()?)?];
    ensure!(own == ["0", "1", "\"evaluation\"/0", "1.0:0"], "{own:?}");
    Ok(())
}

/// Each rank forks a process that joins by its own, and leaves after the rank has.
fn fork_and_work() -> Result<()> {
    drop(ProcessGroup::in_process(1)?);
    let (left, leave) = std::io::pipe()?;
    // SAFETY: the process has no other thread that holds a lock.
    if let ForkResult::Child = unsafe { fork() }? {
        drop(leave);
        let work = || -> Result<()> {
            let group = ProcessGroup::from_env()?;
            group.barrier()?;
            std::io::Read::read(&mut &left, &mut [0])?;
            Ok(())
        };
        std::process::exit(i32::from(work().is_err()));
    }
    sum(&ProcessGroup::from_env()?)?;
    drop(leave);
    ensure!(matches!(wait()?, WaitStatus::Exited(_, 0)));
    Ok(())
}

fn each_writes_its_sum(test: &Test) {
    assert_eq!(traced(test), [true, true]);
    for rank in [0, 1] {
        let events = events(test.folder.path(), rank);
        assert_eq!(events.len(), 1, "{events:?}");
        assert_eq!(events[0]["name"], "all_reduce");
    }
}

/// Drops its groups before it ends: then the timeline is written.
fn work() -> Result<()> {
    let group = ProcessGroup::from_env()?;
    let other = 1 - group.rank();
    let part = group.duplicate()?;
    for round in 0..ROUNDS {
        sum(&group)?;
        group.barrier()?;
        part.barrier()?;
        match (group.rank() as u64 + round) % 2 {
            0 => group.send(&[7_u8; 9], other)?,
            _ => group.recv(&mut [0_u8; 9], other)?,
        }
    }
    Ok(())
}

fn exits() -> Result<()> {
    let group = ProcessGroup::from_env()?;
    sum(&group)?;
    std::process::exit(0);
}

fn work_on_gpu() -> Result<()> {
    let group = ProcessGroup::from_env()?;
    let device = group.use_cuda()?;
    let nccl = group.nccl(device.ordinal())?;
    let gpu = Gpu::new(&device)?;
    let mut buffer = gpu.array(DType::F32, &[1.0; 1000])?;
    for _ in 0..ROUNDS {
        nccl.all_reduce(&mut buffer, ReduceOp::Sum, &gpu.stream)?;
        group.barrier()?;
    }
    nccl.synchronize()?;
    Ok(())
}

/// Rank 1 is killed on its way to the sum.
fn fails() -> Result<()> {
    let group = ProcessGroup::from_env()?;
    group.barrier()?;
    if group.rank() == 1 {
        kill_process(getpid(), Signal::KILL)?;
    }
    ensure!(sum(&group).is_err());
    Ok(())
}

fn fails_on_gpu() -> Result<()> {
    let group = ProcessGroup::from_env()?;
    let device = group.use_cuda()?;
    let nccl = group.nccl(device.ordinal())?;
    let gpu = Gpu::new(&device)?;
    let mut buffer = gpu.array(DType::F32, &[1.0; 1000])?;
    nccl.all_reduce(&mut buffer, ReduceOp::Sum, &gpu.stream)?;
    nccl.synchronize()?;
    group.barrier()?;
    if group.rank() == 1 {
        kill_process(getpid(), Signal::KILL)?;
    }
    let failed = nccl.all_reduce(&mut buffer, ReduceOp::Sum, &gpu.stream).is_err();
    ensure!(failed || gpu.stream.synchronize().is_err() || nccl.check().is_err());
    Ok(())
}

/// Runs two ranks with FLOW_TRACE; returns whether they ended well.
fn traced(test: &Test) -> Vec<bool> {
    let start = |mut command: std::process::Command| {
        command.env("FLOW_TRACE", test.folder.path().join("new"));
        Process::start(command)
    };
    let ranks: Vec<Process> = test.commands().into_iter().map(start).collect();
    ranks.into_iter().map(|rank| rank.finish(DETECTION_LIMIT).code == Some(0)).collect()
}

/// The complete events of a rank.
fn events(folder: &Path, rank: usize) -> Vec<Value> {
    let path = folder.join(format!("new/rank{rank}.json"));
    let text = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let trace: Value = serde_json::from_slice(&text).expect("it is whole");
    assert_eq!(trace["otherData"]["rank"], rank);
    assert_eq!(trace["otherData"]["world_size"], 2);
    assert_eq!(trace["otherData"]["dropped"], 0);
    let events = trace["traceEvents"].as_array().expect("a list");
    let name = events[0]["args"]["name"].as_str().expect("a process has a name");
    assert!(name.starts_with(&format!("rank {rank} on ")), "{name}");
    events.iter().filter(|event| event["ph"] == "X").cloned().collect()
}

/// When an event began and ended, in microseconds.
fn span(event: &Value) -> (f64, f64) {
    let [begin, time] = [&event["ts"], &event["dur"]].map(|time| time.as_f64().expect("a time"));
    (begin, begin + time)
}

/// The collectives of a rank by group and sequence number.
fn collectives(events: &[Value]) -> BTreeMap<(String, u64), &Value> {
    let is_message = |event: &&Value| event["name"] == "send" || event["name"] == "recv";
    let key = |event: &Value| {
        let args = &event["args"];
        let group = args["group"].as_str().expect("a name").to_owned();
        (group, args["sequence"].as_u64().expect("a number"))
    };
    events.iter().filter(|event| !is_message(event)).map(|event| (key(event), event)).collect()
}

fn each_writes(test: &Test) {
    assert_eq!(traced(test), [true, true]);
    let both = [0, 1].map(|rank| events(test.folder.path(), rank));
    let [first, second] = [&both[0], &both[1]].map(|events| collectives(events));
    assert!(first.keys().eq(second.keys()), "{:?} {:?}", first.keys(), second.keys());
    let numbers: Vec<u64> =
        first.keys().filter(|(group, _)| group == "0").map(|(_, number)| *number).collect();
    // One made the duplicate.
    assert_eq!(numbers, (0..=2 * ROUNDS).collect::<Vec<_>>(), "numbers are missing");
    let backend = if test.job.nodes().len() == 1 { "shm" } else { "tcp" };
    let mut barriers = 0;
    let mut groups = std::collections::BTreeSet::new();
    for (key, event) in &first {
        let other = second[key];
        groups.insert(&key.0);
        assert_eq!(event["cat"], "comm");
        assert_eq!(event["args"]["backend"], backend);
        assert!(event["args"]["queued"].as_f64() <= event["args"]["started"].as_f64(), "{event}");
        assert_eq!(event["name"], other["name"], "{key:?}");
        // A barrier ends on no rank before it has begun on all.
        if event["name"] == "barrier" {
            barriers += 1;
            let ((begin, end), (other_begin, other_end)) = (span(event), span(other));
            let slack = 1000.0; // of the clocks
            assert!(end + slack >= other_begin && other_end + slack >= begin, "{event} {other}");
        }
    }
    assert_eq!((barriers, groups.len()), (2 * ROUNDS, 2), "{groups:?}");
    let count =
        |rank: usize, name| both[rank].iter().filter(|event| event["name"] == name).count() as u64;
    for rank in [0, 1] {
        assert_eq!([count(rank, "send"), count(rank, "recv")], [ROUNDS / 2, ROUNDS / 2]);
    }
}

/// One sequence for operations on the host and on the GPU.
fn nccl_is_written(test: &Test) {
    assert_eq!(traced(test), [true, true]);
    for rank in [0, 1] {
        let events = events(test.folder.path(), rank);
        let collectives = collectives(&events);
        let numbers: Vec<u64> = collectives.keys().map(|(_, number)| *number).collect();
        assert!(numbers.windows(2).all(|pair| pair[1] == pair[0] + 1), "{numbers:?}");
        let of = |backend: &str, name: &str| {
            let is_one =
                |event: &&&Value| event["args"]["backend"] == backend && event["name"] == name;
            collectives.values().filter(is_one).count() as u64
        };
        assert_eq!([of("nccl", "all_reduce"), of("shm", "barrier")], [ROUNDS, ROUNDS]);
    }
}

fn failure_is_written(test: &Test, operation: &str, sequence: u64) {
    assert_eq!(traced(test), [true, false]);
    let events = events(test.folder.path(), 0);
    let failed: Vec<&Value> =
        events.iter().filter(|event| event["args"]["failed"] == true).collect();
    assert_eq!(failed.len(), 1, "{events:?}");
    assert_eq!(failed[0]["name"], operation);
    assert_eq!(failed[0]["args"]["sequence"], sequence);
    assert!(!test.folder.path().join("new/rank1.json").exists(), "rank 1 was killed");
}
