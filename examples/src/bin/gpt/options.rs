//! Options, and the mesh that they ask for.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use anyhow::{Result, ensure};
use clap::builder::PossibleValuesParser;
use clap::{Parser, ValueEnum};
use flow::plan::schedule::ScheduleKind;
use flow::prelude::*;

use super::model::Config;

/// Trains a GPT on text, on any data x tensor x pipeline parallel layout of ranks, or continues a
/// text.
#[derive(Parser)]
#[command(args_override_self = true)]
pub struct Options {
    /// Data parallel ranks [default: all that --tp and --pp leave]
    #[arg(long, value_name = "N")]
    pub dp: Option<NonZeroUsize>,
    /// Tensor parallel ranks
    #[arg(long, value_name = "N", default_value = "1")]
    pub tp: NonZeroUsize,
    /// Pipeline parallel ranks
    #[arg(long, value_name = "N", default_value = "1")]
    pub pp: NonZeroUsize,
    /// Schedule of the pipeline: docs/pipelines.md
    #[arg(long, value_name = "NAME", default_value = "1f1b")]
    #[arg(value_parser = PossibleValuesParser::new(ScheduleKind::ALL.map(ScheduleKind::name)))]
    pub schedule: String,
    /// Stages of each rank with --schedule interleaved
    #[arg(long, value_name = "N", default_value = "2")]
    pub chunks: NonZeroUsize,
    /// Blocks
    #[arg(long, value_name = "N", default_value_t = 4)]
    #[arg(value_parser = clap::value_parser!(i64).range(1..))]
    pub layers: i64,
    /// Width of an activation
    #[arg(long, value_name = "N", default_value_t = 128)]
    #[arg(value_parser = clap::value_parser!(i64).range(1..))]
    pub width: i64,
    /// Heads of attention: they divide the width, and --tp divides them
    #[arg(long, value_name = "N", default_value_t = 4)]
    #[arg(value_parser = clap::value_parser!(i64).range(1..))]
    pub heads: i64,
    /// Bytes that a prediction may look at
    #[arg(long, value_name = "N", default_value_t = 128)]
    #[arg(value_parser = clap::value_parser!(i64).range(1..))]
    pub context: i64,
    /// Probability that dropout sets a number to 0
    #[arg(long, value_name = "P", default_value_t = 0.0, value_parser = probability)]
    pub dropout: f64,
    /// Samples per step, of all ranks
    #[arg(long, value_name = "N", default_value_t = 32)]
    #[arg(value_parser = clap::value_parser!(i64).range(1..))]
    pub batch_size: i64,
    /// Parts of a batch that go through the model one after the other
    #[arg(long, value_name = "N", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(i64).range(1..))]
    pub micro_batches: i64,
    /// Steps of the training: a training that goes on may be given more
    #[arg(long, value_name = "N", default_value_t = 1000)]
    pub steps: u64,
    /// Steps until the learning rate has fallen to a tenth of --lr, where it stays [default: --steps]
    #[arg(long, value_name = "N")]
    pub lr_decay_steps: Option<u64>,
    /// Stop after this step, with a checkpoint: the same command goes on
    #[arg(long, value_name = "N")]
    pub stop_after: Option<u64>,
    /// Highest learning rate, after a tenth of --lr-decay-steps
    #[arg(long, value_name = "RATE", default_value_t = 1e-3, value_parser = positive)]
    pub lr: f64,
    /// Greatest norm of the gradients
    #[arg(long, value_name = "NORM", default_value_t = 1.0, value_parser = positive)]
    pub clip: f64,
    /// Seed of first weights, samples and dropout
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Type of parameters and activations. The optimizer of bf16 parameters works in f32
    #[arg(long, default_value = "f32")]
    pub dtype: Dtype,
    /// Compute the activations of blocks again in backward, instead of keeping them
    #[arg(long)]
    pub recompute: bool,
    /// Data parallel ranks of a machine have one copy of the parameters in common, and each changes
    /// its part
    #[arg(long)]
    pub fsdp: bool,
    /// cpu, or cuda: a GPU for each rank
    #[arg(long, default_value = "cpu")]
    pub device: DeviceKind,
    /// The text, which may be gzipped [default: that of `scripts/setup --data`]
    #[arg(long, value_name = "FILE")]
    pub text: Option<PathBuf>,
    /// Folder for checkpoints: training goes on from the latest one there, on any layout
    #[arg(long, value_name = "DIR")]
    pub checkpoint: Option<PathBuf>,
    /// Steps from one checkpoint to the next; there is also one at the end
    #[arg(long, value_name = "N", default_value = "500")]
    pub checkpoint_every: NonZeroUsize,
    /// Hold out the last twentieth of the text, and print its loss after every N steps and the last
    #[arg(long, value_name = "N")]
    pub validate_every: Option<NonZeroUsize>,
    /// File for the loss of each step, a line each
    #[arg(long, value_name = "FILE")]
    pub losses: Option<PathBuf>,
    /// Print how the model of --checkpoint goes on with this text, and train nothing
    #[arg(long, value_name = "TEXT", requires = "checkpoint")]
    pub sample: Option<String>,
    /// Bytes to print after it
    #[arg(long, value_name = "N", default_value_t = 500)]
    pub sample_bytes: usize,
    /// Below 1 likely bytes become likelier
    #[arg(long, value_name = "T", default_value_t = 0.8, value_parser = positive)]
    pub temperature: f64,
}

