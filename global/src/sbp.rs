//! SBP: how a tensor lies on the ranks of one axis of a placement.

use std::fmt;

use flow_comm::ReduceOp;

pub use Sbp::{Broadcast as B, Split as S};

/// How a tensor lies on the ranks of one axis of a placement.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub enum Sbp {
    /// Each rank has a part along this dimension. The parts are equal, but the first ranks have
    /// one element more if the dimension is no multiple of their number.
    Split(usize),
    /// Each rank has all of it.
    Broadcast,
    /// Each rank has a term; reduced over the ranks, the terms are the tensor.
    Partial(ReduceOp),
}

/// The terms that ranks have add up to the tensor.
pub const P: Sbp = Sbp::Partial(ReduceOp::Sum);

/// SBP on each axis of a placement, the first axis first.
pub type NdSbp = Vec<Sbp>;

impl Sbp {
    /// Whether ranks have terms.
    pub fn is_partial(self) -> bool {
        matches!(self, Sbp::Partial(_))
    }

    /// The dimension that is split.
    pub fn dim(self) -> Option<usize> {
        match self {
            Sbp::Split(dim) => Some(dim),
            _ => None,
        }
    }
}

/// Whether the rank at these coordinates has the values of a tensor that is made. Of a sum the first
/// rank has them, and the others zeros; of other reductions all have them.
pub(crate) fn has_values(sbp: &[Sbp], coordinates: &[usize]) -> bool {
    sbp.iter().zip(coordinates).all(|(&sbp, &at)| sbp != P || at == 0)
}

/// The SBP of the gradient of locals: each copy has a term of it, each term all of it.
pub(crate) fn dual(sbp: &[Sbp]) -> NdSbp {
    let one = |&sbp: &Sbp| match sbp {
        Sbp::Broadcast => P,
        Sbp::Partial(_) => B,
        split => split,
    };
    sbp.iter().map(one).collect()
}

/// `S(0)`, and `[S(0), B]` on several axes.
pub(crate) fn text(sbp: &[Sbp]) -> String {
    match sbp {
        [one] => one.to_string(),
        _ => format!("{sbp:?}"),
    }
}

impl fmt::Display for Sbp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Sbp::Split(dim) => write!(f, "S({dim})"),
            Sbp::Broadcast => f.write_str("B"),
            Sbp::Partial(ReduceOp::Sum) => f.write_str("P"),
            Sbp::Partial(op) => write!(f, "P({op:?})"),
        }
    }
}

impl fmt::Debug for Sbp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}
