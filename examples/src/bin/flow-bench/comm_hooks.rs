//! Ways to send less: the steps of a training of LeNet on Fashion-MNIST, what they send, and what they
//! learn. `scripts/bench-comm-hooks` runs it for each of them, also on two machines with a slow network.

use std::fs;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use flow::ddp::comm_hooks::{
    AllReduce, Bf16Compress, Fp16Compress, NoiseScale, PostLocalSgd, PowerSgd, Quantize, TopK,
};
use flow::ddp::{DiLoCo, DiLoCoOptions, ModelAverager};
use flow::prelude::*;
use flow_examples::fashion;
use flow_examples::images::{Images, Pixels};
use serde_json::json;

use crate::models::Model;

const BATCH: usize = 50;
const MOMENTUM: f64 = 0.9;
/// Steps before times are taken. The ways that begin later do so in these.
const WARM_UP: u64 = 10;
/// Steps from one average of parameters to the next.
const PERIOD: u64 = 4;
/// Steps from one exchange of DiLoCo's to the next.
const SYNC_EVERY: u64 = 100;
/// Less than the 0.9 that is usual: in a dozen exchanges that overshoots.
const OUTER_MOMENTUM: f64 = 0.5;

#[derive(Args)]
pub struct Options {
    #[arg(long, value_enum)]
    way: Way,
    /// Steps, after 10 that are not counted
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,
    /// Learning rate, with a momentum of 0.9
    #[arg(long, default_value_t = 0.01)]
    lr: f64,
    /// Also find out how many test images the trained model classifies rightly
    #[arg(long)]
    accuracy: bool,
    /// Print a JSON line
    #[arg(long)]
    json: bool,
}

/// Ways to train on several ranks.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Way {
    /// The mean of all gradients
    AllReduce,
    Fp16,
    Bf16,
    /// Two matrices of rank 2
    PowerSgd,
    /// Two matrices of rank 8 for each bucket
    BatchedPowerSgd,
    /// A hundredth of all elements
    TopK,
    QuantizePerTensor,
    QuantizePerChannel,
    /// An all-reduce, and the gradient noise scale
    NoiseScale,
    /// Parameters are averaged every 4 steps
    PostLocalSgd,
    /// An exchange every 100 steps
    Diloco,
    /// Four fragments in 8 bits, exchanged beside training
    StreamingDiloco,
}

pub fn run(options: &Options) -> Result<()> {
    let group = ProcessGroup::from_env()?;
    tch::set_num_threads(1);
    let (train, test) = Images::load(&fashion::default_folder(), Pixels::Standardized)?;
    let mut training = Training::new(options, &group)?;
    training.run(&train, WARM_UP)?;
    group.barrier()?;
    let sent_before = bytes_sent()?;
    let start = Instant::now();
    training.run(&train, options.steps)?;
    let seconds = start.elapsed().as_secs_f64();
    let sent = bytes_sent()? - sent_before;
    if let Some(diloco) = &mut training.diloco {
        diloco.synchronize()?;
    }
    let accuracy = options.accuracy.then(|| accuracy(&training, &test, &group)).transpose()?;
    if group.rank() == 0 {
        let way = options.way.to_possible_value().context("a way has a name")?;
        let way = way.get_name();
        let ms = seconds * 1e3 / options.steps as f64;
        let kib = sent as f64 / 1024.0 / options.steps as f64;
        if options.json {
            let line = json!({
                "bench": "comm_hooks", "way": way, "ranks": group.world_size(),
                "steps": options.steps, "ms": ms, "kib": kib, "accuracy": accuracy,
            });
            println!("{line}");
        } else {
            let learnt =
                accuracy.map_or(String::new(), |part| format!(", {:.2} % right", 100.0 * part));
            println!("{way}: {ms:.2} ms a step, {kib:.1} KiB sent to other machines{learnt}");
        }
    }
    Ok(())
}

struct Training {
    vs: nn::VarStore,
    model: Box<dyn ModuleT>,
    optimizer: nn::Optimizer,
    sampler: DistributedSampler,
    averager: Option<ModelAverager>,
    diloco: Option<DiLoCo>,
}

