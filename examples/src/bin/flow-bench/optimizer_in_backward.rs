//! A training step with `Ddp` whose optimizer steps after backward, and one whose optimizer steps in
//! backward.
//!
//! Blocks of both take turns in the same processes, on models with the same weights. Then a few steps of
//! each show how much memory they take: all of libtorch's large tensors lie in the group's shared memory,
//! where a thread reads the sum of their bytes over and over.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use flow_ddp::{Ddp, DdpBuilder, ProcessGroup};
use serde_json::json;
use tch::Tensor;
use tch::nn::{Adam, ModuleT, OptimizerConfig, VarStore};

use crate::in_turn::{self, LEARNING_RATE, Step};
use crate::models::Model;

/// The time between two readings of the bytes in use.
const INTERVAL: Duration = Duration::from_micros(200);
const MIB: f64 = (1 << 20) as f64;

#[derive(Args)]
pub struct Options {
    #[command(flatten)]
    in_turn: in_turn::Options,
    /// MiB of gradients in a bucket [default: 1 in the first, 25 in the others]
    #[arg(long, value_name = "MIB")]
    bucket_cap_mb: Option<f64>,
}

pub fn run(options: &Options) -> Result<()> {
    let Options { in_turn: options, bucket_cap_mb } = options;
    let (group, x, y) = in_turn::begin(options.model)?;
    let builder = || {
        let builder = Ddp::builder(&group);
        match bucket_cap_mb {
            Some(cap) => builder.bucket_cap_mb(*cap),
            None => builder,
        }
    };
    let model = options.model;
    let mut steps = [step(model, builder(), false, &x, &y)?, step(model, builder(), true, &x, &y)?];
    let [after, within] = in_turn::times(&group, options, &mut steps)?;
    let mut peaks = [0.0; 2];
    for (step, peak) in steps.iter_mut().zip(&mut peaks) {
        *peak = peak_of(&group, options.steps, step)?;
    }
    if group.rank() == 0 {
        let ratio = within / after;
        let [after_mib, within_mib] = peaks;
        let model = options.model.name();
        let ranks = group.world_size();
        if options.json {
            let line = json!({
                "bench": "optimizer_in_backward", "model": model, "ranks": ranks,
                "after_ms": after, "in_ms": within, "ratio": ratio,
                "after_mib": after_mib, "in_mib": within_mib,
            });
            println!("{line}");
        } else {
            println!(
                "step, {model}: {after:.3} ms with an optimizer after backward, {within:.3} ms in it: \
                 {ratio:.3} times as long; {after_mib:.1} MiB more than between steps, and \
                 {within_mib:.1} MiB"
            );
        }
    }
    Ok(())
}

/// Returns what runs a training step, which leaves no gradients.
fn step(
    model: Model,
    builder: DdpBuilder,
    in_backward: bool,
    x: &Tensor,
    y: &Tensor,
) -> Result<Step> {
    let x = x.shallow_clone();
    let y = y.shallow_clone();
    let vs = VarStore::new(x.device());
    tch::manual_seed(0);
    let net = model.build(&vs.root());
    if in_backward {
        let model = builder.optimizer_in_backward(Adam::default(), LEARNING_RATE).wrap(net, &vs)?;
        return Ok(Box::new(move || {
            Ok(model.forward_t(&x, true).cross_entropy_for_logits(&y).f_backward()?)
        }));
    }
    let model = builder.wrap(net, &vs)?;
    let mut optimizer = Adam::default().build(&vs, LEARNING_RATE)?;
    Ok(Box::new(move || {
        model.forward_t(&x, true).cross_entropy_for_logits(&y).f_backward()?;
        optimizer.step();
        optimizer.zero_grad();
        Ok(())
    }))
}

/// Returns the most MiB of large tensors on this rank that there are in a step, and not between two.
fn peak_of(group: &ProcessGroup, count: u32, step: &mut dyn FnMut() -> Result<()>) -> Result<f64> {
    group.barrier()?;
    let before = group.arena().usage().0;
    let is_over = AtomicBool::new(false);
    let most = std::thread::scope(|scope| {
        let arena = Arc::clone(group.arena());
        let is_over = &is_over;
        let reader = scope.spawn(move || {
            let mut most = before;
            while !is_over.load(Ordering::Relaxed) {
                most = most.max(arena.usage().0);
                std::thread::sleep(INTERVAL);
            }
            most
        });
        let result = (0..count).try_for_each(|_| step());
        is_over.store(true, Ordering::Relaxed);
        let most = reader.join().ok().context("the thread that reads the bytes panicked")?;
        result.map(|()| most)
    })?;
    Ok((most - before) as f64 / MIB)
}
