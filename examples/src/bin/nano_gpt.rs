//! A GPT in one file: the data, the model, and a data parallel training.
//!
//!     scripts/setup --data
//!     nano_gpt                                     # alone
//!     flow-launch --nproc_per_node 2 nano_gpt      # the same training by two ranks
//!
//! The model is GPT-2's (Radford et al., Language Models are Unsupervised Multitask Learners, 2019),
//! and learns a text byte by byte. Only the lines about `group` and `Ddp` are there for more than one
//! rank. The program `gpt` trains such a model by tensor and pipeline parallelism, too, and with
//! checkpoints.

use std::io::{Write, stdout};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Result, ensure};
use clap::Parser;
use flow::prelude::*;
use flow_examples::options::write_losses;
use flow_examples::{program, text};
use tch::nn::Init;

/// Trains a GPT on text.
#[derive(Parser)]
struct Options {
    /// The text, which may be gzipped [default: that of `scripts/setup --data`]
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Blocks
    #[arg(long, value_name = "N", default_value_t = 4)]
    #[arg(value_parser = clap::value_parser!(i64).range(1..))]
    layers: i64,
    /// Width of an activation
    #[arg(long, value_name = "N", default_value_t = 128)]
    #[arg(value_parser = clap::value_parser!(i64).range(1..))]
    width: i64,
    /// Heads of attention
    #[arg(long, value_name = "N", default_value_t = 4)]
    #[arg(value_parser = clap::value_parser!(i64).range(1..))]
    heads: i64,
    /// Bytes that a prediction may look at
    #[arg(long, value_name = "N", default_value_t = 128)]
    #[arg(value_parser = clap::value_parser!(i64).range(1..))]
    context: i64,
    /// Samples per step, of all ranks
    #[arg(long, value_name = "N", default_value_t = 32)]
    #[arg(value_parser = clap::value_parser!(i64).range(1..))]
    batch_size: i64,
    /// Steps of the training
    #[arg(long, value_name = "N", default_value_t = 1000)]
    steps: usize,
    /// Highest learning rate, after a tenth of the steps
    #[arg(long, value_name = "RATE", default_value_t = 1e-3)]
    lr: f64,
    /// Greatest norm of the gradients
    #[arg(long, value_name = "NORM", default_value_t = 1.0)]
    clip: f64,
    /// Seed of first weights and samples
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u32,
    /// cpu, or cuda: a GPU for each rank
    #[arg(long, default_value = "cpu")]
    device: DeviceKind,
    /// Compute in double precision, to compare trainings
    #[arg(long)]
    double: bool,
    /// File for the loss of each step, a line each
    #[arg(long, value_name = "FILE")]
    losses: Option<PathBuf>,
    /// Print how the trained model goes on with this text
    #[arg(long, value_name = "TEXT")]
    sample: Option<String>,
    /// Bytes to print after it
    #[arg(long, value_name = "N", default_value_t = 500)]
    sample_bytes: usize,
}

/// Tokens are bytes.
const VOCABULARY: i64 = 256;
/// The last part of the text, one of so many, which is not trained on.
const HELD_OUT: i64 = 20;
/// Steps from one report to the next.
const REPORT: usize = 50;

fn main() -> ExitCode {
    program::run("nano_gpt", train)
}

fn train(options: &Options) -> Result<()> {
    let group = ProcessGroup::from_env()?; // ranks from flow-launch; alone: world size 1
    let device = group.use_device(options.device)?;
    let ranks = group.world_size() as i64;
    let is_first = group.rank() == 0;
    let Options { batch_size, width, heads, .. } = *options;
    ensure!(batch_size % ranks == 0, "{ranks} ranks do not divide --batch-size {batch_size}");
    ensure!(width % heads == 0, "--heads {heads} does not divide --width {width}");
    if is_first {
        write_losses(options.losses.as_deref(), &[])?;
    }
    let (text, held_out) = load(options)?;

    // All ranks have the same random numbers: they draw the same samples, and each takes its part.
    tch::manual_seed(options.seed.into());
    let mut vs = nn::VarStore::new(Device::Cpu);
    let net = Gpt::new(&vs.root(), options);
    vs.set_device(device);
    if options.double {
        vs.set_kind(Kind::Double);
    }
    let model = Ddp::new(net, &vs, &group)?;
    let adam = nn::AdamW { wd: 0.1, beta2: 0.99, ..Default::default() };
    let mut optimizer = adam.build(&vs, options.lr)?;

    let mut losses = Vec::new();
    let start = Instant::now();
    for step in 1..=options.steps {
        let (inputs, targets) = batch(&text, options, &group);
        optimizer.set_lr(rate(options, step));
        optimizer.zero_grad();
        let loss = cross_entropy(&model.forward(&inputs), &targets);
        // The gradients are averaged over the ranks in here.
        loss.f_backward().map_err(flow::ddp::Error::from_backward)?;
        optimizer.clip_grad_norm(options.clip);
        optimizer.step();

        let loss = mean_over_ranks(&group, &loss)?;
        losses.push(loss.to_string());
        if is_first && (step % REPORT == 0 || step == options.steps) {
            let ms = 1e3 * start.elapsed().as_secs_f64() / step as f64;
            println!("step {step}/{}: loss {loss:.4}, {ms:.0} ms a step", options.steps);
        }
    }
    let loss = validate(&model, &held_out, options)?;
    if is_first {
        println!("loss of the text that was held out: {loss:.4}");
        write_losses(options.losses.as_deref(), &losses)?;
        if let Some(prompt) = &options.sample {
            go_on_with(prompt, &model, options, device)?;
        }
    }
    Ok(())
}

