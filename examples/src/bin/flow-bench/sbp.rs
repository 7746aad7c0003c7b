//! Data parallel training by SBP beside `Ddp`: blocks of steps take turns in the same processes.

use std::time::Duration;

use anyhow::Result;
use clap::Args;
use flow::global::{self, B, GlobalTensor, Placement, S};
use flow_ddp::{Ddp, DeviceKind, ProcessGroup, TensorCollectives};
use tch::nn::{ModuleT, Optimizer, OptimizerConfig, Sgd, VarStore};
use tch::{Kind, Tensor};

use crate::models::Model;
use crate::timing::{median, repetitions, time};

const LEARNING_RATE: f64 = 1e-6;
const BLOCKS: usize = 9;
const WARM_UP: usize = 5;

#[derive(Args)]
pub struct Options {
    /// mobilenet and resnet50 have batch norms, which by SBP take the statistics of all ranks
    #[arg(long, value_enum)]
    model: Model,
    /// Steps in each block [default: as many as fit in half a second]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    steps: Option<u32>,
    /// Print a JSON line
    #[arg(long)]
    json: bool,
}

pub fn run(options: &Options) -> Result<()> {
    let group = ProcessGroup::from_env()?;
    let device = group.use_device(DeviceKind::Cpu)?;
    tch::set_num_threads(1);
    tch::manual_seed(group.rank() as i64);
    let x = Tensor::randn(options.model.input(), (Kind::Float, device));
    let y = Tensor::randint(10, [options.model.input()[0]], (Kind::Int64, device));

    let store = VarStore::new(device);
    tch::manual_seed(0);
    let mut model = options.model.build(&store.root());
    let mut optimizer = Sgd::default().build(&store, LEARNING_RATE)?;

    let placement = Placement::all(&group)?;
    let global_store = VarStore::new(device);
    tch::manual_seed(0);
    let global_model = options.model.build(&global_store.root());
    global::distribute(&global_store, &placement, |_, _| vec![B])?;
    let mut global_optimizer = Sgd::default().build(&global_store, LEARNING_RATE)?;
    let global_x = x.to_global(&placement, [S(0)])?;
    let global_y = y.to_global(&placement, [S(0)])?;

    let mut by_sbp = || step(&global_model, &mut global_optimizer, &global_x, &global_y);
    (0..WARM_UP).try_for_each(|_| by_sbp())?;
    let mut warm_up = time(WARM_UP, &mut by_sbp)?;
    let fitting = repetitions(&mut warm_up, Duration::from_millis(500)).min(500) as i64;
    let mut count = [options.steps.map_or(fitting, i64::from)];
    group.broadcast(&mut count, 0)?;
    let count = count[0] as usize;
    let mut sbp = Vec::new();
    let mut ddp = Vec::new();
    for _ in 0..BLOCKS {
        group.barrier()?;
        by_sbp()?;
        sbp.extend(time(count, &mut by_sbp)?);
        let wrapped = Ddp::new(model, &store, &group)?;
        let mut by_ddp = || step(&wrapped, &mut optimizer, &x, &y);
        (0..WARM_UP).try_for_each(|_| by_ddp())?;
        group.barrier()?;
        ddp.extend(time(count, &mut by_ddp)?);
        model = wrapped.into_inner();
    }
    if group.rank() == 0 {
        let [sbp, ddp] = [&mut sbp, &mut ddp].map(|times| median(times).as_secs_f64() * 1e3);
        let name = options.model.name();
        let ranks = group.world_size();
        let ratio = sbp / ddp;
        if options.json {
            let line = serde_json::json!({
                "bench": "sbp", "model": name, "ranks": ranks, "sbp_ms": sbp, "ddp_ms": ddp,
                "ratio": ratio,
            });
            println!("{line}");
        } else {
            println!(
                "step, {name}: {sbp:.3} ms by SBP, {ddp:.3} ms with Ddp: {ratio:.3} times as long"
            );
        }
    }
    Ok(())
}

fn step(model: &impl ModuleT, optimizer: &mut Optimizer, x: &Tensor, y: &Tensor) -> Result<()> {
    optimizer.zero_grad();
    model.forward_t(x, true).cross_entropy_for_logits(y).f_backward()?;
    optimizer.step();
    Ok(())
}
