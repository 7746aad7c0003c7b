//! Errors of global tensors.

use flow_autograd::BoxError;

use crate::sbp::Sbp;

/// Result with this crate's error.
pub type Result<T> = std::result::Result<T, Error>;

/// Each error says what was wrong, and what would be right.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A process group reports an error.
    #[error(transparent)]
    Comm(#[from] flow_comm::Error),
    /// A collective on tensors fails.
    #[error(transparent)]
    Tensor(#[from] flow_tensor::Error),
    /// A placement without ranks.
    #[error("a placement needs at least one rank")]
    NoRanks,
    /// Ranks that are no array: why not.
    #[error("the ranks of a placement must fill an array: {0}")]
    Ragged(String),
    /// A rank that is twice in a placement.
    #[error("rank {0} is twice in the placement {1}; give each rank one position")]
    Repeated(usize, String),
    /// A rank that the group does not have.
    #[error(
        "the placement {placement} has rank {rank}, but the group has {size} ranks, from 0 to {}",
        .size - 1
    )]
    NoSuchRank {
        /// The rank.
        rank: usize,
        /// The size of the group.
        size: usize,
        /// The placement.
        placement: String,
    },
    /// Names that do not fit a placement's axes.
    #[error(
        "the names {names:?} do not fit the placement {placement}: each axis needs a name of its own"
    )]
    Names {
        /// The names.
        names: Vec<String>,
        /// The placement.
        placement: String,
    },
    /// An axis by a name that no axis has.
    #[error("the placement {placement} has no axis {name:?}; its axes are named {names:?}")]
    NoSuchAxis {
        /// The name.
        name: String,
        /// The placement.
        placement: String,
        /// The names that there are.
        names: Vec<String>,
    },
    /// A placement without a process group.
    #[error("the placement {0} has no process group: make it by Placement::new(&group, ..)")]
    NoGroup(String),
    /// The buckets that reduce gradients report an error.
    #[error(transparent)]
    Buckets(#[from] flow_ddp::Error),
    /// libtorch reports an error.
    #[error(transparent)]
    Torch(#[from] tch::TchError),
    /// The library's own C++ code reports an error.
    #[error(transparent)]
    Autograd(#[from] flow_autograd::Error),
    /// A tensor that should be global.
    #[error("a plain tensor is given where a global one is needed: make it global by to_global")]
    Plain,
    /// A boxing that an operation needs, and that failed.
    #[error("{operation}: boxing {what}: {source}{advice}")]
    Boxing {
        /// The operation.
        operation: String,
        /// Which input, from what to what.
        what: String,
        /// The cause.
        source: Box<Error>,
        /// The likely fault of the program.
        advice: &'static str,
    },
    /// A collective of global tensors that fails, with what ranks were doing.
    #[error(
        "{what}; all ranks must run the same operations on global tensors, in the same order \
         ({source})"
    )]
    OutOfStep {
        /// The operation of this rank, and those of the others if they differ.
        what: String,
        /// The cause.
        source: Box<Error>,
    },
    /// Ranks call an operation with different tensors or numbers, which must be the same on all.
    #[error("{operation}: {reason}")]
    Differs {
        /// The operation.
        operation: String,
        /// The difference, on which ranks, and what to do.
        reason: String,
    },
    /// Tensors of one operation that are placed on different ranks.
    #[error(
        "{operation}: one input is placed on {one}, another one on {other}; move one of them by \
         to_global, or have all of them moved by move_inputs(true)"
    )]
    Placements {
        /// The operation.
        operation: String,
        /// A placement.
        one: String,
        /// Another one.
        other: String,
    },
    /// Something that cannot be done with global tensors: the operation, and why.
    #[error("{operation}: {reason}")]
    Unsupported {
        /// The operation.
        operation: String,
        /// The reason, and what to do.
        reason: String,
    },
    /// Fewer ranks than a job is to have.
    #[error(
        "asked for {asked} devices, found {found}: start as many ranks (flow-launch \
         --nproc_per_node {asked}), or ask for fewer"
    )]
    Devices {
        /// Devices that are asked for.
        asked: usize,
        /// Ranks of the group.
        found: usize,
    },
    /// An input that a job does not take.
    #[error("the input {name}: {reason}")]
    Input {
        /// The input's name.
        name: String,
        /// The input, and what the job declares.
        reason: String,
    },
    /// The number of SBPs is not the placement's number of axes.
    #[error("the placement {placement} has {axes} axes, but {given} SBPs are given: {sbp:?}")]
    Axes {
        /// The placement.
        placement: String,
        /// Its axes.
        axes: usize,
        /// SBPs that are given.
        given: usize,
        /// The SBPs.
        sbp: Vec<Sbp>,
    },
    /// A split of a dimension that the tensor does not have.
    #[error("S({dim}) needs a dimension {dim}, but the tensor has the shape {shape:?}")]
    Dimension {
        /// The dimension.
        dim: usize,
        /// The tensor's shape.
        shape: Vec<usize>,
    },
    /// A traced step whose tensors have several placements.
    #[error(
        "a plan is for one placement, but the trace has {0} and {1}; trace one stage at a time"
    )]
    SeveralPlacements(String, String),
    /// A checkpoint without all of a tensor.
    #[error(
        "the checkpoint has {found} of {needed} elements of {name}; are files of ranks missing?"
    )]
    Shards {
        /// The tensor's name.
        name: String,
        /// Elements that are there.
        found: usize,
        /// Elements that are needed.
        needed: usize,
    },
}

impl Error {
    /// Returns the error of a collective as it is, for crates that do not know this one.
    pub(crate) fn passed_on(self) -> BoxError {
        match self {
            Self::Comm(error) => error.into(),
            Self::Tensor(error) => error.into(),
            other => other.into(),
        }
    }
}
