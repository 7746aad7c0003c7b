//! Checks of counts and computations: each computation is on the rank of its stage, each comes once,
//! and none is missing.

use super::action::Action::{self, *};
use super::done::Done;
use super::error::{Result, ScheduleError};

/// The most computations that a schedule may have.
pub(super) const MAX: usize = 1 << 24;

/// Returns an error if a count is 0, or if there are too many computations.
pub(super) fn check_counts(ranks: usize, chunks: usize, micro_batches: usize) -> Result<()> {
    for (count, what) in [(ranks, "rank"), (chunks, "chunk"), (micro_batches, "micro-batch")] {
        if count == 0 {
            return Err(ScheduleError::Zero(what));
        }
    }
    // A forward and the halves of a backward, of each micro-batch in each stage.
    let counts = [chunks, micro_batches, 3];
    match counts.iter().try_fold(ranks, |product, &count| product.checked_mul(count)) {
        Some(product) if product <= MAX => Ok(()),
        _ => Err(ScheduleError::TooLarge(MAX)),
    }
}

/// Returns the number of micro-batches of these computations, or an error if they are no schedule.
pub(super) fn check(rank_of_stage: &[usize], computations: &[Vec<Action>]) -> Result<usize> {
    let stages = rank_of_stage.len();
    let ranks = computations.len();
    for (count, what) in [(ranks, "rank"), (stages, "stage")] {
        if count == 0 {
            return Err(ScheduleError::Zero(what));
        }
    }
    if let Some(stage) = rank_of_stage.iter().position(|&rank| rank >= ranks) {
        return Err(ScheduleError::UnknownRank { stage, rank: rank_of_stage[stage], ranks });
    }
    let micro_batches = computations.iter().flatten().map(|action| action.micro_batch());
    let last = micro_batches.max().ok_or(ScheduleError::Zero("micro-batch"))?;
    // With more micro-batches than this a forward or a backward is missing, of one of these.
    let enough = computations.iter().map(Vec::len).sum::<usize>() / (2 * stages);
    let mut done = Done::new(stages, last.min(enough) + 1);
    for (rank, list) in computations.iter().enumerate() {
        for &action in list {
            if !action.is_computation() {
                return Err(ScheduleError::NoComputation { rank, action });
            }
            let Some(&owner) = rank_of_stage.get(action.stage()) else {
                return Err(ScheduleError::UnknownStage { rank, action, stages });
            };
            if owner != rank {
                return Err(ScheduleError::WrongRank { rank, action, owner });
            }
            if !done.insert(action) {
                return Err(ScheduleError::Repeated { rank, action });
            }
        }
    }
    for micro_batch in 0..=last.min(enough) {
        for (stage, &rank) in rank_of_stage.iter().enumerate() {
            let all = [
                Forward { stage, micro_batch },
                BackwardInput { stage, micro_batch },
                BackwardWeight { stage, micro_batch },
            ];
            if let Some(&action) = all.iter().find(|action| !done.contains(**action)) {
                return Err(ScheduleError::Missing { rank, action });
            }
        }
    }
    Ok(last + 1)
}
