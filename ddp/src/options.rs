//! Options of a reducer.

use flow_comm::ReduceOp;
use tch::Kind;

use crate::bucket::assignment::Caps;

/// Options of a reducer, the same on all ranks.
#[derive(Debug, Clone)]
pub(crate) struct Options {
    pub caps: Caps,
    pub find_unused: bool,
    /// Each backward has the same graph.
    pub static_graph: bool,
    pub bucket_view: bool,
    /// The type in which gradients are sent; None: their own.
    pub communication: Option<Kind>,
    /// Avg or Sum.
    pub op: ReduceOp,
    pub delayed: Delayed,
}

/// Parameters whose gradients are reduced once another's has come, by name.
#[derive(Debug, Clone, Default)]
pub(crate) struct Delayed {
    pub names: Vec<String>,
    pub until: String,
}
