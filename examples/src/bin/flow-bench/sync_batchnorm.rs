//! A training step with `Ddp`, without and with `SyncBatchNorm`.
//!
//! Blocks of both take turns in the same processes, on models with the same weights.

use anyhow::Result;
use flow_ddp::{Ddp, ProcessGroup, TensorCollectives, convert_sync_batchnorm};
use serde_json::json;
use tch::Tensor;
use tch::nn::{ModuleT, OptimizerConfig, Sgd, VarStore};

use crate::in_turn::{self, LEARNING_RATE, Options, Step};
use crate::models::Model;

pub fn run(options: &Options) -> Result<()> {
    let (group, x, y) = in_turn::begin(options.model)?;
    let mut steps =
        [step(options.model, &group, false, &x, &y)?, step(options.model, &group, true, &x, &y)?];
    let [without, with] = in_turn::times(&group, options, &mut steps)?;
    if group.rank() == 0 {
        let ratio = with / without;
        let model = options.model.name();
        let ranks = group.world_size();
        if options.json {
            let line = json!({
                "bench": "sync_batchnorm", "model": model, "ranks": ranks,
                "without_ms": without, "with_ms": with, "ratio": ratio,
            });
            println!("{line}");
        } else {
            println!(
                "step, {model}: {without:.3} ms without SyncBatchNorm, {with:.3} ms with it: \
                 {ratio:.3} times as long"
            );
        }
    }
    Ok(())
}

/// Returns what runs a training step.
fn step(
    model: Model,
    group: &ProcessGroup,
    sync_batchnorm: bool,
    x: &Tensor,
    y: &Tensor,
) -> Result<Step> {
    let x = x.shallow_clone();
    let y = y.shallow_clone();
    let vs = VarStore::new(group.device());
    tch::manual_seed(0);
    let net = model.build(&vs.root());
    if sync_batchnorm {
        convert_sync_batchnorm(&vs, group)?;
    }
    let model = Ddp::new(net, &vs, group)?;
    let mut optimizer = Sgd::default().build(&vs, LEARNING_RATE)?;
    Ok(Box::new(move || {
        optimizer.zero_grad();
        model.forward_t(&x, true).cross_entropy_for_logits(&y).f_backward()?;
        optimizer.step();
        Ok(())
    }))
}
