//! A reduction that runs beside backward.

use std::sync::Arc;
use std::time::Instant;

use flow_autograd::BoxError;
use flow_comm::{Segments, Work};
use tch::Tensor;

use super::hook_progress::HookProgress;

/// A bucket's reduction that has been launched.
#[must_use = "backward waits for it"]
pub struct Pending {
    launched: Launched,
    /// Who looks at the reduced gradients.
    look: Option<Look>,
}

/// Looks at the reduced gradients of a bucket.
pub(crate) type Look = Box<dyn FnOnce(&[Tensor]) -> Result<(), BoxError> + Send>;

/// A reduction under way, by what goes on with it and what waiting for it means.
enum Launched {
    /// The gradients' hooks reduce the bucket in shared memory.
    InHooks(Arc<HookProgress>, Arc<Segments>),
    /// A thread reduces the bucket in shared memory.
    InThread(Work<Instant>, Arc<Segments>),
    /// A GPU reduces the bucket. libtorch's stream waits for that, rather than the host.
    OnDevice,
    /// [`Bucket::complete`](super::Bucket::complete) reduces the bucket.
    AtEnd,
    /// A communication hook reduces a tensor of its own.
    ByHook(Box<dyn FnOnce() -> Result<Tensor, BoxError> + Send>),
}

/// The place of a bucket's reduced gradients.
pub(crate) enum Reduced {
    /// The bucket has them, since this time, if the host saw it.
    InBucket(Option<Instant>),
    /// No rank has them yet: see [`Bucket::complete`](super::Bucket::complete).
    NotYet,
    /// A tensor as long as the bucket has them.
    Flat(Tensor),
}

impl Pending {
    /// Makes a reduction that is over, with all reduced gradients one after the other, as in
    /// [`GradBucket::buffer`](crate::GradBucket::buffer). On a GPU they may be computed yet, in
    /// libtorch's current stream.
    pub fn ready(flat: Tensor) -> Self {
        Self::new(move || Ok(flat))
    }

    /// Makes a reduction that `wait` completes, at the end of backward. It returns what
    /// [`Pending::ready`] is given.
    pub fn new(wait: impl FnOnce() -> Result<Tensor, BoxError> + Send + 'static) -> Self {
        Self::launched(Launched::ByHook(Box::new(wait)))
    }

    /// Calls `look` with the reduced gradients, of the shapes of
    /// [`GradBucket::parameters`](crate::GradBucket::parameters), at the end of backward. On a GPU they
    /// may be computed yet, in libtorch's current stream. An error ends the backward.
    pub fn inspect(
        mut self,
        look: impl FnOnce(&[Tensor]) -> Result<(), BoxError> + Send + 'static,
    ) -> Self {
        self.look = Some(match self.look.take() {
            None => Box::new(look),
            Some(first) => Box::new(|gradients| {
                first(gradients)?;
                look(gradients)
            }),
        });
        self
    }

    fn launched(launched: Launched) -> Self {
        Self { launched, look: None }
    }

    /// Takes who looks at the reduced gradients.
    pub(crate) fn take_look(&mut self) -> Option<Look> {
        self.look.take()
    }

    pub(super) fn in_hooks(progress: Arc<HookProgress>, bucket: Arc<Segments>) -> Self {
        Self::launched(Launched::InHooks(progress, bucket))
    }

    pub(super) fn in_thread(work: Work<Instant>, bucket: Arc<Segments>) -> Self {
        Self::launched(Launched::InThread(work, bucket))
    }

    pub(super) fn on_device() -> Self {
        Self::launched(Launched::OnDevice)
    }

    pub(super) fn at_end() -> Self {
        Self::launched(Launched::AtEnd)
    }

    /// Waits for a reduction in shared memory, but for none that was launched later. Returns when it
    /// was over, or itself: if it is to be waited for, or looked at, at the end of backward, or is not
    /// over yet and `may_wait` is false.
    pub(crate) fn wait_in_turn(self, may_wait: bool) -> flow_comm::Result<Result<Instant, Self>> {
        if self.look.is_some() {
            return Ok(Err(self));
        }
        match self.launched {
            Launched::InHooks(progress, bucket) if may_wait || bucket.finished().is_some() => {
                progress.wait_in_turn(&bucket).map(Ok)
            }
            Launched::InThread(work, bucket) if may_wait || bucket.finished().is_some() => {
                work.wait().map(Ok)
            }
            other => Ok(Err(Self::launched(other))),
        }
    }

    /// Waits until the reduced gradients may be used, in the order of libtorch's stream.
    pub(crate) fn wait(self) -> Result<Reduced, BoxError> {
        Ok(match self.launched {
            Launched::InHooks(progress, bucket) => Reduced::InBucket(Some(progress.wait(&bucket)?)),
            Launched::InThread(work, _) => Reduced::InBucket(Some(work.wait()?)),
            Launched::OnDevice => Reduced::InBucket(None),
            Launched::AtEnd => Reduced::NotYet,
            Launched::ByHook(wait) => Reduced::Flat(wait()?),
        })
    }
}
