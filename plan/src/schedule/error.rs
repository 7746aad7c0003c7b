//! What can be wrong with a schedule.

use super::action::Action;

/// What can fail returns this.
pub type Result<T> = std::result::Result<T, Error>;

/// Each error says what was wrong, and what would be right.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Error {
    /// A number that must not be 0.
    #[error("a schedule needs at least one {0}")]
    Zero(&'static str),
    /// More than any job has.
    #[error("a schedule has at most {0} computations; give fewer ranks, chunks or micro-batches")]
    TooLarge(usize),
    /// A stage without a rank.
    #[error("stage {stage} is on rank {rank}, but the computations are those of {ranks} ranks")]
    UnknownRank {
        /// The stage.
        stage: usize,
        /// Its rank.
        rank: usize,
        /// The number of ranks.
        ranks: usize,
    },
    /// A send or a receive among the computations.
    #[error("rank {rank}: give no {action}: sends and receives are added to the computations")]
    NoComputation {
        /// The rank.
        rank: usize,
        /// What it is to do.
        action: Action,
    },
    /// A stage that the schedule does not have.
    #[error("rank {rank}: {action}: there are {stages} stages, from 0 to {}", .stages - 1)]
    UnknownStage {
        /// The rank.
        rank: usize,
        /// What it is to do.
        action: Action,
        /// The number of stages.
        stages: usize,
    },
    /// A computation on a rank that does not have the stage.
    #[error(
        "rank {rank}: {action}: rank {owner} has this stage; give the computation to rank {owner}"
    )]
    WrongRank {
        /// The rank.
        rank: usize,
        /// What it is to do.
        action: Action,
        /// The rank of the stage.
        owner: usize,
    },
    /// A computation that comes twice; a backward at once counts as both halves.
    #[error("rank {rank}: {action} comes twice; each micro-batch passes each stage once each way")]
    Repeated {
        /// The rank.
        rank: usize,
        /// What it is to do.
        action: Action,
    },
    /// A computation that no rank does.
    #[error("rank {rank}: {action} is missing; each micro-batch passes each stage once each way")]
    Missing {
        /// The rank of the stage.
        rank: usize,
        /// What it is to do.
        action: Action,
    },
    /// A schedule of a name that is not known.
    #[error("no schedule has the name {name:?}; the names are {names}")]
    UnknownName {
        /// The name.
        name: String,
        /// The names that are known.
        names: String,
    },
    /// A cost that is no time.
    #[error("a cost of {0}; costs are finite numbers, 0 or more")]
    Cost(f64),
    /// Costs of more or fewer stages than there are.
    #[error("costs of {given} stages, but the schedule has {stages}; give each stage's")]
    Stages {
        /// The number of costs.
        given: usize,
        /// The number of stages.
        stages: usize,
    },
    /// Ranks that wait for each other, and for what.
    #[error("the schedule does not end: {0}")]
    Deadlock(String),
    /// A receive of something else than what is sent next.
    #[error("rank {rank}: {action}: rank {from} sends what the {sent} takes before")]
    Order {
        /// The rank that receives.
        rank: usize,
        /// The rank that sends.
        from: usize,
        /// The receive.
        action: Action,
        /// The receive of what is sent next.
        sent: Action,
    },
}
