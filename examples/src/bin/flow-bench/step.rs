//! A training step without and with `Ddp`.
//!
//! As in `scripts/peers/step.py`: blocks of local and distributed steps take turns in the same processes. All ranks run
//! the local model at the same time, so that it has the same share of the memory's bandwidth; the wrapper is made anew
//! for each block, so that local steps are plain libtorch, with its own allocator. Local steps on Flow's memory that end in
//! a barrier are the bound for synchronous training: ranks wait for the slowest, and pay nothing else.

use std::time::Duration;

use anyhow::Result;
use clap::Args;
use flow_ddp::{Ddp, ProcessGroup, Stats};
use serde_json::json;
use tch::nn::{ModuleT, Optimizer, OptimizerConfig, Sgd, VarStore};
use tch::{Device, Kind, Tensor};

use crate::models::Model;
use crate::{median, repetitions, time};

/// So small that all models stay alike: max_pool, for one, takes longer or shorter with the values it meets.
const LEARNING_RATE: f64 = 1e-6;
const BLOCKS: usize = 5;
const TIME_PER_BLOCK: Duration = Duration::from_millis(500);
const WARM_UP: usize = 5;

#[derive(Args)]
pub struct Options {
    #[arg(long, value_enum)]
    model: Model,
    /// Steps in each of the five blocks [default: as many as fit in half a second]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    steps: Option<u32>,
    /// Print a JSON line
    #[arg(long)]
    json: bool,
    /// Print what rank 0 knows of the last step's communication
    #[arg(long)]
    stats: bool,
}

pub fn run(options: &Options) -> Result<()> {
    tch::set_num_threads(1);
    let group = ProcessGroup::from_env()?;
    tch::manual_seed(group.rank() as i64);
    let x = Tensor::randn(options.model.input(), (Kind::Float, Device::Cpu));
    let y = Tensor::randint(10, [x.size()[0]], (Kind::Int64, Device::Cpu));

    let store = VarStore::new(Device::Cpu);
    tch::manual_seed(0);
    let model = options.model.build(&store.root());
    let mut optimizer = Sgd::default().build(&store, LEARNING_RATE)?;
    let mut local = || step(&model, &mut optimizer, &x, &y);

    let ddp_store = VarStore::new(Device::Cpu);
    tch::manual_seed(0);
    let mut wrapped = options.model.build(&ddp_store.root());
    let mut ddp_optimizer = Sgd::default().build(&ddp_store, LEARNING_RATE)?;
    let mut stats = Stats::default();

    let warm_up = repetitions(&mut time(WARM_UP, &mut local)?, TIME_PER_BLOCK).min(500);
    let mut count = [options.steps.map_or(warm_up as i64, i64::from)];
    group.broadcast(&mut count, 0)?;
    let [mut local_times, mut barrier_times, mut ddp_times] = [const { Vec::new() }; 3];
    for _ in 0..BLOCKS {
        let count = count[0] as usize;
        block(&group, count, &mut local, &mut local_times)?;
        let ddp = Ddp::new(wrapped, &ddp_store, &group)?;
        let mut distributed = || step(&ddp, &mut ddp_optimizer, &x, &y);
        (0..WARM_UP).try_for_each(|_| distributed())?;
        block(&group, count, distributed, &mut ddp_times)?;
        let in_step = || local().and_then(|()| Ok(group.barrier()?));
        block(&group, count, in_step, &mut barrier_times)?;
        stats = ddp.stats();
        wrapped = ddp.into_inner();
    }
    if group.rank() == 0 {
        print(
            options,
            group.world_size(),
            [&mut local_times, &mut barrier_times, &mut ddp_times].map(|times| median(times)),
        );
        if options.stats {
            println!("{stats:#?}");
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

/// Runs and times `count` steps, after one that is not counted, on all ranks at once.
fn block(
    group: &ProcessGroup,
    count: usize,
    mut step: impl FnMut() -> Result<()>,
    times: &mut Vec<Duration>,
) -> Result<()> {
    group.barrier()?;
    step()?;
    times.extend(time(count, step)?);
    Ok(())
}

fn print(options: &Options, ranks: usize, times: [Duration; 3]) {
    let model = options.model.name();
    let [local, barrier, ddp] = times.map(|time| time.as_secs_f64() * 1e3);
    let (efficiency, of_bound) = (local / ddp, barrier / ddp);
    if options.json {
        let line = json!({
            "bench": "step", "model": model, "ranks": ranks, "local_ms": local, "barrier_ms": barrier, "ddp_ms": ddp,
            "efficiency": efficiency,
        });
        println!("{line}");
    } else {
        println!(
            "step, {model}: {local:.3} ms alone, {barrier:.3} ms with a barrier, {ddp:.3} ms with Ddp: efficiency \
             {efficiency:.3}, {of_bound:.3} of what a barrier leaves"
        );
    }
}