/// Returns the learning rate of a step: up in a straight line, then down along half a cosine to a
/// tenth.
fn rate(options: &Options, step: usize) -> f64 {
    let warm_up = options.steps / 10;
    if step <= warm_up {
        return options.lr * step as f64 / warm_up as f64;
    }
    let progress = (step - warm_up) as f64 / (options.steps - warm_up) as f64;
    let cosine = 0.5 * (1.0 + (std::f64::consts::PI * progress).cos());
    options.lr * (0.1 + 0.9 * cosine)
}

fn mean_over_ranks(group: &ProcessGroup, loss: &Tensor) -> Result<f64> {
    let mut mean = [loss.double_value(&[])];
    group.all_reduce(&mut mean, ReduceOp::Avg)?;
    Ok(mean[0])
}

/// Reads the text: the part to train on, and the part that is held out.
fn load(options: &Options) -> Result<(Tensor, Tensor)> {
    let text = Tensor::from_slice(&text::read(options.text.as_deref())?);
    let length = text.size()[0];
    let held_out = length / HELD_OUT;
    ensure!(
        held_out > options.context,
        "the text has {length} bytes: a part of {HELD_OUT} must be longer than --context {}",
        options.context
    );
    Ok((text.narrow(0, 0, length - held_out), text.narrow(0, length - held_out, held_out)))
}

/// Draws the samples of a step, and returns this rank's: its bytes, and the bytes after each.
fn batch(text: &Tensor, options: &Options, group: &ProcessGroup) -> (Tensor, Tensor) {
    let places = Tensor::randint(
        text.size()[0] - options.context,
        [options.batch_size],
        (Kind::Int64, Device::Cpu),
    );
    let samples = options.batch_size / group.world_size() as i64;
    let of_this_rank = places.narrow(0, group.rank() as i64 * samples, samples);
    pieces(text, &of_this_rank, options.context, group.device())
}

/// Returns the pieces of the text that begin at these places, and the same one byte further on.
fn pieces(text: &Tensor, places: &Tensor, context: i64, device: Device) -> (Tensor, Tensor) {
    let offsets = Tensor::arange(context + 1, (Kind::Int64, Device::Cpu));
    let pieces = text.take(&(places.unsqueeze(1) + offsets)).to_kind(Kind::Int64).to(device);
    (pieces.narrow(1, 0, context), pieces.narrow(1, 1, context))
}

/// Returns the mean loss in nats a byte, in the precision of the logits. (tch's
/// `cross_entropy_for_logits` always takes single precision.)
fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Tensor {
    let likely = logits.log_softmax(-1, logits.kind());
    likely.view([-1, VOCABULARY]).nll_loss(&targets.reshape([-1]))
}

/// Returns the mean loss of a text, cut into pieces that ranks take in turn.
fn validate(model: &Ddp<Gpt>, text: &Tensor, options: &Options) -> Result<f64> {
    let _no_grad = tch::no_grad_guard();
    let group = model.group();
    let pieces_of_text = (text.size()[0] - 1) / options.context;
    let mut sum_and_count = [0.0, 0.0];
    for piece in (0..pieces_of_text).skip(group.rank()).step_by(group.world_size()) {
        let place = Tensor::from_slice(&[piece * options.context]);
        let (inputs, targets) = pieces(text, &place, options.context, group.device());
        let logits = model.forward_t(&inputs, false);
        sum_and_count[0] += cross_entropy(&logits, &targets).double_value(&[]);
        sum_and_count[1] += 1.0;
    }
    group.all_reduce(&mut sum_and_count, ReduceOp::Sum)?;
    Ok(sum_and_count[0] / sum_and_count[1])
}

