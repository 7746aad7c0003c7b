//! Benches that train in blocks of several kinds take turns in the same way.

use anyhow::Result;
use clap::Args;
use flow_ddp::{ProcessGroup, TensorCollectives};
use tch::{Kind, Tensor};

use crate::models::Model;
use crate::timing::{block, median, milliseconds};

/// So small that weights, on which times depend, stay alike.
pub const LEARNING_RATE: f64 = 1e-6;

#[derive(Args)]
pub struct Options {
    #[arg(long, value_enum, default_value = "mobilenet")]
    pub model: Model,
    /// Blocks of each, in turn
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    pub blocks: u32,
    /// Steps in each block
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub steps: u32,
    /// Print a JSON line
    #[arg(long)]
    pub json: bool,
}

pub type Step = Box<dyn FnMut() -> Result<()>>;

/// Joins the job. Returns its group, and random inputs and labels of this rank's steps.
pub fn begin(model: Model) -> Result<(ProcessGroup, Tensor, Tensor)> {
    let group = ProcessGroup::from_env()?;
    let device = group.device();
    tch::set_num_threads(1);
    tch::manual_seed(group.rank() as i64);
    let shape = model.input();
    let x = Tensor::randn(shape, (Kind::Float, device));
    let y = Tensor::randint(10, [shape[0]], (Kind::Int64, device));
    Ok((group, x, y))
}

/// Returns the milliseconds that each step takes: the median of its blocks, which take turns with those
/// of the others.
pub fn times<const COUNT: usize>(
    group: &ProcessGroup,
    options: &Options,
    steps: &mut [Step; COUNT],
) -> Result<[f64; COUNT]> {
    let mut times = [const { Vec::new() }; COUNT];
    for _ in 0..options.blocks {
        for (step, times) in steps.iter_mut().zip(&mut times) {
            times.extend(block(group, group.device(), options.steps as usize, step)?);
        }
    }
    Ok(times.each_mut().map(|times| milliseconds(median(times))))
}
