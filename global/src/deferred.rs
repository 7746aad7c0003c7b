//! Gradients that stay partial in backward, and are reduced once: at the end of [`no_sync()`], or by
//! an optimizer that has [`Deferred`] them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use flow_autograd::identity;
use tch::Tensor;

use crate::error::Result;
use crate::handle::{boxed, find_spec, local_of, spec_of, wrap};
use crate::placement::Placement;
use crate::replicas;
use crate::runtime::Runtime;
use crate::sbp::{NdSbp, B};
use crate::spec::Spec;

/// The leaves of a job whose gradients stay partial.
#[derive(Default)]
struct Leaves {
    /// By identity: how many optimizers reduce a leaf's gradient.
    of_optimizers: HashMap<usize, usize>,
    /// From [`no_sync()`] to its end: other leaves that got gradients, in the order of the first ones.
    unsynced: Option<Vec<Tensor>>,
}

impl Leaves {
    fn of(runtime: &Runtime) -> MutexGuard<'_, Self> {
        runtime.part::<Mutex<Self>>().lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Keeps the gradients of an optimizer's leaves partial as long as it lives.
pub struct Deferred {
    /// With the runtime of their placements. Kept, so that no other tensor gets their identity.
    leaves: Vec<(Tensor, Arc<Runtime>)>,
}

impl Deferred {
    /// The gradients of these leaves stay partial.
    ///
    /// # Errors
    /// A leaf is plain.
    pub fn new(leaves: &[Tensor]) -> Result<Self> {
        let mut deferred = Self { leaves: Vec::new() };
        for leaf in leaves {
            let runtime = spec_of(leaf)?.placement().runtime()?.clone();
            *Leaves::of(&runtime).of_optimizers.entry(identity(leaf)).or_default() += 1;
            deferred.leaves.push((leaf.shallow_clone(), runtime));
        }
        Ok(deferred)
    }
}

impl Drop for Deferred {
    fn drop(&mut self) {
        for (leaf, runtime) in &self.leaves {
            let all = &mut Leaves::of(runtime).of_optimizers;
            let left = all.remove(&identity(leaf)).map_or(0, |count| count - 1);
            if left > 0 {
                all.insert(identity(leaf), left);
            }
        }
    }
}

/// From [`no_sync()`] on, until this is finished or dropped.
#[must_use = "finish() reduces the gradients"]
pub struct NoSync(Placement);

/// Backwards leave the gradients of leaves that are B partial sums where they are so, until
/// [`NoSync::finish`] reduces them: once for several backwards, in the order in which they first
/// came. Of all leaves that [`distribute`](crate::distribute()) has made, on placements of the same
/// process group; those of a [`ZeroRedundancyOptimizer`](crate::ZeroRedundancyOptimizer) stay partial
/// until its step. All ranks of the placement call this.
///
/// # Errors
/// The placement has no process group.
pub fn no_sync(placement: &Placement) -> Result<NoSync> {
    Leaves::of(placement.runtime()?).unsynced.get_or_insert_default();
    Ok(NoSync(placement.clone()))
}

impl NoSync {
    /// Reduces the gradients that are partial.
    ///
    /// # Errors
    /// A collective fails.
    pub fn finish(self) -> Result<()> {
        let leaves = Leaves::of(self.0.runtime()?).unsynced.take();
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
            Leaves::of(runtime).unsynced = None;
        }
    }
}

/// Whether somebody reduces the gradient of this leaf later.
fn is_deferred(leaf: &Tensor, runtime: &Runtime) -> Result<bool> {
    let mut leaves = Leaves::of(runtime);
    if leaves.of_optimizers.contains_key(&identity(leaf)) {
        return Ok(true);
    }
    let Some(unsynced) = &mut leaves.unsynced else { return Ok(false) };
    if !replicas::is_known(leaf)? {
        return Ok(false);
    }
    if unsynced.iter().all(|other| identity(other) != identity(leaf)) {
        unsynced.push(leaf.shallow_clone());
    }
    Ok(true)
}

/// What the gradient of a deferred leaf becomes: what that is which it is added to, else the leaf's
/// spec, but partial where the gradient is and the leaf is B. None of other leaves.
pub fn spec_of_gradient(leaf: &Tensor, own: &Spec, gradient: &Spec) -> Result<Option<Arc<Spec>>> {
    let placement = own.placement();
    if placement != gradient.placement() || !is_deferred(leaf, placement.runtime()?)? {
        return Ok(None);
    }
    if let Some(sum) = find_spec(&leaf.grad()) {
        return Ok(Some(sum));
    }
    // On an axis of one rank a sum is there already.
    let axes = own.sbp().iter().zip(gradient.sbp()).zip(placement.shape());
    let kept = axes.map(
        |((&own, &now), &extent)| {
            if own == B && now.is_partial() && extent > 1 {
                now
            } else {
                own
            }
        },
    );
    Ok(Some(Spec::of(placement, &kept.collect::<NdSbp>())?))
}

/// The gradient with this spec, as a tensor that later ones may be added to: no view, and in memory
/// that nothing else uses.
pub fn own(gradient: &Tensor, spec: &Arc<Spec>, exclusive: bool) -> Result<Tensor> {
    let is_boxed = spec_of(gradient)?.id() != spec.id();
    let tensor = boxed(gradient, spec)?;
    let local = local_of(&tensor).map(|local| match exclusive || is_boxed {
        true => local.contiguous(),
        false => local.contiguous().copy(),
    });
    wrap(local.as_ref(), &tensor, spec.clone(), &tensor.size())
}
