//! LeNet on Fashion-MNIST, trained on any number of ranks.
//!
//!     flow-launch --nproc_per_node 2 mnist
//!     flow-launch --nproc_per_node 2 mnist --checkpoint FOLDER    # and again, to go on after an interruption

use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{ensure, Context, Result};
use clap::Parser;
use flate2::Crc;
use flow_ddp::{
    DataLoader, Dataset, Ddp, DeviceKind, DistributedSampler, ProcessGroup, ReduceOp, SamplerState,
    TensorCollectives, TryBackwardStep,
};
use flow_examples::checkpoint::Checkpoints;
use flow_examples::fashion::{self, Split};
use indicatif::{ProgressBar, ProgressStyle};
use serde::{Deserialize, Serialize};
use tch::nn::init::{FanInOut, Init, NonLinearity, NormalOrUniform};
use tch::nn::{self, ModuleT, OptimizerConfig, SequentialT};
use tch::{Device, Kind, Tensor};

/// Rows and columns of an image.
const SIDE: usize = 28;
/// Mean and standard deviation of all grey values of Fashion-MNIST, on a scale from 0 to 1.
const MEAN: f32 = 0.2860;
const DEVIATION: f32 = 0.3530;

/// Trains LeNet on Fashion-MNIST.
#[derive(Parser)]
struct Args {
    /// Folder with the data set's four IDX files, gzipped or not [default: Debian's
    /// dataset-fashion-mnist]
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// How often all images are seen
    #[arg(long, value_name = "N", default_value = "2")]
    epochs: NonZeroUsize,
    /// Images per rank and step
    #[arg(long, value_name = "N", default_value = "50")]
    batch_size: NonZeroUsize,
    /// Highest learning rate, reached after a fifth of all steps
    #[arg(long, value_name = "RATE", default_value = "0.08", value_parser = from_zero_up, allow_hyphen_values = true)]
    lr: f64,
    /// Momentum of the gradient descent
    #[arg(long, value_name = "M", default_value = "0.9", value_parser = from_zero_up, allow_hyphen_values = true)]
    momentum: f64,
    /// Seed of the first weights and of the images' order
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u32,
    /// Stop after so many steps
    #[arg(long, value_name = "N")]
    steps: Option<usize>,
    /// cpu, or cuda: a GPU for each rank
    #[arg(long, default_value = "cpu")]
    device: DeviceKind,
    /// Compute in double precision, to compare trainings: what rounding makes of two then stays
    /// small
    #[arg(long)]
    double: bool,
    /// Threads per rank that load images
    #[arg(long, value_name = "N", default_value_t = 1)]
    workers: usize,
    /// File for the loss of each step, the mean over all ranks, a line each
    #[arg(long, value_name = "FILE")]
    losses: Option<PathBuf>,
    /// File for the trained weights, such as weights.safetensors
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
    /// Folder for checkpoints: training goes on from the newest one there
    #[arg(long, value_name = "DIR")]
    checkpoint: Option<PathBuf>,
    /// Steps from one checkpoint to the next; there is also one at the end of each epoch
    #[arg(long, value_name = "N", default_value = "100")]
    checkpoint_every: NonZeroUsize,
}

/// Where training is, beside the weights and the optimizer's state.
#[derive(Serialize, Deserialize)]
struct Position {
    /// The options and data that the trained weights depend on.
    options: Vec<(String, String)>,
    ranks: usize,
    /// Of each rank.
    threads: i32,
    sampler: SamplerState,
    /// Of all steps.
    losses: Vec<f64>,
    /// Number of losses of earlier epochs.
    before: usize,
}

fn from_zero_up(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| number.is_finite() && *number >= 0.0);
    number.ok_or_else(|| "it should be a number from 0 up".into())
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

