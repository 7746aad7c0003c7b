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
        let mut names: Vec<String> =
            self.names.iter().map(|name| first_name(parameters, name)).collect();
        names.sort_unstable();
        names.dedup();
        Self { names, until: first_name(parameters, &self.until) }
    }
}

/// Returns the first name of the tensor that has this one, or this one if no tensor has it.
fn first_name(parameters: &[(String, Tensor)], wanted: &str) -> String {
    let Some((_, tensor)) = parameters.iter().find(|(name, _)| name == wanted) else {
        return wanted.to_owned();
    };
    let identity = flow_autograd::identity(tensor);
    let mut names = parameters.iter();
    let first = names.find(|(_, other)| flow_autograd::identity(other) == identity);
    first.map_or_else(|| wanted.to_owned(), |(name, _)| name.clone())
}
