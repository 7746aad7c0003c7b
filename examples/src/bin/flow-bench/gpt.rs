//! A tensor-parallel GPT block (Megatron's layout, a thread for each rank) beside the same block in
//! one process with as many threads as there are ranks. Blocks of steps take turns.
//!
//! A step is zero_grad, forward, backward and Adam. The one process is rank 0, in which large
//! tensors lie in Flow's memory in both cases; the other ranks sleep meanwhile.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Result, ensure};
use clap::Args;
use flow::global::{self, B, GlobalTensor, Placement, nn as split};
use flow_ddp::{DeviceKind, ProcessGroup, TensorCollectives};
use flow_examples::gpt_block::{gpt_block, plain_gpt_block};
use serde_json::json;
use tch::nn::{self, Adam, ModuleT, Optimizer, OptimizerConfig, VarStore};
use tch::{Device, Kind, Tensor};

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
    /// Steps in each block [default: as many as fit in half a second]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    steps: Option<u32>,
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

    /// Times steps of all ranks together.
    fn on_all_ranks(&mut self, group: &ProcessGroup, count: usize) -> Result<Vec<Duration>> {
        self.step()?;
        group.barrier()?;
        time(count, || self.step())
    }

    /// Times steps of rank 0 with as many threads as there are ranks. The other ranks wait meanwhile.
    fn in_one_process(&mut self, group: &ProcessGroup, count: usize) -> Result<Vec<Duration>> {
        group.barrier()?;
        let mut times = Vec::new();
        if group.rank() == 0 {
            tch::set_num_threads(group.world_size() as i32);
            self.step()?;
            times = time(count, || self.step())?;
            tch::set_num_threads(1);
        }
        group.barrier()?;
        Ok(times)
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

    parallel.on_all_ranks(&group, WARM_UP)?;
    let parallel_warm_up = parallel.on_all_ranks(&group, WARM_UP)?;
    let parallel_steps = steps(options, &group, parallel_warm_up)?;
    let alone_warm_up = alone.in_one_process(&group, WARM_UP)?;
    let alone_steps = steps(options, &group, alone_warm_up)?;
    let mut parallel_times = Vec::new();
    let mut alone_times = Vec::new();
    for _ in 0..BLOCKS {
        parallel_times.extend(parallel.on_all_ranks(&group, parallel_steps)?);
        alone_times.extend(alone.in_one_process(&group, alone_steps)?);
    }
    if group.rank() == 0 {
        print(options, ranks, [&mut parallel_times, &mut alone_times]);
    }
    Ok(())
}

/// Returns the steps of a block of measurements, by rank 0's times.
fn steps(options: &Options, group: &ProcessGroup, mut warm_up: Vec<Duration>) -> Result<usize> {
    if let Some(steps) = options.steps {
        return Ok(steps as usize);
    }
    let mut count = [0_i64];
    if group.rank() == 0 {
        count[0] = repetitions(&mut warm_up, TIME_PER_BLOCK).min(MOST_STEPS) as i64;
    }
    group.broadcast(&mut count, 0)?;
    Ok(count[0] as usize)
}

fn plain(options: &Options, x: &Tensor, y: &Tensor) -> Result<Training> {
    let store = VarStore::new(Device::Cpu);
    let root = store.root();
    let Ok(block) = plain_gpt_block(&root, options.width, options.heads);
    let optimizer = Adam::default().build(&store, LEARNING_RATE)?;
    Ok(Training { block, store, optimizer, x: x.shallow_clone(), y: y.shallow_clone() })
}

/// Returns the block over all ranks, with the weights and the inputs of the plain one.
fn tensor_parallel(options: &Options, placement: &Placement, plain: &Training) -> Result<Training> {
    let store = VarStore::new(Device::Cpu);
    let root = store.root();
    let config = nn::LinearConfig::default();
    let block = gpt_block(
        &root,
        (options.width, options.heads),
        |name, inputs, outputs| {
            split::column_linear(&root / name, inputs, outputs, placement, 0, config)
        },
        |name, inputs, outputs| {
            split::row_linear(&root / name, inputs, outputs, placement, 0, config)
        },
    )?;
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

/// Checks that both have the same loss.
fn compare(alone: &Training, parallel: &Training) -> Result<()> {
    let _no_grad = tch::no_grad_guard();
    let alone = alone.loss().f_double_value(&[])?;
    let parallel = parallel.loss().f_double_value(&[])?;
    ensure!(
        (alone - parallel).abs() <= TOLERANCE * alone.abs(),
        "the loss is {alone} in one process, and {parallel} on all ranks"
    );
    Ok(())
}

fn print(options: &Options, ranks: i64, times: [&mut Vec<Duration>; 2]) {
    let [parallel, alone] = times.map(|times| median(times).as_secs_f64() * 1e3);
    let ratio = parallel / alone;
    let &Options { width, heads, tokens, batch_size, json, .. } = options;
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
