//! Buckets of gradients: packed, reduced and spread, beside the stream that computes.

use anyhow::{Context, Result, ensure};
use flow_comm::{DType, ProcessGroup};
use flow_harness::{Process, TEST_TIMEOUT, assert_contains};

use super::memory::{Array, Gpu};
use crate::registry::Test;

/// Gradients of these lengths: among them an empty one, and one of several pieces.
const LENGTHS: [usize; 6] = [1, 513, 0, 100_003, 64, 7];
const STEPS: usize = 3;

pub fn run(group: &ProcessGroup) -> Result<()> {
    let device = group.use_cuda()?;
    let nccl = group.nccl(device.ordinal())?;
    let gpu = Gpu::new(&device)?;
    let pairs = [
        (DType::F32, DType::F32),
        (DType::F64, DType::F64),
        (DType::BF16, DType::BF16),
        (DType::F32, DType::BF16),
        (DType::F32, DType::F16),
        (DType::F64, DType::F32),
    ];
    for (gradients, communication) in pairs {
        let mut buckets = [
            nccl.bucket(0, gradients, communication, &LENGTHS)?,
            nccl.bucket(1, gradients, communication, &LENGTHS[1..3])?,
        ];
        for step in 0..STEPS {
            let mut kept: Vec<Vec<Array>> = Vec::new();
            for (bucket, lengths) in buckets.iter_mut().zip([&LENGTHS[..], &LENGTHS[1..3]]) {
                let array = |(slot, &length): (usize, &usize)| {
                    gpu.array(gradients, &own(group.rank(), step, slot, length))
                };
                let mut arrays =
                    lengths.iter().enumerate().map(array).collect::<Result<Vec<_>>>()?;
                nccl.reduce_bucket(bucket, &mut arrays, std::slice::from_ref(&gpu.stream))?;
                kept.push(arrays);
            }
            nccl.join(&gpu.stream)?;
            for (number, (bucket, arrays)) in buckets.iter().zip(&kept).enumerate() {
                for (slot, array) in arrays.iter().enumerate() {
                    let result = if gradients == communication {
                        gpu.snapshot(&bucket.view(slot).context("a slot")?)?
                    } else {
                        gpu.snapshot(array)?
                    };
                    let length = result.numbers(&gpu)?.len();
                    check(group, step, slot, &result.numbers(&gpu)?, length).map_err(|e| {
                        e.context(format!("{gradients} as {communication}, bucket {number}"))
                    })?;
                }
            }
            let [ready, done] = buckets[1].timing().ok_or_else(|| anyhow::anyhow!("no timing"))?;
            done.synchronize()?;
            done.since(ready)?;
        }
        for root in [0, group.world_size() - 1] {
            let array = |(slot, &length): (usize, &usize)| {
                gpu.array(gradients, &own(group.rank(), 9, slot, length))
            };
            let mut arrays = LENGTHS.iter().enumerate().map(array).collect::<Result<Vec<_>>>()?;
            let mut bucket = nccl.bucket_to_broadcast(2, gradients, &LENGTHS)?;
            nccl.broadcast_bucket(&mut bucket, &mut arrays, root, &gpu.stream)?;
            for (slot, array) in arrays.iter().enumerate() {
                let found = gpu.snapshot(array)?.numbers(&gpu)?;
                ensure!(
                    found == own(root, 9, slot, LENGTHS[slot]),
                    "slot {slot} of rank {root}'s broadcast: {found:?}"
                );
            }
        }
        // In place: gradients that are views of the bucket, as after a step that kept them.
        if gradients == communication {
            let array = |(slot, &length): (usize, &usize)| {
                gpu.array(gradients, &own(group.rank(), 1, slot, length))
            };
            let mut arrays = LENGTHS.iter().enumerate().map(array).collect::<Result<Vec<_>>>()?;
            nccl.reduce_bucket(&mut buckets[0], &mut arrays, std::slice::from_ref(&gpu.stream))?;
            let places: Vec<_> =
                (0..LENGTHS.len()).filter_map(|slot| buckets[0].view(slot)).collect();
            ensure!(
                places.len() == LENGTHS.len() && buckets[0].view(LENGTHS.len()).is_none(),
                "other slots"
            );
            let mut views = places.clone();
            nccl.reduce_bucket(&mut buckets[0], &mut views, std::slice::from_ref(&gpu.stream))?;
            nccl.join(&gpu.stream)?;
            for (slot, place) in places.iter().enumerate() {
                let numbers = gpu.snapshot(place)?.numbers(&gpu)?;
                check(group, 1, slot, &numbers, LENGTHS[slot])?; // the mean of equal numbers
            }
        }
    }
    Ok(())
}

