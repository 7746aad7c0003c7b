//! MobileNetV2 on CIFAR-10 by `Ddp`, by a hand-written loop, and by SBP, side by side.
//!
//!     flow-launch --nproc_per_node 2 mobilenet --steps 100 --compare
//!     flow-launch --nproc_per_node 2 mobilenet --by hand --data FOLDER
//!
//! With the numbers of OneFlow's documents, whose batch of 64 is that of all ranks:
//!
//!     flow-launch --nproc_per_node 2 mobilenet --by sbp --constant-lr --lr 1e-3 --momentum 0 --batch-size 32 --epochs 1

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::{Parser, ValueEnum};
use flow::prelude::*;
use flow_examples::cifar10::{self, Images};
use flow_examples::options::{Training, write_losses};
use flow_examples::progress::Progress;
use flow_examples::{fashion, program};
use tch::vision::mobilenet;

/// Trains MobileNetV2 on CIFAR-10.
#[derive(Parser)]
struct Args {
    /// Folder with the six files of CIFAR-10's binary version, or else with Fashion-MNIST, whose
    /// images are then made 3 x 32 x 32 [default: Fashion-MNIST's folder]
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// What makes ranks train one model
    #[arg(long, default_value = "ddp")]
    by: By,
    /// Train by all of them, one after the other, and show their losses and times
    #[arg(long)]
    compare: bool,
    /// Forward as in evaluation: batch norm takes its running statistics, and nothing is dropped.
    /// Then all three have equal losses. Else SBP has the losses of one process with the batches of
    /// all ranks, as its batch norm is over all of them
    #[arg(long)]
    frozen: bool,
    /// Keep the learning rate at --lr, instead of going up to it and down again
    #[arg(long)]
    constant_lr: bool,
    #[command(flatten)]
    training: Training,
}

#[derive(Clone, Copy, PartialEq, Debug, ValueEnum)]
enum By {
    /// `Ddp`: gradients are averaged inside backward
    Ddp,
    /// A hand-written loop: an all-reduce for each gradient, after backward
    Hand,
    /// Global tensors: the batch is split, the weights are broadcast
    Sbp,
}

/// A training: the loss of each step, the mean over all ranks, and the time it took.
struct Trained {
    by: By,
    losses: Vec<f64>,
    times: Vec<Duration>,
}

/// Takes images, labels and a learning rate, changes the weights, and returns this rank's loss, or
/// that of all ranks.
type Step = Box<dyn FnMut(&Tensor, &Tensor, f64) -> Result<Tensor>>;

fn main() -> ExitCode {
    program::run("mobilenet", run)
}

fn run(args: &Args) -> Result<()> {
    let group = ProcessGroup::from_env()?;
    let device = group.use_device(args.training.device)?;
    let first = group.rank() == 0;
    if first {
        write_losses(args.training.losses.as_deref(), &[])?;
    }
    let images = load(args, first)?;
    let ways = if args.compare { By::value_variants() } else { &[args.by] };
    let trained = ways
        .iter()
        .map(|&by| train(by, args, &group, device, &images))
        .collect::<Result<Vec<_>>>()?;
    if first {
        write_losses(args.training.losses.as_deref(), &rows(&trained, 1))?;
        report(&trained);
    }
    Ok(())
}

/// Returns the training images.
fn load(args: &Args, first: bool) -> Result<Arc<Images>> {
    let folder = args.data.clone().unwrap_or_else(fashion::default_folder);
    if cifar10::is_in(&folder) {
        return Ok(cifar10::load(&folder)?.0);
    }
    if first {
        let folder = folder.display();
        println!("no CIFAR-10 in {folder}: training on Fashion-MNIST, as 3 x 32 x 32");
    }
    let (train, _) = fashion::load(&folder)?;
    Images::from_grey(&train).with_context(|| folder.display().to_string())
}

