//! LeNet on Fashion-MNIST, trained on any number of ranks.
//!
//!     flow-launch --nproc_per_node 2 mnist
//!     flow-launch --nproc_per_node 2 mnist --checkpoint FOLDER    # and again, to resume

use std::fs;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use flow::prelude::*;
use flow_examples::{
    fashion,
    images::{Images, Pixels},
    options::{write_losses, Options},
    progress::Progress,
};
use serde::{Deserialize, Serialize};
use tch::nn::init::{FanInOut, Init, NonLinearity, NormalOrUniform};
use tch::nn::SequentialT;

/// What a checkpoint has beside the model, the optimizer and the sampler.
#[derive(Clone, Default, Serialize, Deserialize)]
struct State {
    /// The options and data that the trained weights depend on.
    hyperparameters: Vec<(String, String)>,
    /// The loss of each step, as text: JSON has no NaN.
    losses: Vec<String>,
    /// How many of them belong to earlier epochs.
    before: usize,
}

fn main() -> ExitCode {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    match run(&flow_examples::arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("mnist: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Options) -> Result<()> {
    let training = &args.training;
    let group = ProcessGroup::from_env()?;
    let device = group.use_device(training.device)?;
    let first = group.rank() == 0;
    if first {
        write_losses(training.losses.as_deref(), &[])?;
        if let Some(file) = &args.save {
            fs::write(file, "").with_context(|| format!("cannot write {}", file.display()))?;
        }
    }
    let (train, test) = {
        let folder = args.data.clone().unwrap_or_else(fashion::default_folder);
        Images::load(&folder, Pixels::Standardized)?
    };

    tch::manual_seed(training.seed.into());
    // The CPU's random numbers are the first weights on all devices.
    let mut vs = nn::VarStore::new(Device::Cpu);
    let net = lenet(&vs.root());
    vs.set_device(device);
    if args.double {
        vs.set_kind(Kind::Double);
    }
    let model = Ddp::new(net, &vs, &group)?;
    let mut optimizer = nn::sgd(training.momentum, 0.0, 0.0, false).build(&vs, training.lr)?;
    let mut sampler = DistributedSampler::new(train.len(), &group).seed(training.seed.into());

    let mut state = State { hyperparameters: args.hyperparameters(&train), ..Default::default() };
    let mut checkpoints =
        args.checkpoint.as_ref().map(|folder| Checkpoints::open(folder, &group)).transpose()?;
    if let Some(saved) =
        checkpoints.as_mut().map(Checkpoints::latest::<State>).transpose()?.flatten()
    {
        Options::check_hyperparameters(&saved.state.hyperparameters, &state.hyperparameters)?;
        saved.resume(&vs, &mut optimizer, &mut sampler)?;
        state = saved.state;
        if first {
            let (epoch, at) = (sampler.epoch(), sampler.state());
            println!("going on in epoch {epoch} after {} of {} images", at.taken, at.samples);
        }
    }

    // Steps of a whole epoch, of the epochs after this one, and of all that are left. This epoch may
    // be resumed in its middle.
    let batches = train.len().div_ceil(group.world_size() * training.batch_size.get());
    let start_epoch = sampler.epoch().max(1) as usize;
    let later = batches.saturating_mul(training.epochs.get().saturating_sub(start_epoch));
    let left =
        DataLoader::new(&train, &sampler, training.batch_size.get()).len().saturating_add(later);
    // Those that are done count too, perhaps by another number of ranks.
    let steps = left.saturating_add(state.losses.len()).min(training.steps.unwrap_or(usize::MAX));
    for epoch in start_epoch..=training.epochs.get() {
        if state.losses.len() == state.before && state.before >= steps {
            break; // all steps are done, and all epochs with losses are reported
        }
        let start = Instant::now();
        sampler.set_epoch(epoch as u64);
        let loader =
            DataLoader::new(&train, &sampler, training.batch_size.get()).workers(training.workers);
        let end = state.losses.len() + loader.len(); // of the epoch
        let last = end.min(steps);
        let progress = Progress::new(first, epoch, batches);
        for batch in loader.into_iter().take(last.saturating_sub(state.losses.len())) {
            let (images, labels) = on(&vs, batch?);
            optimizer.set_lr(training.lr_at(state.losses.len(), steps));
            // As `cross_entropy_for_logits`, which is in single precision whatever the model is in.
            let loss = model.forward_t(&images, true).log_softmax(-1, vs.kind()).nll_loss(&labels);
            optimizer.try_backward_step(&loss)?;

            let mut loss = [loss.double_value(&[])];
            group.all_reduce(&mut loss, ReduceOp::Avg)?;
            state.losses.push(loss[0].to_string());
            let step = state.losses.len();
            progress.step(batches - (end - step), loss[0]);

            let due = step.is_multiple_of(args.checkpoint_every.get()) || step == last;
            if let Some(checkpoints) = checkpoints.as_mut().filter(|_| due) {
                checkpoints.save(step, &model, &vs, &optimizer, &sampler, &state)?;
            }
        }
        progress.finish();

        let losses = state.losses[state.before..].iter().map(|loss| loss.parse::<f64>());
        let loss = losses.sum::<Result<f64, _>>()? / (state.losses.len() - state.before) as f64;
        let accuracy = 100.0 * accuracy(&model, &vs, &test, training.workers)?;
        if first {
            let seconds = start.elapsed().as_secs_f64();
            println!(
                "epoch {epoch}: loss {loss:.4}, test accuracy {accuracy:.2} %, {seconds:.1} s"
            );
        }
        state.before = state.losses.len();
    }
    if let Some(file) = args.save.as_ref().filter(|_| first) {
        vs.save(file).with_context(|| format!("cannot write {}", file.display()))?;
    }
    if first {
        write_losses(training.losses.as_deref(), &state.losses)?;
    }
    Ok(())
}

/// LeNet as in OneFlow's documentation, with PyTorch's first weights: tch's own are larger, too
/// large to start fast.
fn lenet(path: &nn::Path) -> SequentialT {
    let gain = NonLinearity::ExplicitGain(1.0 / 3f64.sqrt());
    let ws_init =
        Init::Kaiming { dist: NormalOrUniform::Uniform, fan: FanInOut::FanIn, non_linearity: gain };
    let convolution = nn::ConvConfig { padding: 2, ws_init, ..Default::default() };
    let dense = nn::LinearConfig { ws_init, ..Default::default() };
    nn::seq_t()
        .add(nn::conv2d(path / "conv1", 1, 32, 5, convolution))
        .add_fn(|x| x.max_pool2d_default(2).relu())
        .add(nn::conv2d(path / "conv2", 32, 64, 5, convolution))
        .add_fn(|x| x.max_pool2d_default(2).relu().flat_view())
        .add(nn::linear(path / "dense1", 64 * 7 * 7, 512, dense))
        .add_fn(|x| x.relu())
        .add(nn::linear(path / "dense2", 512, fashion::CLASSES as i64, dense))
}

/// The batch on the model's device, the images in the model's precision.
fn on(vs: &nn::VarStore, (images, labels): (Tensor, Tensor)) -> (Tensor, Tensor) {
    (images.to_device_(vs.device(), vs.kind(), false, false), labels.to(vs.device()))
}

/// The part of `images` that the model classifies rightly, over all ranks. Each image is seen once,
/// so that ranks may have different numbers of batches: they meet only after their last.
fn accuracy(
    model: &Ddp<SequentialT>,
    vs: &nn::VarStore,
    images: &Arc<Images>,
    workers: usize,
) -> Result<f64> {
    let _no_grad = tch::no_grad_guard();
    let sampler = DistributedSampler::new(images.len(), model.group()).shuffle(false).pad(false);
    let mut correct = [0];
    for batch in DataLoader::new(images, &sampler, 250).workers(workers) {
        let (images, labels) = on(vs, batch?);
        let classes = model.forward_t(&images, false).argmax(1, false);
        correct[0] += classes.eq_tensor(&labels).sum(Kind::Int64).int64_value(&[]);
    }
    model.group().all_reduce(&mut correct, ReduceOp::Sum)?;
    Ok(correct[0] as f64 / images.len() as f64)
}
