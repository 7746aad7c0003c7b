//! Errors of pipelines.

use std::ops::Range;

use flow_autograd::BoxError;
use flow_comm::ProcessGroup;
use flow_plan::schedule::Action;

/// Errors of pipelines. Ranks are those in the job.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An action of this rank failed: its stage, its loss, or a message. The other ranks' steps fail as
    /// well.
    #[error("rank {rank}: {action} failed: {cause}")]
    Action {
        /// This rank.
        rank: usize,
        /// The action that failed.
        action: Action,
        /// The cause.
        cause: BoxError,
    },
    /// A part of a step failed that belongs to no action.
    #[error("rank {rank}: {operation} failed: {cause}")]
    Step {
        /// This rank.
        rank: usize,
        /// The part that failed.
        operation: &'static str,
        /// The cause.
        cause: BoxError,
    },
    /// [`split_by_time`](crate::split_by_time) could not set a model's state aside, or restore it.
    #[error("a model's state cannot be kept while its layers are measured: {0}")]
    State(BoxError),
    /// A layer cannot be measured.
    #[error("layer {layer} cannot be measured: {cause}")]
    Layer {
        /// The number of the layer, from 0.
        layer: usize,
        /// The cause.
        cause: BoxError,
    },
    /// [`Layers::into_stages`](crate::Layers::into_stages) has ranges that do not divide the layers.
    #[error(
        "{ranges:?} do not divide {layers} layers: give ranges that follow each other from 0 to \
         {layers}, such as those of split_by_parameters"
    )]
    Ranges {
        /// The ranges.
        ranges: Vec<Range<usize>>,
        /// The number of layers.
        layers: usize,
    },
    /// An argument is wrong.
    #[error("rank {rank}: pipeline: {reason}")]
    Argument {
        /// This rank.
        rank: usize,
        /// The fault, and a valid argument.
        reason: String,
    },
    /// The process group failed.
    #[error(transparent)]
    Comm(#[from] flow_comm::Error),
    /// A schedule cannot be made or predicted.
    #[error(transparent)]
    Schedule(#[from] flow_plan::schedule::ScheduleError),
}

/// Result of a pipeline's methods.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Result of a part of a step. The caller adds the rank and the operation to the error.
pub(crate) type Outcome<T> = std::result::Result<T, BoxError>;

/// Returns the number in the job of this rank of `group`.
pub(crate) fn job_rank(group: &ProcessGroup) -> usize {
    group.ranks()[group.rank()]
}
