//! What a reducer does differently when asked to.

use flow_comm::ReduceOp;
use tch::Kind;

use crate::bucket::assignment::Caps;

/// What the reducer does differently when asked to.
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