/// Hyperparameters that a sample depends on.
pub const SIZES: usize = 5;

/// Types of parameters.
#[derive(Clone, Copy, ValueEnum)]
pub enum Dtype {
    /// Single precision
    F32,
    /// Half precision, with f32's exponents
    Bf16,
    /// Double precision, to compare trainings
    F64,
}

impl Dtype {
    /// Returns torch's kind.
    pub fn kind(self) -> Kind {
        match self {
            Self::F32 => Kind::Float,
            Self::Bf16 => Kind::BFloat16,
            Self::F64 => Kind::Double,
        }
    }
}

fn positive(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| number.is_finite() && *number > 0.0);
    number.ok_or_else(|| "it should be a number above 0".into())
}

fn probability(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| (0.0..1.0).contains(number));
    number.ok_or_else(|| "it should be a number from 0 up, below 1".into())
}

impl Options {
    /// Returns the sizes of the model, which has so many stages.
    pub fn config(&self, stages: usize) -> Result<Config> {
        let &Self { layers, width, heads, context, dropout, seed, recompute, .. } = self;
        let tp = self.tp.get() as i64;
        ensure!(width % heads == 0, "--heads {heads} does not divide --width {width}");
        ensure!(heads % tp == 0, "--tp {tp} does not divide --heads {heads}");
        ensure!(context >= tp, "--tp {tp} needs as large a --context, and it is {context}");
        ensure!(
            layers + 2 >= stages as i64,
            "{stages} stages are more than embedding, --layers {layers} and head"
        );
        Ok(Config { layers, width, heads, context, dropout, seed, recompute })
    }

    /// Returns the schedule of the pipeline. `--sample` runs a single micro-batch.
    pub fn schedule(&self) -> Result<Schedule> {
        let batch = self.batch_size;
        let parts = self.micro_batches;
        ensure!(batch % parts == 0, "--micro-batches {parts} does not divide --batch-size {batch}");
        let parts = if self.sample.is_some() { 1 } else { parts as usize };
        Ok(Schedule::named(&self.schedule, self.pp.get(), self.chunks.get(), parts)?)
    }

    /// Returns all ranks, with the axes `pp`, `dp` and `tp`: tensor parallel ranks are neighbours,
    /// as they move the most.
    pub fn mesh(&self, group: &ProcessGroup) -> Result<Mesh> {
        let tp = self.tp.get();
        let pp = self.pp.get();
        let size = group.world_size();
        let dp = self.dp.map_or_else(|| (size / (tp * pp)).max(1), NonZeroUsize::get);
        ensure!(
            dp * tp * pp == size,
            "--dp {dp} --tp {tp} --pp {pp} are {} ranks, and there are {size}",
            dp * tp * pp
        );
        let ranks: Vec<usize> = (0..size).collect();
        Ok(Mesh::new(group, &ranks, &[pp, dp, tp])?.with_names(&["pp", "dp", "tp"])?)
    }

    /// Returns the steps until the learning rate is at its lowest.
    pub fn lr_decay_steps(&self) -> u64 {
        self.lr_decay_steps.unwrap_or(self.steps)
    }

    /// Returns the options and the text that the trained weights depend on, beside the steps; first
    /// the model's [`SIZES`].
    pub fn hyperparameters(&self, checksum: u32) -> Vec<(String, String)> {
        let kind = format!("{:?}", self.dtype.kind());
        let held_out = self.validate_every.is_some();
        let options: [(&str, &dyn ToString); 13] = [
            ("--layers", &self.layers),
            ("--width", &self.width),
            ("--heads", &self.heads),
            ("--context", &self.context),
            ("parameters of", &kind),
            ("--dropout", &self.dropout),
            ("--batch-size", &self.batch_size),
            ("--micro-batches", &self.micro_batches),
            ("--lr", &self.lr),
            ("--clip", &self.clip),
            ("--seed", &self.seed),
            ("a text of checksum", &checksum),
            ("a part of the text held out (--validate-every):", &held_out),
        ];
        options.map(|(name, value)| (name.to_owned(), value.to_string())).to_vec()
    }
}
