//! A training step with `Ddp` as it is, and one with the size of buckets that a trial has found.

use anyhow::{Result, ensure};
use flow_ddp::{Ddp, ProcessGroup};
use serde_json::json;
use tch::Tensor;
use tch::nn::{ModuleT, Optimizer, OptimizerConfig, SequentialT, Sgd, VarStore};

use crate::in_turn::{self, LEARNING_RATE, Step};
use crate::models::Model;

/// Steps of each size.
const TRIAL: u32 = 40;
/// More steps than a trial takes.
const AT_MOST: u32 = 1000;

struct Training {
    model: Ddp<SequentialT>,
    optimizer: Optimizer,
    x: Tensor,
    y: Tensor,
}

impl Training {
    fn new(model: Model, group: &ProcessGroup, tune: u32, x: &Tensor, y: &Tensor) -> Result<Self> {
        let vs = VarStore::new(x.device());
        tch::manual_seed(0);
        let model = Ddp::builder(group).tune(tune).wrap(model.build(&vs.root()), &vs)?;
        let optimizer = Sgd::default().build(&vs, LEARNING_RATE)?;
        Ok(Self { model, optimizer, x: x.shallow_clone(), y: y.shallow_clone() })
    }

    fn step(&mut self) -> Result<()> {
        self.optimizer.zero_grad();
        self.model.forward_t(&self.x, true).cross_entropy_for_logits(&self.y).f_backward()?;
        self.optimizer.step();
        Ok(())
    }
}

pub fn run(options: &in_turn::Options) -> Result<()> {
    let (group, x, y) = in_turn::begin(options.model)?;
    let mut plain = Training::new(options.model, &group, 0, &x, &y)?;
    let mut tuned = Training::new(options.model, &group, TRIAL, &x, &y)?;
    // The trial begins after the first step.
    tuned.step()?;
    for _ in 0..AT_MOST {
        if tuned.model.stats().is_tuning {
            tuned.step()?;
        }
    }
    let stats = tuned.model.stats();
    ensure!(!stats.is_tuning, "the trial has not ended after {AT_MOST} steps");
    let caps = stats.bucket_cap_mb;
    let mut steps: [Step; 2] = [Box::new(move || plain.step()), Box::new(move || tuned.step())];
    let [default, found] = in_turn::times(&group, options, &mut steps)?;
    if group.rank() == 0 {
        let ratio = found / default;
        let model = options.model.name();
        if options.json {
            let line = json!({
                "bench": "tune", "model": model, "ranks": group.world_size(), "bucket_cap_mb": caps,
                "default_ms": default, "tuned_ms": found, "ratio": ratio,
            });
            println!("{line}");
        } else {
            println!(
                "step, {model}: {default:.3} ms with buckets of 1 and 25 MiB, {found:.3} ms with \
                 {caps:?}: {ratio:.3} times as long"
            );
        }
    }
    Ok(())
}
