//! A training step with `Ddp`, without and with `SyncBatchNorm`.
//!
//! Blocks of both take turns in the same processes, on models with the same weights.

use anyhow::Result;
use flow_ddp::{Ddp, ProcessGroup, TensorCollectives, convert_sync_batchnorm};
use serde_json::json;
use tch::nn::{ModuleT, OptimizerConfig, Sgd, VarStore};
use tch::{Kind, Tensor};

use crate::in_turn::{LEARNING_RATE, Options};
use crate::models::Model;
use crate::timing::{block, median, milliseconds};

pub fn run(options: &Options) -> Result<()> {
    let group = ProcessGroup::from_env()?;
    let device = group.device();
    tch::set_num_threads(1);
    tch::manual_seed(group.rank() as i64);
    let shape = options.model.input();
    let x = Tensor::randn(shape, (Kind::Float, device));
    let y = Tensor::randint(10, [shape[0]], (Kind::Int64, device));
    let mut steps =
        [step(options.model, &group, false, &x, &y)?, step(options.model, &group, true, &x, &y)?];
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..options.blocks {
        for (step, times) in steps.iter_mut().zip(&mut times) {
            times.extend(block(&group, device, options.steps as usize, step)?);
        }
    }
    if group.rank() == 0 {
        let [without, with] = times.each_mut().map(|times| milliseconds(median(times)));
        let ratio = with / without;
        let (model, ranks) = (options.model.name(), group.world_size());
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
) -> Result<Box<dyn FnMut() -> Result<()>>> {
    let (x, y) = (x.shallow_clone(), y.shallow_clone());
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
