//! Saving and loading a model and its Adam, trained by `Fsdp`, beside `dd` on the same disk.
//!
//! All take turns. `dd` writes and reads past the kernel's cache, as many bytes. A checkpoint is out of the
//! cache before it is loaded. A save beside the training is measured until the training may go on, beside a copy of
//! as many bytes in memory. What is in flow-launch's memory is resumed as by a restarted rank: it opens the memory,
//! checks the sums and loads.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;
use flow_ddp::{Checkpoints, DistributedSampler, Fsdp, ProcessGroup, ZeroRedundancyOptimizer};
use serde_json::json;
use tch::nn::{self, VarStore};
use tch::{Device, Kind, Tensor};

use crate::timing::{median, milliseconds};

#[derive(Args)]
pub struct Options {
    /// A folder on the disk to measure
    #[arg(long, default_value = ".")]
    folder: PathBuf,
    /// The size of the model and the optimizer's state, in MB
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u32).range(1..))]
    megabytes: u32,
    /// How often each is measured
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Print a JSON line
    #[arg(long)]
    json: bool,
}

/// Weights of the model: as many as a GPT of eight layers has.
const WEIGHTS: i64 = 100;
/// Elements of a row of a weight.
const WIDTH: i64 = 2048;
/// Bytes that are copied again and again: more than caches have.
const COPIED: usize = 256 << 20;
/// What `dd` writes or reads at once.
const BLOCK: usize = 16 << 20;

pub fn run(options: &Options) -> Result<()> {
    let group = ProcessGroup::from_env()?;
    tch::set_num_threads(1);
    let folder = options.folder.join("flow-bench-checkpoints");
    let measured = measure(options, &group, &folder);
    if group.rank() == 0 {
        let _ = std::fs::remove_dir_all(&folder); // an error of `measure` says more
    }
    let Some([dd_write, save, dd_read, load, copy, async_save, resume]) = measured? else {
        return Ok(());
    };
    let megabytes = options.megabytes;
    if options.json {
        let line = json!({
            "bench": "checkpoints", "megabytes": megabytes, "ranks": group.world_size(),
            "dd_write_ms": dd_write, "save_ms": save, "dd_read_ms": dd_read, "load_ms": load,
            "copy_ms": copy, "async_save_ms": async_save, "resume_ms": resume,
        });
        println!("{line}");
    } else {
        println!(
            "{megabytes} MB: {save:.0} ms to save ({:.2} of dd's speed), {load:.0} ms to load ({:.2}), \
             {async_save:.0} ms to begin to save beside the training ({:.2} of a copy), {resume:.0} ms to resume \
             from memory",
            dd_write / save,
            dd_read / load,
            async_save / copy
        );
    }
    Ok(())
}

/// A model and its Adam, which have taken a step.
pub struct Trained {
    pub vs: VarStore,
    pub model: Fsdp<()>,
    pub optimizer: ZeroRedundancyOptimizer,
    pub sampler: DistributedSampler,
    /// What is saved of them.
    pub bytes: usize,
}

impl Trained {
    pub fn new(megabytes: u32, group: &ProcessGroup) -> Result<Self> {
        let vs = VarStore::new(Device::Cpu);
        // A third is the model, and two thirds are the state of Adam.
        let elements = i64::from(megabytes) * 1_000_000 / 3 / 4;
        let rows = (elements / WIDTH / WEIGHTS).max(1);
        for number in 0..WEIGHTS {
            let weight = Tensor::rand([rows, WIDTH], (Kind::Float, vs.device()));
            let _ = vs.root().add(&format!("weight{number}"), weight, true);
        }
        let model = Fsdp::new((), &vs, group)?;
        let optimizer = model.optimizer(nn::Adam::default(), 1e-3)?;
        let sums = vs.trainable_variables().into_iter().map(|weight| weight.sum(Kind::Float));
        optimizer.backward_step(&sums.sum::<Tensor>())?;
        let sampler = DistributedSampler::new(1, group);
        let bytes = 12 * (WEIGHTS * rows * WIDTH) as usize;
        Ok(Self { vs, model, optimizer, sampler, bytes })
    }
}

