//! How an order of samples is named in a checkpoint.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The name of a [`Sampler`](crate::Sampler)'s order, in a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Shuffle {
    /// The order of the data set.
    None,
    /// PyTorch's permutation.
    Torch,
    /// The keyed permutation.
    Keyed,
    /// Another order, in words.
    Other(String),
}

impl fmt::Display for Shuffle {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::Other(name) => f.write_str(name),
            own => fmt::Debug::fmt(own, f),
        }
    }
}
