//! A training step without and with `Ddp`.
//!
//! As in `scripts/peers/step.py`: blocks of local and distributed steps take turns in the same
//! processes. All ranks run the local model at the same time, so that it has the same share of the
//! memory's bandwidth. The wrapper is made anew for each block. So local steps are plain libtorch,
//! with its own allocator. Local steps on Flow's memory that end in a barrier are the bound for
//! synchronous training: ranks wait for the slowest, and pay nothing else.
//!
//! On GPUs a block is timed as a whole, from an idle device to an idle device, and a step ends with
//! backward. The optimizer is no part of what is compared: libtorch's takes another way than
//! Python's.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use flow_ddp::{Ddp, DeviceKind, ProcessGroup, Stats, TensorCollectives};
use serde_json::json;
use tch::nn::{ModuleT, Optimizer, OptimizerConfig, Sgd, VarStore};
use tch::{Kind, Tensor};

use crate::models::Model;
use crate::timeline;
use crate::timing::{block, mean, median, milliseconds, repetitions};

/// So small that all models stay alike: max_pool, for one, takes longer or shorter with the values
/// it meets.
const LEARNING_RATE: f64 = 1e-6;
const WARM_UP: usize = 5;

/// How much is measured.
struct Plan {
    blocks: usize,
    time_per_block: Duration,
    most_steps: usize,
}

const ON_CPU: Plan =
    Plan { blocks: 5, time_per_block: Duration::from_millis(500), most_steps: 500 };
/// A block is one figure only.
const ON_GPU: Plan =
    Plan { blocks: 10, time_per_block: Duration::from_millis(250), most_steps: 250 };

#[derive(Args)]
pub struct Options {
    #[arg(long, value_enum)]
    model: Model,
    /// cpu, or cuda: a GPU for each rank
    #[arg(long, default_value = "cpu")]
    device: DeviceKind,
    /// Inputs of each rank in a step [default: the model's]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    batch_size: Option<u32>,
    /// Steps in each block [default: as many as fit in half a second, a quarter on a GPU]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    steps: Option<u32>,
    /// Print a JSON line
    #[arg(long)]
    json: bool,
    /// Print what rank 0 knows of the last step's communication
    #[arg(long)]
    stats: bool,
    /// Write rank 0's last backward and its reductions, as a trace for browsers
    #[arg(long, value_name = "FILE")]
    timeline: Option<PathBuf>,
}

/// Times of steps, or their means over blocks.
#[derive(Default)]
struct Times {
    local: Vec<Duration>,
    /// Steps of the bound; none on GPUs.
    barrier: Vec<Duration>,
    ddp: Vec<Duration>,
}

pub fn run(options: &Options) -> Result<()> {
    let group = ProcessGroup::from_env()?;
    let device = group.use_device(options.device)?;
    tch::set_num_threads(1);
    let on_cpu = options.device == DeviceKind::Cpu;
    let plan = if on_cpu { ON_CPU } else { ON_GPU };
    tch::manual_seed(group.rank() as i64);
    let mut shape = options.model.input().to_vec();
    shape[0] = options.batch_size.map_or(shape[0], i64::from);
    let x = Tensor::randn(&shape, (Kind::Float, device));
    let y = Tensor::randint(10, [shape[0]], (Kind::Int64, device));

    let store = VarStore::new(device);
    tch::manual_seed(0);
    let model = options.model.build(&store.root());
    let mut optimizer = Sgd::default().build(&store, LEARNING_RATE)?;
    let mut local = || step(&model, &mut optimizer, on_cpu, &x, &y);

    let ddp_store = VarStore::new(device);
    tch::manual_seed(0);
    let mut wrapped = options.model.build(&ddp_store.root());
    let mut ddp_optimizer = Sgd::default().build(&ddp_store, LEARNING_RATE)?;
    let mut stats = Stats::default();

    let mut warm_up = if on_cpu {
        block(&group, device, WARM_UP, &mut local)?
    } else {
        // On GPUs a distributed step may take many times as long; PyTorch's side counts by it as
        // well.
        let ddp = Ddp::new(wrapped, &ddp_store, &group)?;
        let mut distributed = || step(&ddp, &mut ddp_optimizer, on_cpu, &x, &y);
        (0..WARM_UP).try_for_each(|_| distributed())?;
        let times = block(&group, device, WARM_UP, &mut distributed)?;
        wrapped = ddp.into_inner();
        times
    };
    let warm_up = repetitions(&mut warm_up, plan.time_per_block).min(plan.most_steps);
    let mut count = [options.steps.map_or(warm_up as i64, i64::from)];
    group.broadcast(&mut count, 0)?;
    let count = count[0] as usize;
    let mut times = Times::default();
    for _ in 0..plan.blocks {
        times.local.extend(block(&group, device, count, &mut local)?);
        let ddp = Ddp::new(wrapped, &ddp_store, &group)?;
        let mut distributed = || step(&ddp, &mut ddp_optimizer, on_cpu, &x, &y);
        (0..WARM_UP).try_for_each(|_| distributed())?;
        times.ddp.extend(block(&group, device, count, &mut distributed)?);
        if on_cpu {
            times.barrier.extend(block(&group, device, count, &mut || {
                local()?;
                Ok(group.barrier()?)
            })?);
        }
        stats = ddp.stats();
        wrapped = ddp.into_inner();
    }
    if group.rank() == 0 {
        let parameters: usize = store.trainable_variables().iter().map(Tensor::numel).sum();
        print(options, group.world_size(), parameters, &mut times);
        if options.stats {
            println!("{stats:#?}");
        }
        if let Some(file) = &options.timeline {
            timeline::write(file, &stats)?;
        }
    }
    Ok(())
}

fn step(
    model: &impl ModuleT,
    optimizer: &mut Optimizer,
    update: bool,
    x: &Tensor,
    y: &Tensor,
) -> Result<()> {
    optimizer.zero_grad();
    model.forward_t(x, true).cross_entropy_for_logits(y).f_backward()?;
    if update {
        optimizer.step();
    }
    Ok(())
}

fn print(options: &Options, ranks: usize, parameters: usize, times: &mut Times) {
    let model = options.model.name();
    let local_mean = milliseconds(mean(&times.local));
    let ddp_mean = milliseconds(mean(&times.ddp));
    let local = milliseconds(median(&mut times.local));
    let ddp = milliseconds(median(&mut times.ddp));
    let barrier = (!times.barrier.is_empty()).then(|| milliseconds(median(&mut times.barrier)));
    let efficiency = local / ddp;
    if options.json {
        let mut line = json!({
            "bench": "step", "model": model, "ranks": ranks, "parameters": parameters,
            "local_ms": local, "ddp_ms": ddp,
            "efficiency": efficiency, "local_mean_ms": local_mean, "ddp_mean_ms": ddp_mean,
        });
        if let Some(barrier) = barrier {
            line["barrier_ms"] = barrier.into();
        }
        println!("{line}");
    } else {
        let bound = barrier.map(|barrier| {
            format!("; {barrier:.3} ms with a barrier, {:.3} of which is left", barrier / ddp)
        });
        println!(
            "step, {model}: {local:.3} ms alone, {ddp:.3} ms with Ddp: efficiency {efficiency:.3}\
             {}",
            bound.unwrap_or_default()
        );
    }
}
