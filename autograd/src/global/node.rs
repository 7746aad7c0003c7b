//! Autograd's nodes, by number.

use crate::ffi::global as ffi;

/// The place in autograd's graph where a thread is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Node {
    /// Whether the thread runs backward.
    pub is_backward: bool,
    /// The node that it runs, or the one that it has made of this operation of forward: the same
    /// number for both. None if there is no node.
    pub number: Option<u64>,
}

impl Node {
    /// Returns this thread's place. If `is_made`, and no backward runs, it is the last node that
    /// was made.
    pub fn now(is_made: bool) -> Self {
        let mut number = 0;
        let mut is_backward = false;
        // SAFETY: both are written before they are read.
        let is_there = unsafe { ffi::flow_autograd_node(is_made, &mut number, &mut is_backward) };
        Self { is_backward, number: is_there.then_some(number) }
    }
}
