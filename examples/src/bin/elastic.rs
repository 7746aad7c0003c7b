//! LeNet on Fashion-MNIST, on ranks that come and go. The weights are the same bits whatever happens.
//!
//!     flow-launch --nproc_per_node 3 --elastic in-place --max-restarts 100 elastic --save weights.safetensors
//!
//! Kill some of its processes, and compare the file with that of a training that nothing happened to.

use std::fs::File;
use std::io::Write;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::SystemTime;

use anyhow::{Context, Result};
use clap::Parser;
use flow::ddp::{Error, SamplerState, Training};
use flow::prelude::*;
use flow_examples::images::{Images, Pixels};
use flow_examples::lenet::{accuracy, lenet};
use flow_examples::options::write_losses;
use flow_examples::{fashion, program};
use serde::{Deserialize, Serialize};
use tch::nn::SequentialT;

/// Trains LeNet on Fashion-MNIST, while ranks are lost and others come.
#[derive(Parser)]
struct Options {
    /// Folder with the data set's four IDX files, gzipped or not [default: Debian's
    /// dataset-fashion-mnist]
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// Parts of each step, which the ranks share: not fewer than ranks
    #[arg(long, value_name = "V", default_value = "4")]
    virtual_ranks: NonZeroUsize,
    /// Images per part and step
    #[arg(long, value_name = "N", default_value = "25")]
    batch_size: NonZeroUsize,
    /// How often all images are seen
    #[arg(long, value_name = "N", default_value = "2")]
    epochs: NonZeroUsize,
    /// Steps of an epoch, if not all
    #[arg(long, value_name = "N")]
    steps: Option<usize>,
    /// Learning rate
    #[arg(long, value_name = "RATE", default_value = "0.02")]
    lr: f64,
    /// Seed of the first weights and of the images' order
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u32,
    /// File for the trained weights, such as weights.safetensors
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
    /// File for the loss of each step, a line each
    #[arg(long, value_name = "FILE")]
    losses: Option<PathBuf>,
    /// File that each rank appends to after each step: the time, the step, its process, the
    /// number of ranks, and of groups that it has been in
    #[arg(long, value_name = "FILE")]
    journal: Option<PathBuf>,
}

/// Where the training goes on when the ranks have changed.
#[derive(Default, Serialize, Deserialize)]
struct Progress {
    epoch: u64,
    /// The same for all virtual ranks; None at the beginning of an epoch.
    sampler: Option<SamplerState>,
    /// The losses of all steps, as text: JSON has no NaN.
    losses: Vec<String>,
}

fn main() -> ExitCode {
    program::run("elastic", run)
}

fn run(options: &Options) -> Result<()> {
    let group = ProcessGroup::from_env()?;
    let folder = options.data.clone().unwrap_or_else(fashion::default_folder);
    let (train, test) = Images::load(&folder, Pixels::Standardized)?;
    let mut journal = options.journal.as_ref().map(open).transpose()?;

    tch::manual_seed(options.seed.into());
    let vs = nn::VarStore::new(Device::Cpu);
    let net = lenet(&vs.root());
    let optimizer = nn::sgd(0.9, 0.0, 0.0, false).build(&vs, options.lr)?;
    let virtual_ranks = options.virtual_ranks.get();
    let mut elastic = Elastic::new(net, &vs, optimizer, Progress::default(), &group)
        .options(move |group| Ddp::builder(group).virtual_ranks(virtual_ranks));
    drop(group);
    let mut groups = 0;
    elastic.run(|training| {
        groups += 1;
        while training.state.epoch < options.epochs.get() as u64 {
            train_epoch(training, options, &train, journal.as_mut().map(|file| (file, groups)))?;
            let accuracy = 100.0 * accuracy(&training.model, &vs, &test, 1)?;
            if training.group().rank() == 0 {
                println!("epoch {}: test accuracy {accuracy:.2} %", training.state.epoch);
            }
            training.state.sampler = None;
            training.state.epoch += 1;
        }
        anyhow::Ok(())
    })?;

    if elastic.group().rank() == 0 {
        if let Some(file) = &options.save {
            vs.save(file).with_context(|| format!("cannot write {}", file.display()))?;
        }
        write_losses(options.losses.as_deref(), &elastic.state().losses)?;
    }
    Ok(())
}

/// Trains until the end of the epoch, from where its sampler is.
fn train_epoch(
    training: &mut Training<SequentialT, Progress>,
    options: &Options,
    train: &Arc<Images>,
    mut journal: Option<(&mut File, u32)>,
) -> Result<()> {
    let virtual_ranks = options.virtual_ranks.get();
    let mut samplers = Vec::new();
    for part in training.model.virtual_ranks() {
        let sampler = DistributedSampler::with_replicas(train.len(), virtual_ranks, part)?;
        let mut sampler = sampler.seed(options.seed.into());
        if let Some(position) = &training.state.sampler {
            sampler.resume(position)?;
        }
        sampler.set_epoch(training.state.epoch);
        samplers.push(sampler);
    }
    let mut loaders = Vec::new();
    for sampler in &samplers {
        loaders.push(DataLoader::new(train, sampler, options.batch_size.get()).into_iter());
    }
    let end = options.steps.map(|steps| steps * (training.state.epoch as usize + 1));
    while end.is_none_or(|end| training.state.losses.len() < end) {
        let batches: Option<Vec<_>> = loaders.iter_mut().map(Iterator::next).collect();
        let Some(batches) = batches else { break };
        let batches = batches.into_iter().collect::<Result<Vec<_>, _>>()?;
        let step = training.steps();
        let loss = training.step(|model, _| gradients(model, step, &batches))?;
        training.state.sampler = samplers.first().map(DistributedSampler::state);
        training.state.losses.push(loss.to_string());
        if let Some((file, groups)) = &mut journal {
            let time = SystemTime::UNIX_EPOCH.elapsed()?.as_secs_f64();
            let ranks = training.group().world_size();
            let line = format!("{time:.4} {step} {} {ranks} {groups}\n", std::process::id());
            file.write_all(line.as_bytes())?;
        }
    }
    Ok(())
}

/// Computes the gradients of this rank's parts of a step. Returns the mean loss of all parts.
fn gradients(
    model: &Ddp<SequentialT>,
    step: u64,
    batches: &[(Tensor, Tensor)],
) -> Result<f64, Error> {
    let mut own = Vec::new();
    for (part, (images, labels)) in model.virtual_ranks().zip(batches) {
        own.push(model.in_virtual_rank(part, step, || {
            let loss = model.try_forward_t(images, true)?.cross_entropy_for_logits(labels);
            loss.f_backward().map_err(Error::from_backward)?;
            Ok::<_, Error>(loss.double_value(&[]))
        })?);
    }
    // In the order of the parts, whichever ranks have them.
    let group = model.group();
    let mut counts = vec![0i64; group.world_size()];
    group.all_gather(&[own.len() as i64], &mut counts)?;
    let counts: Vec<usize> = counts.into_iter().map(|count| count as usize).collect();
    let mut losses = vec![0.0; counts.iter().sum()];
    group.all_gather_v(&own, &mut losses, &counts)?;
    Ok(losses.iter().sum::<f64>() / losses.len() as f64)
}

fn open(path: &PathBuf) -> Result<File> {
    let file = File::options().create(true).append(true).open(path);
    file.with_context(|| format!("cannot write {}", path.display()))
}
