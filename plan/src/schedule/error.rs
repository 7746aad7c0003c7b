//! Errors of schedules.

use super::action::Action;

/// Result with the errors of schedules.
pub type Result<T> = std::result::Result<T, ScheduleError>;

/// An error of a schedule. Its message says what was wrong, and what would be right.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ScheduleError {
    /// A number is 0.
    #[error("a schedule needs at least one {0}")]
    Zero(&'static str),
    /// The schedule has too many computations.
    #[error("a schedule has at most {0} computations; give fewer ranks, chunks or micro-batches")]
    TooLarge(usize),
    /// A stage is on a rank that has no list of computations.
    #[error("stage {stage} is on rank {rank}, but the computations are those of {ranks} ranks")]
    UnknownRank {
        /// The stage.
        stage: usize,
        /// Its rank.
        rank: usize,
        /// The number of ranks.
        ranks: usize,
    },
    /// A send or a receive is among the computations.
    #[error("rank {rank}: give no {action}: sends and receives are added to the computations")]
    NoComputation {
        /// The rank.
        rank: usize,
        /// The action.
        action: Action,
    },
    /// A computation has a stage that the schedule does not have.
    #[error("rank {rank}: {action}: there are {stages} stages, from 0 to {}", .stages - 1)]
    UnknownStage {
        /// The rank.
        rank: usize,
        /// The action.
        action: Action,
        /// The number of stages.
        stages: usize,
    },
    /// A computation is on a rank that does not have the stage.
    #[error(
        "rank {rank}: {action}: rank {owner} has this stage; give the computation to rank {owner}"
    )]
    WrongRank {
        /// The rank.
        rank: usize,
        /// The action.
        action: Action,
        /// The rank of the stage.
        owner: usize,
    },
    /// A computation comes twice. A whole backward counts as both halves.
    #[error("rank {rank}: {action} comes twice; each micro-batch passes each stage once each way")]
    Repeated {
        /// The rank.
        rank: usize,
        /// The action.
        action: Action,
    },
    /// No rank has a computation.
    #[error("rank {rank}: {action} is missing; each micro-batch passes each stage once each way")]
    Missing {
        /// The rank of the stage.
        rank: usize,
        /// The action.
        action: Action,
    },
    /// No schedule has the name.
    #[error("no schedule has the name {name:?}; the names are {names}")]
    UnknownName {
        /// The name.
        name: String,
        /// The known names.
        names: String,
    },
    /// A cost is negative or not finite.
    #[error("a cost of {0}; costs are finite numbers, 0 or more")]
    Cost(f64),
    /// The costs are of more or fewer stages than the schedule has.
    #[error("costs of {given} stages, but the schedule has {stages}; give each stage's")]
    Stages {
        /// The number of costs.
        given: usize,
        /// The number of stages.
        stages: usize,
    },
    /// Ranks wait for each other.
    #[error("the schedule does not end: {0}")]
    Deadlock(String),
    /// A receive comes before another one whose send is earlier.
    #[error("rank {rank}: {action}: rank {from} sends what the {sent} takes before")]
    Order {
        /// The rank that receives.
        rank: usize,
        /// The rank that sends.
        from: usize,
        /// The receive.
        action: Action,
        /// The receive of the earliest send.
        sent: Action,
    },
}
