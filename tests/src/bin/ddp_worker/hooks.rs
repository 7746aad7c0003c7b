//! Communication hooks.

use std::sync::{Arc, Mutex};

use anyhow::{Context, Result, ensure};
use flow_comm::{ProcessGroup, ReduceOp};
use flow_ddp::comm_hooks::{AllReduce, Bf16Compress, Fp16Compress};
use flow_ddp::{
    BoxError, CommHook, Ddp, Error, GradBucket, Pending, TensorCollectives, TryBackwardStep,
};
use tch::nn::{self, OptimizerConfig};
use tch::{Kind, Tensor};

use crate::helpers::{SentAs, error, failure, gradient_is, mean, plausible, says};
use crate::models::{Vectors, store};

/// A hook in a closure.
struct Hook<F>(F);

impl<F> CommHook for Hook<F>
where
    F: FnMut(&mut GradBucket<'_>) -> Result<Pending, BoxError> + Send + 'static,
{
    fn launch(&mut self, bucket: &mut GradBucket<'_>) -> Result<Pending, BoxError> {
        (self.0)(bucket)
    }

    fn name(&self) -> String {
        "hook".into()
    }
}

fn sum(bucket: &GradBucket<'_>) -> Result<Tensor, BoxError> {
    let mut flat = bucket.buffer()?;
    bucket.group().all_reduce_tensor(&mut flat, ReduceOp::Sum)?;
    Ok(flat)
}

/// Trains vectors for some steps; their gradients are `scale` times the mean.
fn scaled(
    group: &ProcessGroup,
    scale: f64,
    hook: impl Fn() -> Box<dyn FnMut(&mut GradBucket<'_>) -> Result<Pending, BoxError> + Send>,
) -> Result<()> {
    for view in [false, true] {
        let store = store();
        let lengths = [40_000, 10, 1, 70_000];
        let builder = Ddp::builder(group).bucket_cap_mb(0.1).gradient_as_bucket_view(view);
        let model = builder.comm_hook(Hook(hook())).wrap(Vectors::new(&store, &lengths), &store)?;
        for step in 0..5 {
            if step != 2 {
                model.0.iter().try_for_each(|w| flow_autograd::set_grad(w, None))?;
            } else {
                model.0.iter().for_each(|w| w.shallow_clone().zero_grad());
            }
            let factor = |index: usize, rank: usize| ((index + 1) * (rank + step)) as f64;
            let own: Vec<_> = (0..4).map(|index| (index, factor(index, group.rank()))).collect();
            model.weighted_sum(&own).f_backward()?;
            for (index, vector) in model.0.iter().enumerate() {
                gradient_is(vector, scale * mean(group, |rank| factor(index, rank)))
                    .with_context(|| format!("w{index} in step {step}"))?;
            }
        }
        plausible(&model.stats(), 5)?;
    }
    Ok(())
}

/// What a hook returns is what the optimizer gets: at once, at the end of backward, or from the
/// bucket itself.
pub fn own(group: &ProcessGroup) -> Result<()> {
    let ranks = group.world_size() as f64;
    scaled(group, ranks, || Box::new(|bucket| Ok(Pending::ready(sum(bucket)?))))?;
    scaled(group, 1.0, || {
        Box::new(move |bucket| {
            let flat = sum(bucket)?;
            Ok(Pending::new(move || Ok(flat / ranks)))
        })
    })?;
    // What a hook writes into gradients is averaged.
    scaled(group, 3.0, || {
        Box::new(|bucket| {
            let mut gradients = bucket.gradients()?;
            tch::no_grad(|| {
                gradients.iter_mut().for_each(|gradient| drop(gradient.g_mul_scalar_(3.0)));
            });
            Ok(bucket.all_reduce()?)
        })
    })?;

    // The buckets that a hook gets are those of the statistics.
    let store = store();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let shared = Arc::clone(&seen);
    let hook = Hook(move |bucket: &mut GradBucket<'_>| {
        let names: Vec<String> = bucket.parameters().map(|(name, _)| name.into()).collect();
        let shapes: Vec<_> = bucket.parameters().map(|(_, tensor)| tensor.size()).collect();
        let gradients = bucket.gradients()?;
        let same = gradients.iter().map(Tensor::size).eq(shapes);
        let length: usize = gradients.iter().map(Tensor::numel).sum();
        let flat = same && bucket.buffer()?.size() == [length as i64];
        shared.lock().map_err(|e| e.to_string())?.push((
            bucket.index(),
            bucket.is_last(),
            names,
            flat,
        ));
        Ok(bucket.all_reduce()?)
    });
    let builder = Ddp::builder(group).bucket_cap_mb(1e-6).comm_hook(hook);
    let model = builder.wrap(Vectors::new(&store, &[10, 20, 30]), &store)?;
    for _ in 0..2 {
        model.weighted_sum(&[(2, 1.0), (0, 1.0), (1, 1.0)]).f_backward()?;
        let seen = std::mem::take(&mut *seen.lock().map_err(|e| anyhow::anyhow!("{e}"))?);
        ensure!(seen.len() == 3, "{seen:?}");
        for (place, (index, is_last, names, flat)) in seen.iter().enumerate() {
            ensure!(*index == place && *is_last == (place == 2) && names.len() == 1, "{seen:?}");
            ensure!(*flat, "gradients are not of their parameters' shapes: {seen:?}");
        }
    }
    Ok(())
}

/// Hooks that leave some of many buckets to `all_reduce` and reduce the others themselves: ranks
/// keep the order.
pub fn in_turn(group: &ProcessGroup) -> Result<()> {
    let store = store();
    let ranks = group.world_size() as f64;
    let hook = Hook(move |bucket: &mut GradBucket<'_>| {
        Ok(match bucket.index() % 70 {
            69 => Pending::ready(sum(bucket)? / ranks),
            _ => bucket.all_reduce()?,
        })
    });
    let lengths: Vec<i64> = (0..200).map(|index| if index % 9 == 4 { 20_000 } else { 5 }).collect();
    let builder = Ddp::builder(group).bucket_cap_mb(1e-6).comm_hook(hook);
    let model = builder.wrap(Vectors::new(&store, &lengths), &store)?;
    for step in 0..6 {
        model.0.iter().try_for_each(|w| flow_autograd::set_grad(w, None))?;
        let factor = |index: usize, rank: usize| ((index + 1) * (rank + step)) as f64;
        let factors: Vec<_> = (0..lengths.len()).map(|i| (i, factor(i, group.rank()))).collect();
        model.weighted_sum(&factors).f_backward()?;
        for (index, vector) in model.0.iter().enumerate() {
            gradient_is(vector, mean(group, |rank| factor(index, rank)))
                .with_context(|| format!("w{index} in step {step}"))?;
        }
    }
    Ok(())
}