impl Training {
    fn new(options: &Options, group: &ProcessGroup) -> Result<Self> {
        let Options { way, lr, .. } = *options;
        tch::manual_seed(0);
        let vs = nn::VarStore::new(Device::Cpu);
        let net = Model::Lenet.build(&vs.root());
        let mut averager = None;
        let mut diloco = None;
        let builder = Ddp::builder(group);
        let model: Box<dyn ModuleT> = match way {
            Way::AllReduce => Box::new(builder.wrap(net, &vs)?),
            Way::Fp16 => Box::new(builder.comm_hook(Fp16Compress).wrap(net, &vs)?),
            Way::Bf16 => Box::new(builder.comm_hook(Bf16Compress).wrap(net, &vs)?),
            Way::PowerSgd => {
                Box::new(builder.comm_hook(PowerSgd::new(2).start_iter(WARM_UP)).wrap(net, &vs)?)
            }
            Way::BatchedPowerSgd => {
                let hook = PowerSgd::new(8).batched(true).start_iter(WARM_UP);
                Box::new(builder.comm_hook(hook).wrap(net, &vs)?)
            }
            Way::TopK => Box::new(builder.comm_hook(TopK::new(0.01)).wrap(net, &vs)?),
            Way::QuantizePerTensor => {
                Box::new(builder.comm_hook(Quantize::per_tensor()).wrap(net, &vs)?)
            }
            Way::QuantizePerChannel => {
                Box::new(builder.comm_hook(Quantize::per_channel(512)).wrap(net, &vs)?)
            }
            Way::NoiseScale => {
                let hook = NoiseScale::new(BATCH as u64).around(AllReduce);
                Box::new(builder.comm_hook(hook).wrap(net, &vs)?)
            }
            Way::PostLocalSgd => {
                averager = Some(ModelAverager::periodic(group, PERIOD, WARM_UP)?);
                let alone = group.split(Some(group.rank()), 0)?.context("a group of this rank")?;
                let hook = PostLocalSgd::new(&alone)?.start_iter(WARM_UP);
                Box::new(builder.comm_hook(hook.gradient_all_reduce(false)).wrap(net, &vs)?)
            }
            Way::Diloco | Way::StreamingDiloco => {
                diloco = Some(self::diloco(way == Way::StreamingDiloco, &vs, group)?);
                Box::new(net)
            }
        };
        let optimizer = nn::sgd(MOMENTUM, 0.0, 0.0, false).build(&vs, lr)?;
        let sampler = DistributedSampler::new(60_000, group);
        Ok(Self { vs, model, optimizer, sampler, averager, diloco })
    }

    /// Trains so many steps, in as many epochs as these take.
    fn run(&mut self, train: &Arc<Images>, mut steps: u64) -> Result<()> {
        while steps > 0 {
            let loader = DataLoader::new(train, &self.sampler, BATCH);
            for batch in loader.into_iter().take(steps as usize) {
                let (images, labels) = batch?;
                let logits = self.model.forward_t(&images, true);
                self.optimizer.try_backward_step(&logits.cross_entropy_for_logits(&labels))?;
                if let Some(averager) = &mut self.averager {
                    averager.average_parameters(&self.vs)?;
                }
                if let Some(diloco) = &mut self.diloco {
                    diloco.step()?;
                }
                steps -= 1;
            }
            self.sampler.set_epoch(self.sampler.epoch() + 1);
        }
        Ok(())
    }
}

fn diloco(streams: bool, vs: &nn::VarStore, group: &ProcessGroup) -> Result<DiLoCo> {
    let mut options = DiLoCoOptions { sync_every: SYNC_EVERY, ..Default::default() };
    if streams {
        options.fragments = 4;
        options.fragment_sync_delay = SYNC_EVERY * 3 / 4;
        options.fragment_update_alpha = 0.5;
        options.should_quantize = true;
    }
    Ok(DiLoCo::new(vs, group, nn::sgd(OUTER_MOMENTUM, 0.0, 0.0, true), 0.7, options)?)
}

/// Returns the share of test images that the model classifies rightly.
fn accuracy(training: &Training, images: &Arc<Images>, group: &ProcessGroup) -> Result<f64> {
    let _no_grad = tch::no_grad_guard();
    let sampler = DistributedSampler::new(images.len(), group).shuffle(false).pad(false);
    let mut right = [0];
    for batch in DataLoader::new(images, &sampler, 250) {
        let (images, labels) = batch?;
        let classes = training.model.forward_t(&images, false).argmax(1, false);
        right[0] += classes.eq_tensor(&labels).sum(Kind::Int64).int64_value(&[]);
    }
    group.all_reduce(&mut right, ReduceOp::Sum)?;
    Ok(right[0] as f64 / images.len() as f64)
}

/// Returns the bytes that this machine has sent so far, but for those to itself.
fn bytes_sent() -> Result<u64> {
    let table = fs::read_to_string("/proc/net/dev").context("/proc/net/dev")?;
    let mut sum = 0;
    for line in table.lines().skip(2) {
        let (interface, counters) =
            line.split_once(':').context("an interface in /proc/net/dev")?;
        if interface.trim() != "lo" {
            let sent = counters.split_whitespace().nth(8).context("bytes in /proc/net/dev")?;
            sum += sent.parse::<u64>()?;
        }
    }
    Ok(sum)
}
