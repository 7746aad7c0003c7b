//! The memory that all ranks together take for a training with `Fsdp`; or one rank, with tch's optimizer.
//!
//! It is what they have after some steps, less what they had before the model was made. A process keeps memory
//! of what it did before, so one run measures one training.

use std::fs;

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use flow_ddp::{Fsdp, ProcessGroup, ReduceOp, TryBackwardStep};
use serde_json::json;
use tch::nn::{Adam, ModuleT, OptimizerConfig, Sgd, VarStore};

use crate::in_turn::{self, LEARNING_RATE, Step};
use crate::models::{Model, WIDE_LAYERS, plain_wide};

const STEPS: usize = 5;
const MIB: f64 = (1 << 20) as f64;

#[derive(Args)]
pub struct Options {
    /// Layers of 2048 of the wide model, 16 MiB each
    #[arg(long, default_value_t = WIDE_LAYERS, value_parser = clap::value_parser!(u32).range(1..))]
    layers: u32,
    #[arg(long, value_enum, default_value = "adam")]
    optimizer: Optimizer,
    /// Print a JSON line
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Optimizer {
    Adam,
    Sgd,
}

pub fn run(options: &Options) -> Result<()> {
    match options.optimizer {
        Optimizer::Adam => measure(options, "adam", Adam::default()),
        Optimizer::Sgd => measure(options, "sgd", Sgd::default()),
    }
}

fn measure(
    options: &Options,
    name: &str,
    config: impl OptimizerConfig + Clone + Send + 'static,
) -> Result<()> {
    let (group, x, y) = in_turn::begin(Model::Wide)?;
    let before = memory(&group)?;
    let vs = VarStore::new(x.device());
    let net = plain_wide(&vs.root(), options.layers);
    let ranks = group.world_size();
    let mut step: Step = if ranks == 1 {
        let mut optimizer = config.clone().build(&vs, LEARNING_RATE)?;
        Box::new(move || {
            let loss = net.forward_t(&x, true).cross_entropy_for_logits(&y);
            Ok(optimizer.try_backward_step(&loss)?)
        })
    } else {
        let model = Fsdp::new(net, &vs, &group)?;
        let optimizer = model.optimizer(config.clone(), LEARNING_RATE)?;
        Box::new(move || {
            let loss = model.forward_t(&x, true).cross_entropy_for_logits(&y);
            Ok(optimizer.backward_step(&loss)?)
        })
    };
    for _ in 0..STEPS {
        step()?;
    }
    let mib = (memory(&group)? - before) as f64 / MIB;
    let plan = Fsdp::plan(&vs, config.clone(), ranks)?.total() as f64 / MIB;
    let alone = Fsdp::plan(&vs, config, 1)?.total() as f64 / MIB;
    if group.rank() == 0 {
        if options.json {
            let line = json!({
                "bench": "sharded_memory", "layers": options.layers, "ranks": ranks, "optimizer": name,
                "mib": mib, "plan_mib": plan, "alone_mib": alone,
            });
            println!("{line}");
        } else {
            println!(
                "{name}, {ranks} rank(s): {mib:.1} MiB, and {plan:.1} MiB planned; each rank would need \
                 {alone:.1} MiB for a model, gradients and state of its own"
            );
        }
    }
    Ok(())
}

/// The bytes that all ranks have: what several have in common is divided among them.
fn memory(group: &ProcessGroup) -> Result<i64> {
    group.barrier()?;
    let rollup = fs::read_to_string("/proc/self/smaps_rollup")?;
    let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:"));
    let kib = line.and_then(|rest| rest.split_whitespace().next());
    let mut bytes = [kib.context("no Pss in smaps_rollup")?.parse::<i64>()? << 10];
    group.all_reduce(&mut bytes, ReduceOp::Sum)?;
    Ok(bytes[0])
}