/// Parameters that only some ranks use, or none.
pub fn unused(group: &ProcessGroup) -> Result<()> {
    for view in [false, true] {
        let store = store();
        let ranks = group.world_size() as f64;
        let hook =
            Hook(move |bucket: &mut GradBucket<'_>| Ok(Pending::ready(sum(bucket)? / ranks)));
        let builder = Ddp::builder(group).find_unused_parameters(true);
        let model = builder
            .gradient_as_bucket_view(view)
            .comm_hook(hook)
            .wrap(Vectors::new(&store, &[40_000, 10, 40_000, 10]), &store)?;
        for _ in 0..3 {
            model.0.iter().try_for_each(|w| flow_autograd::set_grad(w, None))?;
            let mut own = vec![(0, 4.0)];
            if group.rank() == 0 {
                own.extend([(1, 8.0), (2, 16.0)]);
            }
            model.weighted_sum(&own).f_backward()?;
            for (index, all) in [(0, 4.0 * ranks), (1, 8.0), (2, 16.0)] {
                gradient_is(&model.0[index], all / ranks).with_context(|| format!("w{index}"))?;
            }
            ensure!(!model.0[3].grad().defined(), "the gradient of a parameter that nobody used");
        }
    }
    Ok(())
}

/// A hook's error, and what it must not return, end the backward with the bucket's number.
pub fn failing(group: &ProcessGroup) -> Result<()> {
    type Made = fn(&mut GradBucket<'_>) -> Result<Pending, BoxError>;
    let cases: [(Made, &[&str]); 4] = [
        (|_| Err("the disk is full".into()), &["bucket 0", "the disk is full"]),
        (|_| Ok(Pending::new(|| Err("the disk is slow".into()))), &["bucket 0", "disk is slow"]),
        (
            |bucket| Ok(Pending::ready(bucket.buffer()?.slice(0, 1, None, 1))),
            &["bucket 0", "one dimension and 30 elements"],
        ),
        (|bucket| Ok(Pending::ready(bucket.buffer()?.view([5, 6]))), &["one dimension"]),
    ];
    for (made, words) in cases {
        let store = store();
        let model = Ddp::builder(group)
            .comm_hook(Hook(made))
            .wrap(Vectors::new(&store, &[10, 20]), &store)?;
        let loss = model.weighted_sum(&[(0, 1.0), (1, 1.0)]);
        let mut optimizer = nn::Sgd::default().build(&store, 0.1)?;
        let error = optimizer.try_backward_step(&loss).err().context("no error")?;
        // Ranks whose own hook has not failed yet get another's error.
        let own = matches!(error, Error::CommHook { bucket: 0, .. });
        ensure!(own || matches!(error, Error::Comm(_)), "{error:?}");
        says(&error.to_string(), words)?;
        group.barrier()?;
    }
    // One rank's alone is not that of the other ranks' hooks, which wait for it.
    let hook = Hook(|bucket: &mut GradBucket<'_>| {
        if bucket.group().rank() == 0 {
            return Err("the disk is full".into());
        }
        Ok(Pending::ready(sum(bucket)?))
    });
    let store = store();
    let model = Ddp::builder(group).comm_hook(hook).wrap(Vectors::new(&store, &[10]), &store)?;
    let text = failure(&model, || model.weighted_sum(&[(0, 1.0)]).f_backward())?;
    says(&text, &["rank 0: the communication hook", "the disk is full"])?;
    let own = format!("rank {}: the communication hook", group.rank());
    ensure!(text.contains(&own) == (group.rank() == 0), "{text}");
    group.barrier()?;
    Ok(())
}

/// A hook that panics at the end of one rank's backward fails the backwards of all ranks.
pub fn panicking(group: &ProcessGroup) -> Result<()> {
    let store = store();
    let last = group.world_size() - 1;
    let panics = group.rank() == last;
    let hook = Hook(move |bucket: &mut GradBucket<'_>| {
        let flat = sum(bucket)?;
        Ok(Pending::new(move || if panics { panic!("the hook cannot go on") } else { Ok(flat) }))
    });
    let model = Ddp::builder(group).comm_hook(hook).wrap(Vectors::new(&store, &[10]), &store)?;
    let backward = || model.weighted_sum(&[(0, 1.0)]).f_backward().map_err(Error::from_backward);
    // The others may have ended this backward; not the next one.
    let first = backward();
    let second = error(backward())?;
    if panics {
        says(&error(first)?, &["panicked: the hook cannot go on"])?;
    }
    says(&second, &[&format!("rank {last}"), "its backward failed"])?;
    group.barrier()?;
    Ok(())
}

/// All ranks must have the same hook.
pub fn differing(group: &ProcessGroup) -> Result<()> {
    let store = store();
    let model = Vectors::new(&store, &[10]);
    let builder = Ddp::builder(group);
    let builder = match group.rank() {
        0 => builder.comm_hook(AllReduce),
        1 => builder.comm_hook(Bf16Compress),
        _ => builder.comm_hook(Fp16Compress),
    };
    says(&error(builder.wrap(model, &store))?, &["AllReduce", "Bf16Compress"])?;
    // The same hook, with another type to send.
    let kind = if group.rank() == 0 { Kind::Half } else { Kind::BFloat16 };
    let builder = Ddp::builder(group).comm_hook(SentAs(kind));
    let wrapped = builder.wrap(Vectors::new(&store, &[10]), &store);
    says(&error(wrapped)?, &["options", "Half", "BFloat16"])
}
