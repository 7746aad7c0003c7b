//! What can be wrong with placements and SBPs.

use crate::sbp::Sbp;

pub type Result<T> = std::result::Result<T, Error>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Comm(#[from] flow_comm::Error),
    #[error(transparent)]
    Tensor(#[from] flow_tensor::Error),
    #[error("a placement needs at least one rank")]
    NoRanks,
    #[error("the ranks of a placement must fill an array: {0}")]
    Ragged(String),
    #[error("rank {0} is twice in the placement {1}; give each rank one position")]
    Repeated(usize, String),
    #[error("the placement {placement} has {axes} axes, but {given} SBPs are given: {sbp:?}")]
    Axes { placement: String, axes: usize, given: usize, sbp: Vec<Sbp> },
    #[error("S({dim}) needs a dimension {dim}, but the tensor has the shape {shape:?}")]
    Dimension { dim: usize, shape: Vec<usize> },
}
