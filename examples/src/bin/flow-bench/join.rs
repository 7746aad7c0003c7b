//! A training step with `Ddp`, without and in a join.
//!
//! Blocks of both take turns, on one model. In a third kind of block the last rank has ended, and
//! takes part in what the others do.

use anyhow::{Result, ensure};
use flow_ddp::{Ddp, TensorCollectives};
use serde_json::json;
use tch::nn::{ModuleT, OptimizerConfig, Sgd, VarStore};

use crate::in_turn::{self, LEARNING_RATE, Options};
use crate::timing::{block, median, milliseconds, steps};

pub fn run(options: &Options) -> Result<()> {
    let (group, x, y) = in_turn::begin(options.model)?;
    let ranks = group.world_size();
    ensure!(ranks > 1, "start two ranks or more: one has nobody to wait for");
    let device = group.device();
    let vs = VarStore::new(device);
    let model = Ddp::new(options.model.build(&vs.root()), &vs, &group)?;
    let mut optimizer = Sgd::default().build(&vs, LEARNING_RATE)?;
    let mut step = || -> Result<()> {
        optimizer.zero_grad();
        model.forward_t(&x, true).cross_entropy_for_logits(&y).f_backward()?;
        optimizer.step();
        Ok(())
    };
    let count = options.steps as usize;
    let has_ended = group.rank() == ranks - 1;
    let mut times = [Vec::new(), Vec::new(), Vec::new()];
    for _ in 0..options.blocks {
        times[0].extend(block(&group, device, count, &mut step)?);
        times[1].extend(model.join(|| block(&group, device, count, &mut step))?);
        if has_ended {
            model.join(|| anyhow::Ok(()))?;
        } else {
            times[2].extend(model.join(|| steps(device, count, &mut step))?);
        }
    }
    if group.rank() == 0 {
        let [without, with, shadowed] = times.each_mut().map(|times| milliseconds(median(times)));
        let ratio = with / without;
        let model = options.model.name();
        if options.json {
            let line = json!({
                "bench": "join", "model": model, "ranks": ranks,
                "without_ms": without, "with_ms": with, "ratio": ratio, "shadowed_ms": shadowed,
            });
            println!("{line}");
        } else {
            println!(
                "step, {model}: {without:.3} ms without a join, {with:.3} ms in one: {ratio:.3} \
                 times as long; {shadowed:.3} ms while the last rank has ended"
            );
        }
    }
    Ok(())
}
