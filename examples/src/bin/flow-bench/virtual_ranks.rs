//! A training step with a plain `Ddp`, and with as many virtual ranks as ranks.
//!
//! Blocks of both take turns in the same processes, on models with the same weights.

use anyhow::Result;
use flow_ddp::{Ddp, Error, ProcessGroup};
use serde_json::json;
use tch::Tensor;
use tch::nn::{Adam, OptimizerConfig, VarStore};

use crate::in_turn::{self, LEARNING_RATE, Options, Step};

pub fn run(options: &Options) -> Result<()> {
    let (group, x, y) = in_turn::begin(options.model)?;
    let mut steps = [step(options, &group, false, &x, &y)?, step(options, &group, true, &x, &y)?];
    let [plain, virtual_ranks] = in_turn::times(&group, options, &mut steps)?;
    if group.rank() == 0 {
        let model = options.model.name();
        let ranks = group.world_size();
        let ratio = virtual_ranks / plain;
        if options.json {
            let line = json!({
                "bench": "virtual_ranks", "model": model, "ranks": ranks,
                "plain_ms": plain, "virtual_ranks_ms": virtual_ranks, "ratio": ratio,
            });
            println!("{line}");
        } else {
            println!(
                "step, {model}: {plain:.3} ms with Ddp, {virtual_ranks:.3} ms with {ranks} virtual ranks: \
                 {ratio:.3} times as long"
            );
        }
    }
    Ok(())
}

/// Returns what runs a training step.
fn step(
    options: &Options,
    group: &ProcessGroup,
    is_virtual: bool,
    x: &Tensor,
    y: &Tensor,
) -> Result<Step> {
    let x = x.shallow_clone();
    let y = y.shallow_clone();
    let vs = VarStore::new(x.device());
    tch::manual_seed(0);
    let net = options.model.build(&vs.root());
    let builder = Ddp::builder(group);
    let builder = if is_virtual { builder.virtual_ranks(group.world_size()) } else { builder };
    let model = builder.wrap(net, &vs)?;
    let mut optimizer = Adam::default().build(&vs, LEARNING_RATE)?;
    let part = group.rank();
    let mut number = 0;
    Ok(Box::new(move || {
        optimizer.zero_grad();
        let backward = || -> Result<(), Error> {
            let loss = model.try_forward_t(&x, true)?.cross_entropy_for_logits(&y);
            loss.f_backward().map_err(Error::from_backward)
        };
        if is_virtual {
            model.in_virtual_rank(part, number, backward)?;
        } else {
            backward()?;
        }
        number += 1;
        optimizer.step();
        Ok(())
    }))
}
