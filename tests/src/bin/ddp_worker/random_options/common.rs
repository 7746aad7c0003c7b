//! What a training has with `Ddp` and without: its numbers, inputs and losses.

use tch::nn::Sgd;
use tch::{Kind, Tensor};

use super::model::WIDTH;
use super::training::Training;
use crate::models::device;

pub const LEARNING_RATE: f64 = 0.1;
pub const MAX_NORM: f64 = 0.3;
/// The steps from one average of parameters to the next.
pub const AVERAGED_EVERY: u64 = 2;
/// The rows of a rank's batch.
const BATCH: i64 = 3;

/// The optimizer of a training.
pub fn sgd(training: &Training) -> Sgd {
    Sgd { momentum: if training.momentum { 0.5 } else { 0.0 }, ..Sgd::default() }
}

/// The ranks that `PostLocalSgd` averages gradients over: two, or the last one alone.
pub fn subgroup(rank: usize, ranks: usize) -> Vec<usize> {
    let first = rank / 2 * 2;
    (first..(first + 2).min(ranks)).collect()
}

/// A rank's input in a forward: of a phase, a step, a backward.
pub fn batch(training: &Training, rank: usize, place: [usize; 4]) -> Tensor {
    let start = place.iter().fold(rank, |sum, number| 10 * sum + number);
    let numbers = Tensor::arange(BATCH * WIDTH, (Kind::Double, device())) + start as f64;
    (numbers * 1.7).sin().view([BATCH, WIDTH]).to_kind(training.wide)
}

/// The loss of what models make of their inputs.
pub fn loss(outputs: &[Tensor], inputs: &[Tensor], penalty: bool) -> Result<Tensor, tch::TchError> {
    let mut loss = Tensor::zeros([], (Kind::Double, device()));
    for output in outputs {
        loss += output.to_kind(Kind::Double).square().mean(Kind::Double);
    }
    if penalty {
        let outputs: Vec<Tensor> = outputs.iter().map(|o| o.sum(Kind::Double)).collect();
        let sum: Tensor = outputs.into_iter().sum();
        let slopes = Tensor::f_run_backward(&[&sum], inputs, true, true)?;
        for slope in slopes {
            loss += slope.to_kind(Kind::Double).square().mean(Kind::Double);
        }
    }
    Ok(loss)
}