fn run(args: &Args) -> Result<()> {
    let group = ProcessGroup::from_env()?;
    let device = group.use_device(args.device)?;
    let first = group.rank() == 0;
    for file in [&args.losses, &args.save].into_iter().flatten().filter(|_| first) {
        // Now, rather than when all the work is done.
        fs::File::create(file).with_context(|| format!("cannot write {}", file.display()))?;
    }
    let (train, test) = load(&args.data.clone().unwrap_or_else(fashion::default_folder))?;

    tch::manual_seed(args.seed.into());
    let mut vs = nn::VarStore::new(Device::Cpu); // whose random numbers the first weights are, on all devices
    let net = lenet(&vs.root());
    vs.set_device(device);
    if args.double {
        vs.set_kind(Kind::Double);
    }
    let model = Ddp::new(net, &vs, &group)?;
    let mut optimizer = nn::sgd(args.momentum, 0.0, 0.0, false).build(&vs, args.lr)?;
    let mut sampler = DistributedSampler::new(train.len(), &group).seed(args.seed.into());

    let options = options(args, &train.0);
    let (ranks, threads) = (group.world_size(), tch::get_num_threads());
    let (mut losses, mut before) = (Vec::new(), 0);
    let mut checkpoints =
        args.checkpoint.as_ref().map(|folder| Checkpoints::open(folder, &group)).transpose()?;
    if let Some(saved) =
        checkpoints.as_mut().map(Checkpoints::newest::<Position>).transpose()?.flatten()
    {
        sampler.resume(&saved.state.sampler)?;
        same_options(&saved.state.options, &options)?;
        saved.restore(&vs, &mut optimizer)?;
        let there = (saved.state.ranks, saved.state.threads);
        if first && there != (ranks, threads) {
            log::warn!(
                "the checkpoint was made by {} rank(s) of {} thread(s), here {ranks} of {threads} go on: the weights will not \
                 be the same to the bit",
                there.0,
                there.1
            );
        }
        (losses, before) = (saved.state.losses, saved.state.before);
        if first {
            let SamplerState { epoch, taken, samples, .. } = saved.state.sampler;
            println!("going on in epoch {epoch} after {taken} of {samples} images");
        }
    }

    let batches = train.len().div_ceil(ranks * args.batch_size.get()); // in a whole epoch
    let start_epoch = sampler.epoch().max(1) as usize;
    let later = batches.saturating_mul(args.epochs.get().saturating_sub(start_epoch));
    let left = DataLoader::new(&train, &sampler, args.batch_size.get()).len().saturating_add(later);
    // Those that were done, by however many ranks, and those that are left for these ranks.
    let steps = left.saturating_add(losses.len()).min(args.steps.unwrap_or(usize::MAX));
    for epoch in start_epoch..=args.epochs.get() {
        if losses.len() == before && before >= steps {
            break; // an epoch of which there are losses is reported, even if it has no step left
        }
        let start = Instant::now();
        sampler.set_epoch(epoch as u64);
        let loader = DataLoader::new(&train, &sampler, args.batch_size.get()).workers(args.workers);
        let end = losses.len() + loader.len(); // of the epoch
        let last = end.min(steps);
        let progress = Progress::new(first, epoch, batches);
        for batch in loader.into_iter().take(last.saturating_sub(losses.len())) {
            let (images, labels) = on(&vs, batch?);
            optimizer.set_lr(args.lr * schedule(losses.len(), steps));
            // As `cross_entropy_for_logits`, which is in single precision whatever the model is in.
            let loss = model.forward_t(&images, true).log_softmax(-1, vs.kind()).nll_loss(&labels);
            optimizer.try_backward_step(&loss)?;

            let mut loss = [loss.double_value(&[])];
            group.all_reduce(&mut loss, ReduceOp::Avg)?;
            losses.push(loss[0]);
            let step = losses.len();
            progress.step(batches - (end - step), loss[0]);

            let due = step.is_multiple_of(args.checkpoint_every.get()) || step == last;
            if let Some(checkpoints) = checkpoints.as_mut().filter(|_| due) {
                let (options, sampler, losses) = (options.clone(), sampler.state(), losses.clone());
                model.synchronize()?;
                let position = Position { options, ranks, threads, sampler, losses, before };
                checkpoints.write(step, &position, &vs, &optimizer)?;
            }
        }
        progress.finish();

        let loss = losses[before..].iter().sum::<f64>() / (losses.len() - before) as f64;
        let accuracy = 100.0 * accuracy(&model, &vs, &test, args.workers)?;
        if first {
            let seconds = start.elapsed().as_secs_f64();
            println!(
                "epoch {epoch}: loss {loss:.4}, test accuracy {accuracy:.2} %, {seconds:.1} s"
            );
        }
        before = losses.len();
    }
    if let Some(file) = args.save.as_ref().filter(|_| first) {
        vs.save(file).with_context(|| format!("cannot write {}", file.display()))?;
    }
    if let Some(file) = args.losses.as_ref().filter(|_| first) {
        let lines: String = losses.iter().map(|loss| format!("{loss}\n")).collect();
        fs::write(file, lines).with_context(|| format!("cannot write {}", file.display()))?;
    }
    Ok(())
}

