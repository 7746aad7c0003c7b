//! Pipeline schedules: what each rank does with the stages of a model, and in which order.
//!
//! A schedule is data. Whoever carries it out does each rank's [`Schedule::actions`] one after
//! another. Sends do not wait for their receivers. From one rank to another, receives come in the
//! order of their sends, so that an executor needs no tags.

mod action;
mod check;
mod communication;
mod error;
mod one_f_one_b;

pub use action::Action;
pub use error::{Error, Result};

/// A schedule: which rank has which stage, and what each rank does, in order, sends and receives
/// included.
///
/// ```
/// use flow_plan::schedule::{Action, Schedule};
///
/// let schedule = Schedule::one_f_one_b(4, 8)?;
/// assert_eq!(schedule.rank_of(2), 2);
/// assert_eq!(schedule.actions(0)[0], Action::Forward { stage: 0, micro_batch: 0 });
/// # Ok::<(), flow_plan::schedule::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Schedule {
    rank_of_stage: Vec<usize>,
    micro_batches: usize,
    /// By rank.
    actions: Vec<Vec<Action>>,
}

impl Schedule {
    /// GPipe (Huang et al. 2019, section 2.3): all forwards, then all backwards. Stage s is on rank
    /// s. Ranks hold the activations of all micro-batches at once. With p ranks and m micro-batches
    /// a part (p - 1) / (m + p - 1) of the time is idle.
    ///
    /// Backwards come in the order of the forwards, as in torch's `ScheduleGPipe`, so that
    /// gradients are added up in the same order as with [`Schedule::one_f_one_b`]: the results are
    /// the same bits.
    ///
    /// # Errors
    /// A count of 0, or more than 2^24 computations.
    pub fn gpipe(ranks: usize, micro_batches: usize) -> Result<Self> {
        check::check_counts(ranks, 1, micro_batches)?;
        let actions = |rank| one_f_one_b::gpipe(rank, micro_batches);
        Self::custom((0..ranks).collect(), (0..ranks).map(actions).collect())
    }

    /// 1F1B (PipeDream-Flush; Narayanan et al. 2021, "Efficient Large-Scale Language Model Training
    /// on GPU Clusters Using Megatron-LM", section 2.2.1): a rank begins with backwards as soon as
    /// it can, then does a forward and a backward in turns. Stage s is on rank s. As much time is
    /// idle as with [`Schedule::gpipe`], but rank r of p holds min(p - r, m) activations only.
    ///
    /// # Errors
    /// A count of 0, or more than 2^24 computations.
    pub fn one_f_one_b(ranks: usize, micro_batches: usize) -> Result<Self> {
        check::check_counts(ranks, 1, micro_batches)?;
        let actions = |rank| one_f_one_b::one_f_one_b(rank, micro_batches, ranks - 1 - rank);
        Self::custom((0..ranks).collect(), (0..ranks).map(actions).collect())
    }

    /// A schedule of your own: the rank of each stage, and what each rank computes, in order. Sends
    /// and receives are added.
    ///
    /// ```
    /// use flow_plan::schedule::{Action::*, Schedule};
    ///
    /// let rank = |stage| vec![Forward { stage, micro_batch: 0 }, Backward { stage, micro_batch: 0 }];
    /// let schedule = Schedule::custom(vec![0, 1], vec![rank(0), rank(1)])?;
    /// assert_eq!(schedule, Schedule::gpipe(2, 1)?);
    /// # Ok::<(), flow_plan::schedule::Error>(())
    /// ```
    ///
    /// # Errors
    /// Each micro-batch must pass each stage once forward and once backward (at once, or in halves),
    /// on the rank of the stage.
    pub fn custom(rank_of_stage: Vec<usize>, computations: Vec<Vec<Action>>) -> Result<Self> {
        let micro_batches = check::check(&rank_of_stage, &computations)?;
        let actions = communication::with_communication(&rank_of_stage, computations);
        Ok(Self { rank_of_stage, micro_batches, actions })
    }

    /// The number of ranks.
    pub fn ranks(&self) -> usize {
        self.actions.len()
    }

    /// The number of stages of the model.
    pub fn stages(&self) -> usize {
        self.rank_of_stage.len()
    }

    /// The number of micro-batches of a step.
    pub fn micro_batches(&self) -> usize {
        self.micro_batches
    }

    /// The rank of a stage.
    ///
    /// # Panics
    /// If there is no such stage: stages go from 0 to [`Schedule::stages`] - 1.
    pub fn rank_of(&self, stage: usize) -> usize {
        self.rank_of_stage[stage]
    }

    /// The stages of a rank, ascending: none if there is no such rank.
    pub fn stages_of(&self, rank: usize) -> Vec<usize> {
        (0..self.stages()).filter(|&stage| self.rank_of_stage[stage] == rank).collect()
    }

    /// What a rank does, in order: nothing if there is no such rank.
    pub fn actions(&self, rank: usize) -> &[Action] {
        self.actions.get(rank).map_or(&[], Vec::as_slice)
    }
}

#[cfg(test)]
mod tests;