/// Prints the prompt, and byte after byte what the model draws to follow.
fn go_on_with(prompt: &str, model: &Ddp<Gpt>, options: &Options, device: Device) -> Result<()> {
    ensure!(!prompt.is_empty(), "--sample needs some text to go on with");
    let _no_grad = tch::no_grad_guard();
    let mut bytes = prompt.as_bytes().to_vec();
    for _ in 0..options.sample_bytes {
        let seen = &bytes[bytes.len().saturating_sub(options.context as usize)..];
        let tokens = Tensor::from_slice(seen).to_kind(Kind::Int64).unsqueeze(0).to(device);
        let logits = model.forward_t(&tokens, false).select(0, 0).select(0, -1);
        let likely = logits.softmax(-1, Kind::Double);
        bytes.push(likely.multinomial(1, false).int64_value(&[0]) as u8);
    }
    bytes.push(b'\n');
    stdout().write_all(&bytes)?;
    Ok(())
}

#[derive(Debug)]
struct Gpt {
    tokens: nn::Embedding,
    positions: nn::Embedding,
    blocks: Vec<Block>,
    norm: nn::LayerNorm,
}

impl Gpt {
    fn new(path: &nn::Path, options: &Options) -> Self {
        let Options { layers, width, context, .. } = *options;
        let config = nn::EmbeddingConfig { ws_init: randn(0.02), ..Default::default() };
        Self {
            tokens: nn::embedding(path / "tokens", VOCABULARY, width, config),
            positions: nn::embedding(path / "positions", context, width, config),
            blocks: (0..layers).map(|n| Block::new(&(path / "blocks" / n), options)).collect(),
            norm: nn::layer_norm(path / "norm", vec![width], Default::default()),
        }
    }
}

impl Module for Gpt {
    /// Maps tokens, samples x context, to the logits of what follows each: samples x context x 256.
    fn forward(&self, tokens: &Tensor) -> Tensor {
        let positions = Tensor::arange(tokens.size()[1], (Kind::Int64, tokens.device()));
        let mut x = tokens.apply(&self.tokens) + positions.apply(&self.positions);
        for block in &self.blocks {
            x = x.apply(block);
        }
        // The logits have the embedding's weights.
        x.apply(&self.norm).matmul(&self.tokens.ws.tr())
    }
}

#[derive(Debug)]
struct Block {
    heads: i64,
    norm1: nn::LayerNorm,
    qkv: nn::Linear,
    projection: nn::Linear,
    norm2: nn::LayerNorm,
    up: nn::Linear,
    down: nn::Linear,
}

impl Block {
    fn new(path: &nn::Path, options: &Options) -> Self {
        let Options { layers, width, heads, .. } = *options;
        let zeros = Some(Init::Const(0.0));
        let inner = nn::LinearConfig { ws_init: randn(0.02), bs_init: zeros, bias: true };
        // What blocks add up to does not grow with their number.
        let last =
            nn::LinearConfig { ws_init: randn(0.02 / (2.0 * layers as f64).sqrt()), ..inner };
        Self {
            heads,
            norm1: nn::layer_norm(path / "norm1", vec![width], Default::default()),
            qkv: nn::linear(path / "qkv", width, 3 * width, inner),
            projection: nn::linear(path / "projection", width, width, last),
            norm2: nn::layer_norm(path / "norm2", vec![width], Default::default()),
            up: nn::linear(path / "up", width, 4 * width, inner),
            down: nn::linear(path / "down", 4 * width, width, last),
        }
    }

    /// Causal attention: each token looks at those before it and at itself.
    fn attention(&self, x: &Tensor) -> Tensor {
        let size = x.size(); // samples x tokens x width
        let heads = [size[0], size[1], self.heads, size[2] / self.heads];
        let qkv = x.apply(&self.qkv).chunk(3, -1);
        let [q, k, v] = [0, 1, 2].map(|part| qkv[part].view(heads).transpose(1, 2));
        let none = None::<&Tensor>;
        let y = Tensor::scaled_dot_product_attention(&q, &k, &v, none, 0.0, true, None, false);
        y.transpose(1, 2).reshape(&size[..]).apply(&self.projection)
    }

    fn mlp(&self, x: &Tensor) -> Tensor {
        x.apply(&self.up).gelu("tanh").apply(&self.down)
    }
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> Tensor {
        let x = x + self.attention(&x.apply(&self.norm1));
        &x + self.mlp(&x.apply(&self.norm2))
    }
}

fn randn(stdev: f64) -> Init {
    Init::Randn { mean: 0.0, stdev }
}
