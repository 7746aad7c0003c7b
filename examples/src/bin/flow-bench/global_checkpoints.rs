//! Saving a model of global tensors and its Adam: at once, and beside the training until that may go on, to a folder or
//! in flow-launch's memory, beside a copy of as many bytes in memory. All take turns.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use flow::global::checkpoint::ShardedCheckpoints;
use flow::global::{B, Placement, S, distribute};
use flow_ddp::ProcessGroup;
use serde_json::json;
use tch::nn::{self, OptimizerConfig, VarStore};
use tch::{Device, Kind, Tensor};

use crate::checkpoints::timed;
use crate::timing::{median, milliseconds};

#[derive(Args)]
pub struct Options {
    /// A folder on the disk to measure
    #[arg(long, default_value = ".")]
    folder: PathBuf,
    /// The size of the model and the optimizer's state, in MB: half of it is split, half is on all ranks
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u32).range(1..))]
    megabytes: u32,
    /// How often each is measured
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Print a JSON line
    #[arg(long)]
    json: bool,
}

/// Elements of a row of a weight.
const WIDTH: i64 = 2048;
/// Between two saves.
const PAUSE: Duration = Duration::from_millis(500);

pub fn run(options: &Options) -> Result<()> {
    let group = ProcessGroup::from_env()?;
    tch::set_num_threads(1);
    let folder = options.folder.join("flow-bench-global-checkpoints");
    let measured = measure(options, &group, &folder);
    if group.rank() == 0 {
        let _ = std::fs::remove_dir_all(&folder); // an error of `measure` says more
    }
    let [save, async_save, in_memory, copy] = measured?;
    if group.rank() > 0 {
        return Ok(());
    }
    let megabytes = options.megabytes;
    let [ratio, in_memory_ratio] = [async_save / copy, in_memory / copy];
    if options.json {
        let line = json!({
            "bench": "global-checkpoints", "megabytes": megabytes, "ranks": group.world_size(),
            "save_ms": save, "async_save_ms": async_save, "in_memory_ms": in_memory, "copy_ms": copy,
            "ratio": ratio, "in_memory_ratio": in_memory_ratio,
        });
        println!("{line}");
    } else {
        println!(
            "{megabytes} MB: {save:.1} ms to save, {async_save:.1} ms to begin to save beside the training, \
             {ratio:.2} times a copy; in memory {in_memory:.1} ms, {in_memory_ratio:.2} times"
        );
    }
    Ok(())
}

/// Returns the milliseconds of each: medians.
fn measure(options: &Options, group: &ProcessGroup, folder: &Path) -> Result<[f64; 4]> {
    let vs = VarStore::new(Device::Cpu);
    // A third is the model, and two thirds are the state of Adam.
    let elements = i64::from(options.megabytes) * 1_000_000 / 3 / 4;
    let rows = (elements / WIDTH / 8).max(1);
    for number in 0..8 {
        let weight = Tensor::rand([rows, WIDTH], (Kind::Float, vs.device()));
        let _ = vs.root().add(&format!("weight{number}"), weight, true);
    }
    let placement = Placement::all(group)?;
    let is_split = |name: &str| name < "weight4";
    distribute(&vs, &placement, |name, _| [if is_split(name) { S(0) } else { B }])?;
    let mut optimizer = nn::Adam::default().build(&vs, 1e-3)?;
    let sums = vs.trainable_variables().into_iter().map(|weight| weight.sum(Kind::Float));
    optimizer.backward_step(&sums.sum::<Tensor>());
    let mut checkpoints = ShardedCheckpoints::open(folder, group)?.keep(1);
    let bytes = 12 * 8 * rows as usize * WIDTH as usize / group.world_size();
    let state = vec![1_u8; bytes];
    let mut memory = vec![0_u8; bytes];
    let mut in_memory = ShardedCheckpoints::in_memory(group)?;
    // The first copies are into new memory.
    checkpoints.async_save(0, &vs, Some(&optimizer), &())?;
    checkpoints.wait()?;
    for step in 0..2 {
        in_memory.save(step, &vs, Some(&optimizer), &())?;
    }
    let mut times = [const { Vec::new() }; 4];
    for round in 1..=options.rounds as usize {
        // As in a training, what the save before has removed is free by now.
        std::thread::sleep(PAUSE);
        times[0].push(timed(group, || Ok(checkpoints.save(round, &vs, Some(&optimizer), &())?))?);
        std::thread::sleep(PAUSE);
        times[1].push(timed(group, || {
            Ok(checkpoints.async_save(round, &vs, Some(&optimizer), &())?)
        })?);
        checkpoints.wait()?;
        std::thread::sleep(PAUSE);
        times[2]
            .push(timed(group, || Ok(in_memory.async_save(round, &vs, Some(&optimizer), &())?))?);
        in_memory.wait()?;
        times[3].push(timed(group, || {
            memory.copy_from_slice(&state);
            Ok(())
        })?);
    }
    Ok(times.each_mut().map(|times| milliseconds(median(times))))
}