/// Returns the milliseconds of each, on rank 0: medians.
fn measure(options: &Options, group: &ProcessGroup, folder: &Path) -> Result<Option<[f64; 7]>> {
    let Trained { vs, model, mut optimizer, mut sampler, bytes } =
        Trained::new(options.megabytes, group)?;
    let mut checkpoints = Checkpoints::open(folder, group)?.keep(1);
    let file = folder.join("dd");
    let is_first = group.rank() == 0;
    let part = vec![1_u8; COPIED.min(bytes / group.world_size())];
    let mut memory = vec![0_u8; bytes / group.world_size()];
    let mut times = [const { Vec::new() }; 7];
    let mut in_memory = Checkpoints::in_memory(group)?;
    // The first copy is into new memory.
    checkpoints.async_save(0, &model, &vs, &optimizer, &sampler, &())?;
    checkpoints.wait()?;
    for round in 0..options.rounds as usize {
        times[0].push(timed(group, || if is_first { dd_write(&file, bytes) } else { Ok(()) })?);
        times[1].push(timed(group, || {
            Ok(checkpoints.save(round, &model, &vs, &optimizer, &sampler, &())?)
        })?);
        if is_first {
            uncache(&folder.join(format!("step-{round}")))?;
        }
        times[2].push(timed(group, || if is_first { dd_read(&file) } else { Ok(()) })?);
        times[3].push(timed(group, || {
            let checkpoint = checkpoints.latest::<()>()?.context("it was saved")?;
            Ok(checkpoint.resume(&vs, &mut optimizer, &mut sampler)?)
        })?);
        if is_first {
            std::fs::remove_file(&file)?;
        }
        times[4].push(timed(group, || {
            for block in memory.chunks_mut(COPIED) {
                block.copy_from_slice(&part[..block.len()]);
            }
            Ok(())
        })?);
        times[5].push(timed(group, || {
            Ok(checkpoints.async_save(round, &model, &vs, &optimizer, &sampler, &())?)
        })?);
        checkpoints.wait()?;
        in_memory.save(round, &model, &vs, &optimizer, &sampler, &())?;
        drop(in_memory);
        let start = Instant::now();
        in_memory = Checkpoints::in_memory(group)?;
        let checkpoint = in_memory.latest::<()>()?.context("it was saved")?;
        checkpoint.resume(&vs, &mut optimizer, &mut sampler)?;
        group.barrier()?;
        times[6].push(start.elapsed());
    }
    Ok(is_first.then(|| times.each_mut().map(|times| milliseconds(median(times)))))
}

/// The time of the rank that takes longest. All begin together.
pub fn timed(group: &ProcessGroup, work: impl FnOnce() -> Result<()>) -> Result<Duration> {
    group.barrier()?;
    let start = Instant::now();
    work()?;
    let own = start.elapsed().as_nanos() as i64;
    let mut all = vec![0; group.world_size()];
    group.all_gather(&[own], &mut all)?;
    Ok(Duration::from_nanos(all.into_iter().fold(own, i64::max) as u64))
}

fn dd_write(file: &Path, bytes: usize) -> Result<()> {
    let of = format!("of={}", file.display());
    let count = format!("count={}", bytes.div_ceil(BLOCK));
    dd(&["if=/dev/zero", &of, "bs=16M", &count, "oflag=direct", "conv=fsync"])
}

fn dd_read(file: &Path) -> Result<()> {
    dd(&[&format!("if={}", file.display()), "of=/dev/null", "bs=16M", "iflag=direct"])
}

/// Has the kernel forget the files in a folder.
fn uncache(folder: &Path) -> Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let file = format!("if={}", entry?.path().display());
        dd(&[&file, "of=/dev/null", "iflag=nocache", "count=0"])?;
    }
    Ok(())
}

fn dd(arguments: &[&str]) -> Result<()> {
    let output = Command::new("dd").args(arguments).output().context("cannot start dd")?;
    ensure!(output.status.success(), "dd: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}