/// The options and data that the trained weights depend on, beside what the sampler keeps.
fn options(args: &Args, train: &Split) -> Vec<(String, String)> {
    let Args { epochs, batch_size, lr, momentum, double, .. } = args;
    let mut checksum = Crc::new();
    checksum.update(&train.images);
    checksum.update(&train.labels);
    let checksum = format!("{:08x}", checksum.sum());
    let steps = args.steps.map_or("all".to_owned(), |steps| steps.to_string());
    let options: [(&str, &dyn ToString); 7] = [
        ("--epochs", epochs),
        ("--batch-size", batch_size),
        ("--lr", lr),
        ("--momentum", momentum),
        ("--steps", &steps),
        ("training data of checksum", &checksum),
        ("--double", double),
    ];
    options.map(|(name, value)| (name.to_owned(), value.to_string())).to_vec()
}

fn same_options(saved: &[(String, String)], here: &[(String, String)]) -> Result<()> {
    for ((name, saved), (_, here)) in saved.iter().zip(here) {
        ensure!(
            saved == here,
            "the checkpoint was made with {name} {saved}, not {here}; use that, or another folder"
        );
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

/// The learning rate's way, as a part of its peak: up in a straight line during the first fifth of
/// all steps, then down.
fn schedule(step: usize, steps: usize) -> f64 {
    let place = (step + 1) as f64 / (steps + 1) as f64;
    (5.0 * place).min(1.25 * (1.0 - place))
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

/// Labelled images that become tensors a batch at a time.
struct Images(Split);

impl Dataset for Images {
    /// Normalized images `[batch, 1, 28, 28]` and their classes `[batch]`.
    type Batch = (Tensor, Tensor);

    fn len(&self) -> usize {
        self.0.labels.len()
    }

    fn batch(
        &self,
        indices: &[usize],
    ) -> Result<Self::Batch, Box<dyn std::error::Error + Send + Sync>> {
        let Split { images, labels, .. } = &self.0;
        let bytes = indices.iter().flat_map(|index| &images[index * SIDE * SIDE..][..SIDE * SIDE]);
        let pixels: Vec<f32> =
            bytes.map(|&byte| (f32::from(byte) / 255.0 - MEAN) / DEVIATION).collect();
        let labels: Vec<i64> = indices.iter().map(|&index| labels[index].into()).collect();
        Ok((
            Tensor::from_slice(&pixels).view([-1, 1, SIDE as i64, SIDE as i64]),
            Tensor::from_slice(&labels),
        ))
    }
}

/// The training and the test images in `folder`.
fn load(folder: &Path) -> Result<(Arc<Images>, Arc<Images>)> {
    let (train, test) = fashion::load(folder)?;
    for split in [&train, &test] {
        let (count, rows, columns) = (split.labels.len(), split.rows, split.columns);
        ensure!(
            count > 0 && (rows, columns) == (SIDE, SIDE),
            "{}: found {count} images of {rows} x {columns}, LeNet takes one or more of {SIDE} x {SIDE}",
            folder.display()
        );
    }
    Ok((Arc::new(Images(train)), Arc::new(Images(test))))
}

/// Rank 0's progress in an epoch: a bar on a terminal, else a line now and then.
struct Progress {
    bar: ProgressBar,
    /// Whether to print lines.
    lines: bool,
    epoch: usize,
}

impl Progress {
    fn new(first: bool, epoch: usize, steps: usize) -> Self {
        let bar = if first { ProgressBar::new(steps as u64) } else { ProgressBar::hidden() };
        let style = ProgressStyle::with_template("{prefix} {wide_bar} {pos}/{len} {msg} {eta}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.set_prefix(format!("epoch {epoch}"));
        Self { lines: first && bar.is_hidden(), bar, epoch }
    }

    fn step(&self, step: usize, loss: f64) {
        self.bar.set_position(step as u64);
        self.bar.set_message(format!("loss {loss:.4}"));
        if self.lines && step.is_multiple_of(100) {
            println!(
                "epoch {}, step {step}/{}: loss {loss:.4}",
                self.epoch,
                self.bar.length().unwrap_or_default()
            );
        }
    }

    fn finish(&self) {
        self.bar.finish_and_clear();
    }
}
