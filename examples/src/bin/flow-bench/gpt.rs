//! A tensor-parallel GPT block (Megatron's layout, a thread for each rank) beside the same block in
//! one process with as many threads as there are ranks: blocks of steps take turns.
//!
//! A step is zero_grad, forward, backward and Adam. The one process is rank 0, in which large
//! tensors lie in Flow's memory in both cases; the other ranks sleep meanwhile.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{ensure, Result};
use clap::Args;
use flow::global::{self, nn as split, GlobalTensor, Placement, B};
use flow_ddp::{DeviceKind, ProcessGroup, TensorCollectives};
use serde_json::json;
use tch::nn::{self, Adam, ModuleT, Optimizer, OptimizerConfig, VarStore};
use tch::{Device, Kind, Tensor};

use crate::models::gpt_block;
use crate::timing::{median, repetitions, time};

const LEARNING_RATE: f64 = 1e-4;
const BLOCKS: usize = 9;
const TIME_PER_BLOCK: Duration = Duration::from_millis(500);
const MOST_STEPS: usize = 500;
const WARM_UP: usize = 5;
/// How far the losses may be apart, as a part of one.
const TOLERANCE: f64 = 1e-4;

#[derive(Args)]
pub struct Options {
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(i64).range(1..))]
    width: i64,
    /// Divides the width; a multiple of the number of ranks
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(i64).range(1..))]
    heads: i64,
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(i64).range(1..))]
    tokens: i64,
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(i64).range(1..))]
    batch_size: i64,
    /// Print a JSON line
    #[arg(long)]
    json: bool,
}

/// A block that is trained.
struct Training {
    block: nn::SequentialT,
    store: VarStore,
    optimizer: Optimizer,
    x: Tensor,
    y: Tensor,
}

impl Training {
    fn step(&mut self) -> Result<()> {
        self.optimizer.zero_grad();
        self.loss().f_backward()?;
        self.optimizer.step();
        Ok(())
    }

    fn loss(&self) -> Tensor {
        self.block.forward_t(&self.x, true).mse_loss(&self.y, tch::Reduction::Mean)
    }
}

pub fn run(options: &Options) -> Result<()> {
    let group = ProcessGroup::from_env()?;
    group.use_device(DeviceKind::Cpu)?;
    tch::set_num_threads(1);
    let &Options { width, heads, tokens, batch_size, .. } = options;
    let ranks = group.world_size() as i64;
    ensure!(width % heads == 0, "--width {width} is no multiple of --heads {heads}");
    ensure!(heads % ranks == 0, "--heads {heads} is no multiple of the number of ranks, {ranks}");
    let placement = Placement::all(&group)?;
    tch::manual_seed(0);
    let [x, y] =
        [0, 1].map(|_| Tensor::randn([batch_size, tokens, width], (Kind::Float, Device::Cpu)));
    let mut alone = plain(options, &x, &y)?;
    let mut parallel = tensor_parallel(options, &placement, &alone)?;
    compare(&alone, &parallel)?;
    // Gradients and the optimizer too.
    alone.step()?;
    parallel.step()?;
    compare(&alone, &parallel)?;

    // The other ranks wait meanwhile.
    let mut one_process = |count: usize| -> Result<Vec<Duration>> {
        group.barrier()?;
        let mut times = Vec::new();
        if group.rank() == 0 {
            tch::set_num_threads(ranks as i32);
            alone.step()?;
            times = time(count, || alone.step())?;
            tch::set_num_threads(1);
        }
        group.barrier()?;
        Ok(times)
    };
    let mut all_ranks = |count: usize| -> Result<Vec<Duration>> {
        parallel.step()?;
        group.barrier()?;
        time(count, || parallel.step())
    };
    let steps = |mut warm_up: Vec<Duration>| -> Result<usize> {
        let of_rank_0 = match group.rank() {
            0 => repetitions(&mut warm_up, TIME_PER_BLOCK).min(MOST_STEPS),
            _ => 0,
        };
        let mut count = [of_rank_0 as i64];
        group.broadcast(&mut count, 0)?;
        Ok(count[0] as usize)
    };
    all_ranks(WARM_UP)?;
    let counts = [steps(all_ranks(WARM_UP)?)?, steps(one_process(WARM_UP)?)?];
    let (mut parallel, mut alone) = (Vec::new(), Vec::new());
    for _ in 0..BLOCKS {
        parallel.extend(all_ranks(counts[0])?);
        alone.extend(one_process(counts[1])?);
    }
    if group.rank() == 0 {
        print(options, ranks, [&mut parallel, &mut alone]);
    }
    Ok(())
}

