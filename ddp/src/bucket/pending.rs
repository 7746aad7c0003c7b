//! A reduction that runs beside backward.

use std::time::Instant;

use flow_autograd::BoxError;
use tch::Tensor;

/// A bucket's reduction that has been launched.
#[must_use = "backward waits for it"]
pub struct Pending(Box<dyn FnOnce() -> Result<Reduced, BoxError> + Send>);

/// Where the reduced gradients of a bucket are.
pub(crate) enum Reduced {
    /// In the bucket; at what time, if the host saw it.
    InBucket(Option<Instant>),
    /// In a tensor as long as the bucket.
    Flat(Tensor),
}

impl Pending {
    /// A reduction that is over, with all reduced gradients one after the other, as in
    /// [`GradBucket::buffer`](crate::GradBucket::buffer). On a GPU they may be computed yet, in
    /// libtorch's current stream.
    pub fn ready(flat: Tensor) -> Self {
        Self::new(move || Ok(flat))
    }

    /// A reduction that `wait` completes, at the end of backward. It returns what
    /// [`Pending::ready`] is given.
    pub fn new(wait: impl FnOnce() -> Result<Tensor, BoxError> + Send + 'static) -> Self {
        Self(Box::new(move || wait().map(Reduced::Flat)))
    }

    /// A reduction in the bucket's own memory.
    pub(crate) fn in_bucket(
        wait: impl FnOnce() -> flow_comm::Result<Option<Instant>> + Send + 'static,
    ) -> Self {
        Self(Box::new(move || Ok(Reduced::InBucket(wait()?))))
    }

    /// Waits until the reduced gradients may be used, in the order of libtorch's stream.
    pub(crate) fn wait(self) -> Result<Reduced, BoxError> {
        (self.0)()
    }
}
