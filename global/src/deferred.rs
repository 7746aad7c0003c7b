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
use crate::sbp::{B, NdSbp};
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
    /// Has the gradients of these leaves stay partial.
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

/// A guard of [`no_sync()`]: gradients stay partial until this is finished or dropped.
#[must_use = "finish() reduces the gradients"]
pub struct PartialGradients(Placement);

/// Backwards leave the gradients of leaves that are B partial sums where they are so, until
/// [`PartialGradients::finish`] reduces them. It does so once for several backwards, in the order
/// in which they first came. Of all leaves that [`distribute`](crate::distribute()) has made, on
/// placements of the same process group; those of a
/// [`ShardedOptimizer`](crate::ShardedOptimizer) stay partial until its step. All
/// ranks of the placement call this.
///
/// # Errors
/// The placement has no process group.
pub fn no_sync(placement: &Placement) -> Result<PartialGradients> {
    Leaves::of(placement.runtime()?).unsynced.get_or_insert_default();
    Ok(PartialGradients(placement.clone()))
}

impl PartialGradients {
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

impl Drop for PartialGradients {
    fn drop(&mut self) {
        if let Ok(runtime) = self.0.runtime() {
            Leaves::of(runtime).unsynced = None;
        }
    }
}

/// Returns whether somebody reduces the gradient of this leaf later.
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

/// Returns the spec that a deferred leaf's gradient gets; None for other leaves. It is the spec of the
/// gradient already in `.grad`, or else the leaf's. On each axis where that is B and the new gradient is
/// partial, it becomes partial, and so does the gradient in `.grad`, without communication.
pub fn spec_of_gradient(leaf: &Tensor, own: &Spec, gradient: &Spec) -> Result<Option<Arc<Spec>>> {
    let placement = own.placement();
    if placement != gradient.placement() || !is_deferred(leaf, placement.runtime()?)? {
        return Ok(None);
    }
    let sum = find_spec(&leaf.grad());
    let before = sum.as_deref().unwrap_or(own).sbp();
    let mut kept: NdSbp = before.to_vec();
    for (axis, &now) in gradient.sbp().iter().enumerate() {
        // On an axis of one rank a sum is there already.
        if kept[axis] == B && now.is_partial() && placement.shape()[axis] > 1 {
            kept[axis] = now;
        }
    }
    let kept = Spec::of(placement, &kept)?;
    if sum.is_some_and(|sum| sum.id() != kept.id()) {
        let partial = tch::no_grad(|| self::own(&leaf.grad(), &kept, false))?;
        flow_autograd::set_grad(leaf, Some(&partial))?;
    }
    Ok(Some(kept))
}

/// Returns the gradient with this spec, as a tensor that later ones may be added to: no view, and
/// in memory that nothing else uses.
pub fn own(gradient: &Tensor, spec: &Arc<Spec>, exclusive: bool) -> Result<Tensor> {
    let is_boxed = spec_of(gradient)?.id() != spec.id();
    let tensor = boxed(gradient, spec)?;
    let local = local_of(&tensor).map(|local| {
        if exclusive || is_boxed { local.contiguous() } else { local.contiguous().copy() }
    });
    wrap(local.as_ref(), &tensor, spec.clone(), &tensor.size())
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use flow_tensor::ProcessGroup;
    use tch::nn::{Init, VarStore};
    use tch::{Device, Kind};

    use super::*;
    use crate::sbp::S;
    use crate::{GlobalTensor, distribute, ones};

    /// The gradients before are none, zeros, zeros, and those of the step before.
    fn trained(group: ProcessGroup) {
        group.set_timeout(Duration::from_secs(60));
        let placement = Placement::all(&group).unwrap();
        let vs = VarStore::new(Device::Cpu);
        let mut weight = vs.root().var("weight", &[4, 4], Init::Const(0.5));
        distribute(&vs, &placement, |_, _| [B]).unwrap();
        let received = || placement.runtime().unwrap().groups.received();
        let mut of_steps = Vec::new();
        for step in 0..4 {
            if step < 3 {
                weight.zero_grad();
            }
            let once = no_sync(&placement).unwrap();
            let before = received();
            for _ in 0..3 {
                let x = ones([4, 4], Kind::Float, &placement, [S(0)]).unwrap();
                x.matmul(&weight).sum(Kind::Float).backward();
            }
            assert_eq!(received(), before, "step {step}");
            once.finish().unwrap();
            of_steps.push(received() - before);
        }
        // Those of one gradient.
        assert!(
            of_steps[0] > 0 && of_steps.iter().all(|&bytes| bytes == of_steps[0]),
            "{of_steps:?}"
        );
        let gradient = weight.grad();
        assert_eq!(gradient.sbp().unwrap(), [B]);
        assert_eq!(
            gradient.to_local().unwrap(),
            Tensor::full([4, 4], 24, (Kind::Float, Device::Cpu))
        );
    }

    #[test]
    fn gradients_are_reduced_once_whatever_they_are_added_to() {
        let groups = ProcessGroup::in_process(2).unwrap();
        thread::scope(|scope| {
            groups.into_iter().for_each(|group| drop(scope.spawn(|| trained(group))))
        });
    }
}
