//! A schedule as data.

use serde::Serialize;

use super::action::Action;

/// A schedule: the rank of each stage, and the actions of each rank in order. Sends and receives are
/// actions too.
///
/// ```
/// use flow_plan::schedule::{Action, Schedule};
///
/// let schedule = Schedule::one_f_one_b(4, 8)?;
/// assert_eq!(schedule.rank_of(2), 2);
/// assert_eq!(schedule.actions(0)[0], Action::Forward { stage: 0, micro_batch: 0 });
/// # Ok::<(), flow_plan::schedule::ScheduleError>(())
/// ```
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Schedule {
    pub(super) rank_of_stage: Vec<usize>,
    pub(super) micro_batches: usize,
    /// The actions by rank.
    pub(super) actions: Vec<Vec<Action>>,
}

impl Schedule {
    /// Returns the number of ranks.
    pub fn ranks(&self) -> usize {
        self.actions.len()
    }

    /// Returns the number of stages of the model.
    pub fn stages(&self) -> usize {
        self.rank_of_stage.len()
    }

    /// Returns the number of micro-batches of a step.
    pub fn micro_batches(&self) -> usize {
        self.micro_batches
    }

    /// Returns the rank of a stage.
    ///
    /// # Panics
    /// If there is no such stage: stages go from 0 to [`Schedule::stages`] - 1.
    pub fn rank_of(&self, stage: usize) -> usize {
        self.rank_of_stage[stage]
    }

    /// Returns the stages of a rank, ascending: none if there is no such rank.
    pub fn stages_of(&self, rank: usize) -> Vec<usize> {
        (0..self.stages()).filter(|&stage| self.rank_of_stage[stage] == rank).collect()
    }

    /// Returns the actions of a rank, in order: none if there is no such rank.
    pub fn actions(&self, rank: usize) -> &[Action] {
        self.actions.get(rank).map_or(&[], Vec::as_slice)
    }
}
