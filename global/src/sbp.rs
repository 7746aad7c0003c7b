//! SBP: the layout of a tensor on the ranks of one axis of a placement.

use std::fmt;

use flow_comm::ReduceOp;

pub use Sbp::{Broadcast as B, Split as S};

/// The layout of a tensor on the ranks of one axis of a placement.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub enum Sbp {
    /// Each rank has a part along this dimension. The parts are equal, but the first ranks have
    /// one element more if the dimension is no multiple of their number.
    Split(usize),
    /// Each rank has all of it.
    Broadcast,
    /// Each rank has partial values; reduced over the ranks, they are the tensor.
    Partial(ReduceOp),
}

/// The ranks have partial sums: added up, they are the tensor.
pub const P: Sbp = Sbp::Partial(ReduceOp::Sum);

/// SBP on each axis of a placement, the first axis first.
pub type NdSbp = Vec<Sbp>;

impl Sbp {
    /// Returns whether ranks have partial values.
    pub fn is_partial(self) -> bool {
        matches!(self, Sbp::Partial(_))
    }

    /// Returns the dimension that is split.
    pub fn dim(self) -> Option<usize> {
        match self {
            Sbp::Split(dim) => Some(dim),
            _ => None,
        }
    }
}

/// Returns what leaves a value as it is in a sum or a product. None for the other reductions: there
/// the value itself does.
pub(crate) fn neutral(op: ReduceOp) -> Option<f64> {
    match op {
        ReduceOp::Sum => Some(0.0),
        ReduceOp::Product => Some(1.0),
        ReduceOp::Avg | ReduceOp::Max | ReduceOp::Min => None,
    }
}

/// Returns what the rank at these coordinates has of a new tensor instead of the tensor's values.
/// Of a sum or a product the first rank has the values, and the others what leaves them as they
/// are. Of other reductions all have the values. Inner axes come first: they reduce to what the
/// outer ones reduce.
pub(crate) fn filler(sbp: &[Sbp], coordinates: &[usize]) -> Option<f64> {
    let axes = sbp.iter().zip(coordinates).rev();
    axes.filter(|&(_, &at)| at > 0).find_map(|(&sbp, _)| match sbp {
        Sbp::Partial(op) => neutral(op),
        _ => None,
    })
}

/// Returns the SBP of the gradient of locals: each copy has a partial gradient, each partial sum
/// all of it.
pub(crate) fn dual(sbp: &[Sbp]) -> NdSbp {
    let axes = sbp.iter().map(|sbp| match *sbp {
        Sbp::Broadcast => P,
        Sbp::Partial(_) => B,
        split => split,
    });
    axes.collect()
}

/// Returns the SBP after the reduction of partial values: B on partial axes.
pub(crate) fn reduced(sbp: &[Sbp]) -> NdSbp {
    sbp.iter().map(|&sbp| if sbp.is_partial() { B } else { sbp }).collect()
}

/// Formats as `S(0)`, and as `[S(0), B]` on several axes.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// The values of all ranks of a 2 x 2 mesh, reduced over the inner axis, then over the outer one,
    /// are the value.
    #[test]
    fn fillers_leave_the_value_as_it_is() {
        let reduce = |sbp: Sbp, one: f64, other: f64| match sbp {
            Sbp::Partial(ReduceOp::Sum) => one + other,
            Sbp::Partial(ReduceOp::Product) => one * other,
            Sbp::Partial(ReduceOp::Avg) => (one + other) / 2.0,
            Sbp::Partial(ReduceOp::Max) => one.max(other),
            Sbp::Partial(ReduceOp::Min) => one.min(other),
            _ => one,
        };
        let ops = ReduceOp::ALL.iter().map(|&op| Sbp::Partial(op)).chain([B, S(0)]);
        let ops: Vec<Sbp> = ops.collect();
        for &outer in &ops {
            for &inner in &ops {
                let own = |at: [usize; 2]| filler(&[outer, inner], &at).unwrap_or(7.0);
                let row = |at| reduce(inner, own([at, 0]), own([at, 1]));
                assert_eq!(reduce(outer, row(0), row(1)), 7.0, "{outer} {inner}");
            }
        }
    }
}
