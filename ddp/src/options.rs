//! Options of a reducer.

use flow_comm::ReduceOp;
use tch::Kind;

use crate::bucket::assignment::Caps;

/// Options of a reducer, the same on all ranks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Options {
    pub caps: Caps,
    pub find_unused: bool,
    pub bucket_view: bool,
    /// The type in which gradients are sent; None: their own.
    pub communication: Option<Kind>,
    /// Avg or Sum.
    pub op: ReduceOp,
}
