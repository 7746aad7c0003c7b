//! What several checks need.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use flow_comm::{ProcessGroup, ReduceOp};
use flow_ddp::{BoxError, CommHook, Ddp, GradBucket, Pending, Stats, TensorCollectives};
use tch::nn::VarStore;
use tch::{Kind, Tensor};

use crate::models::on_gpu;

/// Whether gradients are to be copied in this run, instead of being reduced where they are born.
pub fn copies() -> bool {
    std::env::var("FLOW_DDP_COPY").is_ok_and(|value| value == "1")
}

/// The mean, in a tensor of the hook's own.
pub struct OwnMean;

impl CommHook for OwnMean {
    fn launch(&mut self, bucket: &mut GradBucket<'_>) -> Result<Pending, BoxError> {
        let mut flat = bucket.buffer()?;
        bucket.group().all_reduce_tensor(&mut flat, ReduceOp::Avg)?;
        Ok(Pending::ready(flat))
    }

    fn waits_for_ranks(&self) -> bool {
        true
    }
}

/// The mean, sent in another type.
pub struct SentAs(pub Kind);

impl CommHook for SentAs {
    fn launch(&mut self, bucket: &mut GradBucket<'_>) -> Result<Pending, BoxError> {
        Ok(bucket.all_reduce()?)
    }

    fn kind(&self) -> Option<Kind> {
        Some(self.0)
    }
}

/// A small generator of numbers that all ranks draw alike.
pub struct Draws(pub u64);

impl Draws {
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % limit
    }
}

/// This rank's part of what all ranks work on.
pub fn part(joined: &Tensor, group: &ProcessGroup) -> Tensor {
    joined.chunk(group.world_size() as i64, 0).swap_remove(group.rank())
}

/// A group of this rank alone.
pub fn own_group(group: &ProcessGroup) -> Result<ProcessGroup> {
    let mut own = None;
    for rank in 0..group.world_size() {
        own = group.new_group(&[rank])?.or(own);
    }
    own.context("each rank has a group of its own")
}

/// Trains `count` models on all ranks, and six more on this rank alone. Jobs with other numbers of ranks
/// have seeds of their own.
pub fn random_models(
    group: &ProcessGroup,
    count: u64,
    trained: fn(&ProcessGroup, u64) -> Result<()>,
) -> Result<()> {
    let first = 1000 * group.world_size() as u64;
    for seed in first..first + count {
        trained(group, seed).with_context(|| format!("seed {seed}"))?;
    }
    let alone = own_group(group)?;
    for seed in first + count..first + count + 6 {
        trained(&alone, seed).with_context(|| format!("seed {seed}, alone"))?;
    }
    Ok(())
}

/// The mean of `of(rank)`.
pub fn mean(group: &ProcessGroup, of: impl Fn(usize) -> f64) -> f64 {
    (0..group.world_size()).map(of).sum::<f64>() / group.world_size() as f64
}

/// All variables by name.
pub fn values(store: &VarStore) -> BTreeMap<String, Tensor> {
    store.variables().into_iter().map(|(name, tensor)| (name, tensor.detach())).collect()
}

/// All gradients by parameter.
pub fn gradients(store: &VarStore) -> Result<BTreeMap<String, Tensor>> {
    let trained = store.variables().into_iter().filter(|(_, tensor)| tensor.requires_grad());
    trained
        .map(|(name, tensor)| {
            let gradient = tensor.grad();
            ensure!(gradient.defined(), "{name} has no gradient");
            Ok((name, gradient))
        })
        .collect()
}

/// Compares tensors by name; `tolerance` is relative to the largest element, or to 0.01 on GPUs if
/// that is more: there even a gradient of zero is noise.
pub fn close(
    actual: &BTreeMap<String, Tensor>,
    expected: &BTreeMap<String, Tensor>,
    tolerance: f64,
) -> Result<()> {
    ensure!(
        actual.keys().eq(expected.keys()),
        "{:?} instead of {:?}",
        actual.keys(),
        expected.keys()
    );
    for (name, actual) in actual {
        ensure!(actual.size() == expected[name].size(), "{name} is {:?}", actual.size());
        if actual.numel() == 0 {
            continue;
        }
        let [actual, expected] = [actual, &expected[name]].map(|t| t.to_kind(Kind::Double));
        let scale = expected.abs().max().double_value(&[]).max(if on_gpu() { 0.01 } else { 1e-6 });
        let difference = (actual - expected).abs().max().double_value(&[]);
        ensure!(
            difference <= tolerance * scale,
            "{name} differs by {difference}, its largest element is {scale}"
        );
    }
    Ok(())
}

/// Every element of the gradient must be `expected`.
pub fn gradient_is(tensor: &Tensor, expected: f64) -> Result<()> {
    let gradient = tensor.grad();
    ensure!(gradient.defined(), "there is no gradient; its elements should be {expected}");
    let difference = (&gradient - expected).abs().max().double_value(&[]);
    ensure!(
        difference <= 1e-6 * expected.abs().max(1.0),
        "the gradient's elements should be {expected}, they are from {} to {}",
        gradient.min().double_value(&[]),
        gradient.max().double_value(&[])
    );
    Ok(())
}

/// The variables must have the same bits on all ranks.
pub fn same_everywhere(group: &ProcessGroup, store: &VarStore) -> Result<()> {
    for (name, tensor) in values(store) {
        let all = group.all_gather_tensor(&tensor)?;
        for rank in 0..group.world_size() as i64 {
            ensure!(
                all.get(rank) == tensor,
                "{name} on rank {rank} differs from rank {}'s",
                group.rank()
            );
        }
    }
    Ok(())
}

/// The text of the error that a call must give.
pub fn error<T>(result: Result<T, impl std::fmt::Display>) -> Result<String> {
    result.err().map(|error| error.to_string()).context("there should have been an error")
}

/// The text of the error that a backward must give, if not on this rank then on another. No rank
/// waits for others on a GPU: one whose own gradients are complete gets it from its next backward, or
/// as it waits for the device.
pub fn failure<M, E: std::fmt::Display>(
    model: &Ddp<M>,
    backward: impl Fn() -> Result<(), E>,
) -> Result<String> {
    match backward() {
        Ok(()) if on_gpu() => match backward() {
            Ok(()) => error(model.synchronize()),
            result => error(result),
        },
        result => error(result),
    }
}

/// All words must be in the text.
pub fn says(text: &str, words: &[&str]) -> Result<()> {
    for word in words {
        ensure!(text.contains(word), "{word:?} is missing in: {text}");
    }
    Ok(())
}

/// Bytes that were reduced without a copy.
pub fn in_place(stats: &Stats) -> usize {
    stats.buckets.iter().map(|bucket| bucket.in_place).sum()
}

/// What the statistics of any backward must obey.
pub fn plausible(stats: &Stats, backwards: u64) -> Result<()> {
    ensure!(stats.backwards == backwards, "{} backwards instead of {backwards}", stats.backwards);
    ensure!((0.0..=1.0).contains(&stats.hidden()), "hidden: {}", stats.hidden());
    for bucket in &stats.buckets {
        ensure!(bucket.in_place <= bucket.bytes && !bucket.parameters.is_empty(), "{bucket:?}");
        ensure!(bucket.times.behind_backward <= bucket.times.ready_to_done, "{bucket:?}");
    }
    ensure!(!copies() || on_gpu() || in_place(stats) == 0, "gradients were not copied: {stats:?}");
    Ok(())
}
