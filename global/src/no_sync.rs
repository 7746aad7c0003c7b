//! Gradients that stay partial for some backwards, and are reduced once.

use std::sync::{Mutex, MutexGuard, PoisonError};

use tch::Tensor;

use crate::error::Result;
use crate::handle::{boxed, spec_of};
use crate::placement::Placement;
use crate::replicas;
use crate::runtime::Runtime;
use crate::sbp::{B, P};
use crate::spec::Spec;

/// Leaves whose `.grad` is partial where they are B. None while gradients are reduced in backward.
#[derive(Default)]
struct Deferred(Mutex<Option<Vec<Tensor>>>);

impl Deferred {
    fn of(runtime: &Runtime) -> MutexGuard<'_, Option<Vec<Tensor>>> {
        let deferred = &runtime.part::<Self>().0;
        deferred.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// From [`no_sync`] on, until this is finished or dropped.
#[must_use = "finish() reduces the gradients"]
pub struct NoSync(Placement);

/// Backwards leave the gradients of leaves that are B partial sums where they are so, until
/// [`NoSync::finish`] reduces them: once for several backwards, in the order in which they first
/// came. Of all leaves that [`distribute`](crate::distribute()) has made, on placements of the same
/// process group. All ranks of it call this.
///
/// # Errors
/// The placement has no process group.
pub fn no_sync(placement: &Placement) -> Result<NoSync> {
    Deferred::of(placement.runtime()?).get_or_insert_default();
    Ok(NoSync(placement.clone()))
}

impl NoSync {
    /// Reduces the gradients that are partial.
    ///
    /// # Errors
    /// A collective fails.
    pub fn finish(self) -> Result<()> {
        let leaves = Deferred::of(self.0.runtime()?).take();
        for leaf in leaves.into_iter().flatten() {
            let gradient = leaf.grad();
            if gradient.defined() {
                let whole = tch::no_grad(|| boxed(&gradient, &spec_of(&leaf)?))?;
                flow_autograd::set_grad(&leaf, Some(&whole))?;
            }
        }
        Ok(())
    }
}

impl Drop for NoSync {
    fn drop(&mut self) {
        if let Ok(runtime) = self.0.runtime() {
            *Deferred::of(runtime) = None;
        }
    }
}

/// Whether the gradient of this leaf, which has the spec `now`, stays as it is for now.
pub(crate) fn defer(leaf: &Tensor, own: &Spec, now: &Spec) -> Result<bool> {
    let mut deferred = Deferred::of(own.placement().runtime()?);
    let Some(leaves) = deferred.as_mut() else { return Ok(false) };
    let mut pairs = own.sbp().iter().zip(now.sbp());
    let stays = own.placement() == now.placement()
        && pairs.all(|(&own, &now)| own == now || (own == B && now == P));
    if !stays || !replicas::is_known(leaf)? {
        return Ok(false);
    }
    if own.id() != now.id() {
        let identity = flow_autograd::identity(leaf);
        if leaves.iter().all(|other| flow_autograd::identity(other) != identity) {
            leaves.push(leaf.shallow_clone());
        }
    }
    Ok(true)
}
