//! Options of a reducer.

use flow_comm::ReduceOp;
use tch::{Kind, Tensor};

use crate::bucket::assignment::Caps;

/// Options of a reducer, the same on all ranks.
#[derive(Debug, Clone)]
pub(crate) struct Options {
    pub caps: Caps,
    /// The steps in which each size of buckets is tried; 0: none is.
    pub tune: u32,
    pub find_unused: bool,
    /// Each backward has the same graph.
    pub static_graph: bool,
    pub bucket_view: bool,
    /// The type in which gradients are sent; None: their own.
    pub communication: Option<Kind>,
    /// Avg or Sum.
    pub op: ReduceOp,
    pub delayed: Delayed,
    /// Parameters whose gradients are sparse, by name.
    pub sparse: Vec<String>,
    /// Other sparse gradients become dense.
    pub sparse_as_dense: bool,
    /// The number of parts in which gradients are computed; None: each rank computes one.
    pub virtual_ranks: Option<usize>,
}

impl Options {
    /// Returns whether sparse gradients are taken, with one rank too.
    pub fn takes_sparse_gradients(&self) -> bool {
        !self.sparse.is_empty() || self.sparse_as_dense
    }

    /// Returns the same with the first name of each tensor that has several, and names in
    /// alphabetical order.
    pub fn by_first_names(mut self, parameters: &[(String, Tensor)]) -> Self {
        first_names(parameters, &mut self.sparse);
        first_names(parameters, &mut self.delayed.names);
        self.delayed.until = first_name(parameters, &self.delayed.until);
        self
    }
}

/// Parameters whose gradients are reduced once another's has come, by name.
#[derive(Debug, Clone, Default)]
pub(crate) struct Delayed {
    pub names: Vec<String>,
    pub until: String,
}

/// Makes names the first ones of their tensors, in alphabetical order.
fn first_names(parameters: &[(String, Tensor)], names: &mut Vec<String>) {
    for name in names.iter_mut() {
        *name = first_name(parameters, name);
    }
    names.sort_unstable();
    names.dedup();
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
