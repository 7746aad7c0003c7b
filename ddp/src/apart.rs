//! The parameters whose gradients are not the same on all ranks, as a [`CommHook`](crate::CommHook) says.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

use tch::Tensor;

static APART: Mutex<Vec<usize>> = Mutex::new(Vec::new());

/// Parameters whose gradients are each rank's own, as long as this lives.
pub(crate) struct Apart(HashSet<usize>);

impl Apart {
    pub fn new<'a>(parameters: impl IntoIterator<Item = &'a Tensor>) -> Self {
        let own: HashSet<usize> = parameters.into_iter().map(flow_autograd::identity).collect();
        APART.lock().unwrap_or_else(PoisonError::into_inner).extend(&own);
        Self(own)
    }
}

impl Drop for Apart {
    fn drop(&mut self) {
        let mut apart = APART.lock().unwrap_or_else(PoisonError::into_inner);
        apart.retain(|identity| !self.0.contains(identity));
    }
}

/// Returns whether the gradients of one of these parameters are each rank's own.
pub(crate) fn are_apart<'a>(parameters: impl IntoIterator<Item = &'a Tensor>) -> bool {
    let apart = APART.lock().unwrap_or_else(PoisonError::into_inner);
    !apart.is_empty()
        && parameters.into_iter().any(|tensor| apart.contains(&flow_autograd::identity(tensor)))
}
