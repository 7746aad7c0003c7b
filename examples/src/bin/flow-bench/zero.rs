//! A training step with `Ddp` and tch's Adam, one with `ZeroRedundancyOptimizer`, and one in whose backward
//! that steps.
//!
//! Blocks of all take turns in the same processes, on models with the same weights. The state of an
//! optimizer is what its first step adds to the group's shared memory, in which all of libtorch's large
//! tensors lie.

use anyhow::Result;
use flow_ddp::{Ddp, ProcessGroup, TryBackwardStep, ZeroRedundancyOptimizer};
use serde_json::json;
use tch::Tensor;
use tch::nn::{Adam, ModuleT, OptimizerConfig, VarStore};

use crate::in_turn::{self, LEARNING_RATE, Options, Step};
use crate::models::Model;

const MIB: f64 = (1 << 20) as f64;

pub fn run(options: &Options) -> Result<()> {
    let (group, x, y) = in_turn::begin(options.model)?;
    let (plain, plain_mib) = step(&group, options.model, false, &x, &y)?;
    let (zero, zero_mib) = step(&group, options.model, true, &x, &y)?;
    let within = step_in_backward(&group, options.model, &x, &y)?;
    let mut steps = [plain, zero, within];
    let [plain_ms, zero_ms, within_ms] = in_turn::times(&group, options, &mut steps)?;
    if group.rank() == 0 {
        let model = options.model.name();
        let ratio = zero_ms / plain_ms;
        let within_ratio = within_ms / plain_ms;
        if options.json {
            let line = json!({
                "bench": "zero", "model": model, "ranks": group.world_size(),
                "adam_ms": plain_ms, "zero_ms": zero_ms, "ratio": ratio,
                "in_backward_ms": within_ms, "in_backward_ratio": within_ratio,
                "adam_mib": plain_mib, "zero_mib": zero_mib,
            });
            println!("{line}");
        } else {
            println!(
                "step, {model}: {plain_ms:.3} ms with Adam, {zero_ms:.3} ms with \
                 ZeroRedundancyOptimizer: {ratio:.3} times as long, {within_ms:.3} ms with that in \
                 backward: {within_ratio:.3} times; states of {plain_mib:.1} MiB and {zero_mib:.1} MiB"
            );
        }
    }
    Ok(())
}

/// Returns what runs a training step, and the MiB of the optimizer's state.
fn step(
    group: &ProcessGroup,
    model: Model,
    is_sharded: bool,
    x: &Tensor,
    y: &Tensor,
) -> Result<(Step, f64)> {
    let x = x.shallow_clone();
    let y = y.shallow_clone();
    let vs = VarStore::new(x.device());
    tch::manual_seed(0);
    let model = Ddp::new(model.build(&vs.root()), &vs, group)?;
    let loss = move || model.forward_t(&x, true).cross_entropy_for_logits(&y);
    loss().f_backward()?;
    let live = || group.arena().usage().0;
    let before;
    let step: Step = if is_sharded {
        let optimizer = ZeroRedundancyOptimizer::new(&vs, group, Adam::default(), LEARNING_RATE)?;
        before = live();
        optimizer.step()?;
        Box::new(move || Ok(optimizer.backward_step(&loss())?))
    } else {
        let mut optimizer = Adam::default().build(&vs, LEARNING_RATE)?;
        before = live();
        optimizer.step();
        Box::new(move || Ok(optimizer.try_backward_step(&loss())?))
    };
    Ok((step, (live() - before) as f64 / MIB))
}

/// Returns what runs a training step whose optimizer steps in backward.
fn step_in_backward(group: &ProcessGroup, model: Model, x: &Tensor, y: &Tensor) -> Result<Step> {
    let x = x.shallow_clone();
    let y = y.shallow_clone();
    let vs = VarStore::new(x.device());
    tch::manual_seed(0);
    let net = model.build(&vs.root());
    let optimizer = ZeroRedundancyOptimizer::new(&vs, group, Adam::default(), LEARNING_RATE)?;
    let model = Ddp::builder(group).hook_with_zero_step(&optimizer).wrap(net, &vs)?;
    Ok(Box::new(move || {
        let loss = model.forward_t(&x, true).cross_entropy_for_logits(&y);
        Ok(optimizer.backward_step(&loss)?)
    }))
}