/// Trains from the same first weights, whatever it is that makes ranks train one model.
fn train(
    by: By,
    args: &Args,
    group: &ProcessGroup,
    device: Device,
    images: &Arc<Images>,
) -> Result<Trained> {
    let mut step = step(by, args, group, device)?;
    let constant_lr = args.constant_lr;
    let args = &args.training;
    let mut sampler = DistributedSampler::new(images.len(), group).seed(args.seed.into());
    let batches = DataLoader::new(images, &sampler, args.batch_size.get()).len();
    let steps = batches.saturating_mul(args.epochs.get()).min(args.steps.unwrap_or(usize::MAX));
    ensure!(steps > 0, "there is no step to compare: ask for one or more");
    let mut trained = Trained { by, losses: Vec::new(), times: Vec::new() };
    for epoch in 1..=args.epochs.get() {
        sampler.set_epoch(epoch as u64);
        let progress = Progress::new(group.rank() == 0, epoch, batches);
        let loader = DataLoader::new(images, &sampler, args.batch_size.get()).workers(args.workers);
        let left = steps - trained.losses.len();
        for (batch, index) in loader.into_iter().take(left).zip(1..) {
            let (images, labels) = batch?;
            let images = images.to(device);
            let labels = labels.to(device);
            let done = trained.losses.len();
            let lr = if constant_lr { args.lr } else { args.lr_at(done, steps) };
            let start = Instant::now();
            let loss = step(&images, &labels, lr)?;
            let mut loss = [loss.double_value(&[])];
            trained.times.push(start.elapsed());
            group.all_reduce(&mut loss, ReduceOp::Avg)?;
            trained.losses.push(loss[0]);
            progress.step(index, loss[0]);
        }
        progress.finish();
    }
    Ok(trained)
}

/// Makes the model, and what trains it by one batch.
fn step(by: By, args: &Args, group: &ProcessGroup, device: Device) -> Result<Step> {
    let in_training = !args.frozen;
    let args = &args.training;
    tch::manual_seed(args.seed.into());
    // The CPU's random numbers are the first weights on all devices.
    let mut vs = nn::VarStore::new(Device::Cpu);
    let net = mobilenet::v2(&vs.root(), cifar10::CLASSES as i64);
    vs.set_device(device);
    let mut optimizer = nn::sgd(args.momentum, 0.0, 0.0, false).build(&vs, args.lr)?;
    // What dropout drops: another choice on each rank, the same by `Ddp` and by hand.
    tch::manual_seed(i64::from(args.seed) + 1 + group.rank() as i64);

    Ok(match by {
        By::Ddp => {
            let model = Ddp::new(net, &vs, group)?;
            Box::new(move |images, labels, lr| {
                let loss = model.forward_t(images, in_training).cross_entropy_for_logits(labels);
                optimizer.set_lr(lr);
                optimizer.try_backward_step(&loss)?;
                Ok(loss)
            })
        }
        By::Hand => {
            let group = group.clone();
            // Running statistics stay each rank's own: in training nothing depends on them.
            let mut weights = vs.trainable_variables();
            for weight in &mut weights {
                tch::no_grad(|| group.broadcast_tensor(weight, 0))?;
            }
            Box::new(move |images, labels, lr| {
                let loss = net.forward_t(images, in_training).cross_entropy_for_logits(labels);
                optimizer.zero_grad();
                loss.backward();
                for weight in &weights {
                    group.all_reduce_tensor(&mut weight.grad(), ReduceOp::Avg)?;
                }
                optimizer.set_lr(lr);
                optimizer.step();
                Ok(loss)
            })
        }
        By::Sbp => {
            let placement = Placement::all(group)?;
            global::distribute(&vs, &placement, |_, _| vec![B])?;
            Box::new(move |images, labels, lr| {
                // Each rank's batch is a part of the logical one.
                let images = images.to_global(&placement, [S(0)])?;
                let labels = labels.to_global(&placement, [S(0)])?;
                let loss = net.forward_t(&images, in_training).cross_entropy_for_logits(&labels);
                optimizer.set_lr(lr);
                optimizer.try_backward_step(&loss)?;
                Ok(loss.full()?)
            })
        }
    })
}

/// Returns the losses of every `every`th step, a line each, with a number for each training.
fn rows(trained: &[Trained], every: usize) -> Vec<String> {
    let mut rows = Vec::new();
    for step in (0..trained[0].losses.len()).step_by(every) {
        let losses: Vec<String> =
            trained.iter().map(|trained| trained.losses[step].to_string()).collect();
        rows.push(losses.join(" "));
    }
    rows
}

/// Prints losses and times side by side.
fn report(trained: &[Trained]) {
    let names: Vec<String> = trained.iter().map(|trained| format!("{:?}", trained.by)).collect();
    let every = trained[0].losses.len().div_ceil(10);
    println!("loss by {}:", names.join(", ").to_lowercase());
    for (row, index) in rows(trained, every).iter().zip(0..) {
        println!("step {}: {row}", index * every + 1);
    }
    for Trained { by, times, .. } in trained {
        let mut sorted = times.clone();
        sorted.sort_unstable();
        let milliseconds = sorted[sorted.len() / 2].as_secs_f64() * 1e3;
        let name = format!("{by:?}").to_lowercase();
        println!("by {name}: {milliseconds:.1} ms per step (median of {})", sorted.len());
    }
}