/// One bucket after the other, then a broadcast: the test reads in which order NCCL was called.
pub fn order(group: &ProcessGroup) -> Result<()> {
    let device = group.use_cuda()?;
    let nccl = group.nccl(device.ordinal())?;
    let gpu = Gpu::new(&device)?;
    for length in [100, 300, 200] {
        let mut bucket = nccl.bucket(0, DType::F32, DType::F32, &[length])?;
        let mut arrays = [gpu.array(DType::F32, &vec![1.0; length])?];
        nccl.reduce_bucket(&mut bucket, &mut arrays, std::slice::from_ref(&gpu.stream))?;
    }
    nccl.broadcast(&mut [gpu.array(DType::U8, &[1.0; 5])?], 0, &gpu.stream)?;
    nccl.barrier()?;
    Ok(())
}

/// Whole numbers, whose mean over 1, 2 or 4 ranks is exact in every type.
fn own(rank: usize, step: usize, slot: usize, length: usize) -> Vec<f64> {
    (0..length).map(|i| (4 * ((rank + step + slot + i) % 8)) as f64).collect()
}

fn check(
    group: &ProcessGroup,
    step: usize,
    slot: usize,
    found: &[f64],
    length: usize,
) -> Result<()> {
    ensure!(found.len() == length, "slot {slot} has {} numbers", found.len());
    let size = group.world_size();
    let all: Vec<Vec<f64>> = (0..size).map(|rank| own(rank, step, slot, length)).collect();
    for (i, &found) in found.iter().enumerate() {
        let mean = all.iter().map(|numbers| numbers[i]).sum::<f64>() / size as f64;
        let right = (found - mean).abs() <= 0.01 * mean;
        ensure!(
            right,
            "rank {}, step {step}, slot {slot}: element {i} is {found}, not {mean}",
            group.rank()
        );
    }
    Ok(())
}

/// The fake's journal of calls is the same on both ranks.
pub fn same_calls(test: &Test) {
    let journal = test.folder.path().join("calls");
    let mut commands = test.commands();
    commands[0].env("FLOW_FAKE_LOG", &journal);
    Process::start(commands.remove(0)).finish(TEST_TIMEOUT).success();
    let [first, second] = [0, 1].map(|rank| {
        std::fs::read_to_string(journal.with_extension(rank.to_string()))
            .expect("the fake wrote it")
    });
    let collectives = |text: &str| -> Vec<String> {
        let is_one = |line: &&str| {
            ["ncclAllReduce", "ncclBroadcast"].iter().any(|call| line.starts_with(call))
        };
        text.lines().filter(is_one).map(str::to_owned).collect()
    };
    let calls = collectives(&first);
    assert_eq!(calls, collectives(&second));
    // The sums that connect the ranks, three registered buckets, then the broadcast, then the barrier.
    let [_, _, buckets @ .., broadcast, barrier] = &calls[..7] else { panic!("{calls:?}") };
    let counts = [100, 300, 200].map(|count| format!("count={count} "));
    for (call, count) in buckets.iter().zip(&counts) {
        assert_contains(call, &["ncclAllReduce", count, "registered=1"]);
    }
    assert!(broadcast.starts_with("ncclBroadcast") && barrier.starts_with("ncclAllReduce"));
    for text in [first, second] {
        let ends: Vec<&str> =
            text.lines().rev().take(4).filter_map(|line| line.split(' ').next()).collect();
        let [destroy, finalize] = ["ncclCommDestroy", "ncclCommFinalize"];
        assert_eq!(ends, [destroy, finalize, destroy, finalize], "{text}");
    }
}
