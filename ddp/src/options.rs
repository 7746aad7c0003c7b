//! Options of a reducer.

use flow_comm::ReduceOp;
use tch::{Kind, Tensor};

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

impl Delayed {
    /// Returns the same with the first name of each tensor that has several, in alphabetical order.
    pub fn by_first_names(&self, parameters: &[(String, Tensor)]) -> Self {
        let first = |wanted: &String| {
            let found = parameters.iter().find(|(name, _)| name == wanted);
            let tensor = found.map(|(_, tensor)| flow_autograd::identity(tensor));
            let mut tied = parameters.iter();
            let first = tied.find(|(_, other)| Some(flow_autograd::identity(other)) == tensor);
            first.map_or_else(|| wanted.clone(), |(name, _)| name.clone())
        };
        let mut names: Vec<String> = self.names.iter().map(first).collect();
        names.sort_unstable();
        names.dedup();
        Self { names, until: first(&self.until) }
    }
}
