//! The options of trainings on images, and those that only `mnist` has.

use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::{Args, Parser};
use flow::prelude::*;

use crate::images::Images;

/// The options of a training.
#[derive(Args)]
pub struct Training {
    /// How often all images are seen
    #[arg(long, value_name = "N", default_value = "2")]
    pub epochs: NonZeroUsize,
    /// Images per rank and step
    #[arg(long, value_name = "N", default_value = "50")]
    pub batch_size: NonZeroUsize,
    /// Highest learning rate, reached after a fifth of all steps
    #[arg(long, value_name = "RATE", default_value = "0.08")]
    #[arg(value_parser = from_zero_up, allow_hyphen_values = true)]
    pub lr: f64,
    /// Momentum of the gradient descent
    #[arg(long, value_name = "M", default_value = "0.9")]
    #[arg(value_parser = from_zero_up, allow_hyphen_values = true)]
    pub momentum: f64,
    /// Seed of the first weights and of the images' order
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u32,
    /// Stop after so many steps
    #[arg(long, value_name = "N")]
    pub steps: Option<usize>,
    /// cpu, or cuda: a GPU for each rank
    #[arg(long, default_value = "cpu")]
    pub device: DeviceKind,
    /// Threads per rank that load images
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub workers: usize,
    /// File for the loss of each step, the mean over all ranks, a line each
    #[arg(long, value_name = "FILE")]
    pub losses: Option<PathBuf>,
}

impl Training {
    /// Returns the learning rate of a step: up in a straight line during the first fifth of all
    /// steps, then down.
    pub fn lr_at(&self, step: usize, steps: usize) -> f64 {
        let place = (step + 1) as f64 / (steps + 1) as f64;
        self.lr * (5.0 * place).min(1.25 * (1.0 - place))
    }
}

/// Writes the losses of all steps into a file, if there is one, a line each. Rank 0 calls this,
/// first with nothing: an error comes now, rather than when all the work is done.
///
/// # Errors
/// When the file cannot be written.
pub fn write_losses(file: Option<&Path>, losses: &[String]) -> Result<()> {
    let Some(file) = file else { return Ok(()) };
    let lines: String = losses.iter().map(|loss| format!("{loss}\n")).collect();
    fs::write(file, lines).with_context(|| format!("cannot write {}", file.display()))
}

/// Trains LeNet on Fashion-MNIST.
#[derive(Parser)]
pub struct Options {
    /// Folder with the data set's four IDX files, gzipped or not [default: Debian's
    /// dataset-fashion-mnist]
    #[arg(long, value_name = "DIR")]
    pub data: Option<PathBuf>,
    /// Of any training
    #[command(flatten)]
    pub training: Training,
    /// Compute in double precision, to compare trainings: what rounding makes of two then stays
    /// small
    #[arg(long)]
    pub double: bool,
    /// File for the trained weights, such as weights.safetensors
    #[arg(long, value_name = "FILE")]
    pub save: Option<PathBuf>,
    /// Folder for checkpoints: training resumes from the latest one there
    #[arg(long, value_name = "DIR")]
    pub checkpoint: Option<PathBuf>,
    /// Steps from one checkpoint to the next; there is also one at the end of each epoch
    #[arg(long, value_name = "N", default_value = "100")]
    pub checkpoint_every: NonZeroUsize,
}

impl Options {
    /// Returns the options and data that the trained weights depend on, beside what the sampler
    /// keeps.
    pub fn hyperparameters(&self, train: &Images) -> Vec<(String, String)> {
        let Self {
            double, training: Training { epochs, batch_size, lr, momentum, steps, .. }, ..
        } = self;
        let checksum = format!("{:08x}", train.checksum());
        let steps = steps.map_or("all".to_owned(), |steps| steps.to_string());
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

    /// Checks that a checkpoint was made with the same hyperparameters as are given here.
    ///
    /// # Errors
    /// When one differs.
    pub fn check_hyperparameters(
        saved: &[(String, String)],
        here: &[(String, String)],
    ) -> Result<()> {
        for ((name, saved), (_, here)) in saved.iter().zip(here) {
            ensure!(
                saved == here,
                "the checkpoint was made with {name} {saved}, not {here}; use that, or another \
                 folder"
            );
        }
        Ok(())
    }
}

pub(crate) fn from_zero_up(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| number.is_finite() && *number >= 0.0);
    number.ok_or_else(|| "it should be a number from 0 up".into())
}
