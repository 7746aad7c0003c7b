//! The options of the program.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::{Parser, ValueEnum};

/// Trains LeNet on Fashion-MNIST, or a GPT on a text, while ranks are lost and others come.
#[derive(Parser)]
pub struct Options {
    /// What is trained
    #[arg(long, default_value = "lenet")]
    pub model: Model,
    /// Folder with the data set's four IDX files, gzipped or not [default: Debian's
    /// dataset-fashion-mnist]
    #[arg(long, value_name = "DIR")]
    pub data: Option<PathBuf>,
    /// The GPT's text, which may be gzipped [default: that of `scripts/setup --data`]
    #[arg(long, value_name = "FILE")]
    pub text: Option<PathBuf>,
    /// Width of the GPT's activations, in heads of 32
    #[arg(long, value_name = "N", default_value_t = 64)]
    #[arg(value_parser = multiple_of_a_head)]
    pub width: i64,
    /// Parts of each step, which the ranks share: not fewer than ranks
    #[arg(long, value_name = "V", default_value = "4")]
    pub virtual_ranks: NonZeroUsize,
    /// Samples per part and step
    #[arg(long, value_name = "N", default_value = "25")]
    pub batch_size: NonZeroUsize,
    /// How often all samples are seen
    #[arg(long, value_name = "N", default_value = "2")]
    pub epochs: NonZeroUsize,
    /// Steps, if not all
    #[arg(long, value_name = "N")]
    pub steps: Option<usize>,
    /// The training ends when this file is there
    #[arg(long, value_name = "FILE")]
    pub until: Option<PathBuf>,
    /// Learning rate [default: 0.02, and 0.001 of the GPT]
    #[arg(long, value_name = "RATE")]
    pub lr: Option<f64>,
    /// Seed of the first weights and of the samples' order
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u32,
    /// Folder for checkpoints, from which a job goes on when all its ranks have started again
    #[arg(long, value_name = "DIR")]
    pub checkpoint: Option<PathBuf>,
    /// Steps from one checkpoint to the next
    #[arg(long, value_name = "N", default_value = "20")]
    pub checkpoint_every: NonZeroUsize,
    /// File for the trained weights, such as weights.safetensors
    #[arg(long, value_name = "FILE")]
    pub save: Option<PathBuf>,
    /// File for the loss of each step, a line each
    #[arg(long, value_name = "FILE")]
    pub losses: Option<PathBuf>,
    /// File that each rank appends to after each step: the time, the step, its process, the
    /// number of ranks, and of groups that it has been in
    #[arg(long, value_name = "FILE")]
    pub journal: Option<PathBuf>,
}

/// What is trained.
#[derive(Clone, Copy, ValueEnum)]
pub enum Model {
    /// LeNet on Fashion-MNIST
    Lenet,
    /// A GPT of two blocks, on the bytes of a text
    Gpt,
}

/// The width of a head of attention.
pub const HEAD: i64 = 32;

fn multiple_of_a_head(text: &str) -> Result<i64, String> {
    let width = text.parse().ok().filter(|width: &i64| *width > 0 && width % HEAD == 0);
    width.ok_or_else(|| format!("it should be a multiple of {HEAD}"))
}