fn plain(options: &Options, x: &Tensor, y: &Tensor) -> Result<Training> {
    let store = VarStore::new(Device::Cpu);
    let root = store.root();
    let dense = |name: &str, inputs, outputs| -> Result<nn::Linear> {
        Ok(nn::linear(&root / name, inputs, outputs, Default::default()))
    };
    let block = gpt_block(&root, (options.width, options.heads), dense, dense)?;
    let optimizer = Adam::default().build(&store, LEARNING_RATE)?;
    Ok(Training { block, store, optimizer, x: x.shallow_clone(), y: y.shallow_clone() })
}

/// The block over all ranks, with the weights and the inputs of the plain one.
fn tensor_parallel(options: &Options, placement: &Placement, plain: &Training) -> Result<Training> {
    let store = VarStore::new(Device::Cpu);
    let root = store.root();
    let config = nn::LinearConfig::default;
    let column = |name: &str, inputs, outputs| -> Result<split::ColumnLinear> {
        Ok(split::column_linear(&root / name, inputs, outputs, placement, 0, config())?)
    };
    let row = |name: &str, inputs, outputs| -> Result<split::RowLinear> {
        Ok(split::row_linear(&root / name, inputs, outputs, placement, 0, config())?)
    };
    let block = gpt_block(&root, (options.width, options.heads), column, row)?;
    // The norms are still plain.
    global::distribute(&store, placement, |_, tensor| match tensor.sbp() {
        Ok(sbp) => sbp.to_vec(),
        Err(_) => vec![B],
    })?;
    let values = plain.store.variables();
    // All ranks in the same order.
    for (name, mut variable) in BTreeMap::from_iter(store.variables()) {
        tch::no_grad(|| variable.f_copy_(&values[&name]))?;
    }
    let optimizer = Adam::default().build(&store, LEARNING_RATE)?;
    let [x, y] =
        [&plain.x, &plain.y].map(|tensor| global::distribute_tensor(tensor, placement, [B]));
    Ok(Training { block, store, optimizer, x: x?, y: y? })
}

/// Both compute the same.
fn compare(alone: &Training, parallel: &Training) -> Result<()> {
    let of = |training: &Training| tch::no_grad(|| training.loss().f_double_value(&[]));
    let (alone, parallel) = (of(alone)?, of(parallel)?);
    ensure!(
        (alone - parallel).abs() <= TOLERANCE * alone.abs(),
        "the loss is {alone} in one process, and {parallel} on all ranks"
    );
    Ok(())
}

fn print(options: &Options, ranks: i64, times: [&mut Vec<Duration>; 2]) {
    let [parallel, alone] = times.map(|times| median(times).as_secs_f64() * 1e3);
    let ratio = parallel / alone;
    let &Options { width, heads, tokens, batch_size, json } = options;
    if json {
        let line = json!({
            "bench": "gpt", "width": width, "heads": heads, "tokens": tokens,
            "batch_size": batch_size, "ranks": ranks, "parallel_ms": parallel, "alone_ms": alone,
            "ratio": ratio,
        });
        println!("{line}");
    } else {
        println!(
            "GPT block, width {width}, {tokens} tokens, batch {batch_size}: {parallel:.3} ms on \
             {ranks} ranks, {alone:.3} ms in one process with {ranks} threads: {ratio:.3} times \
             as long"
        );
    }
}
