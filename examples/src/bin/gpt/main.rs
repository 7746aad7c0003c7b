//! A GPT that learns a text, by any combination of data, tensor and pipeline parallelism.
//!
//!     scripts/setup --data
//!     flow-launch --nproc_per_node 8 gpt --dp 2 --tp 2 --pp 2 --micro-batches 4
//!
//! | file | what |
//! |---|---|
//! | `job.rs` | a rank's part of the job |
//! | `options.rs` | options, and the mesh of ranks |
//! | `data.rs` | the text |
//! | `model.rs` | the model of a stage |
//! | `train.rs` | the training |
//! | `memory.rs` | a rank's memory, by what it is for |
//! | `sample.rs` | text that a trained model makes |
//!
//! The losses of a training are those of one rank on each layout, but for rounding. First weights,
//! samples and dropout do not depend on the layout.

mod data;
mod job;
mod memory;
mod model;
mod options;
mod sample;
mod train;

use std::process::ExitCode;

use anyhow::{Result, ensure};
use flow::global::checkpoint::ShardedCheckpoints;
use flow::prelude::{ProcessGroup, TensorCollectives};
use flow_examples::program;

use job::Job;
pub use options::Options;

fn main() -> ExitCode {
    program::run("gpt", |options: &Options| run(options, &ProcessGroup::from_env()?))
}

/// Trains or samples, as a rank of this group.
pub fn run(options: &Options, group: &ProcessGroup) -> Result<()> {
    group.use_device(options.device)?;
    let mut job = Job::new(options, group)?;
    let folder = options.checkpoint.as_ref();
    if let (Some(_), Some(folder)) = (&options.sample, folder) {
        ensure!(folder.is_dir(), "there is no folder {} of checkpoints", folder.display());
    }
    let mut checkpoints =
        folder.map(|folder| ShardedCheckpoints::open(folder, group)).transpose()?;
    let latest = checkpoints.as_mut().map(ShardedCheckpoints::latest).transpose()?.flatten();
    match &options.sample {
        Some(prompt) => sample::print(&mut job, latest.as_ref(), prompt),
        None => train::train(&mut job, checkpoints, latest),
    }
}
