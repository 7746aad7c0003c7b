//! Leaves whose gradients stay partial in backward, until somebody reduces them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tch::Tensor;

use crate::error::Result;
use crate::handle::{boxed, find_spec, local_of, spec_of, wrap};
use crate::runtime::Runtime;
use crate::sbp::{NdSbp, B};
use crate::spec::Spec;

/// Those of a job, by identity: how many keep each one's gradient partial.
#[derive(Default)]
struct Registry(Mutex<HashMap<usize, usize>>);

impl Registry {
    fn lock(&self) -> MutexGuard<'_, HashMap<usize, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Keeps gradients partial as long as it lives.
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
            let registry = runtime.part::<Registry>();
            *registry.lock().entry(flow_autograd::identity(leaf)).or_default() += 1;
            deferred.leaves.push((leaf.shallow_clone(), runtime));
        }
        Ok(deferred)
    }
}

impl Drop for Deferred {
    fn drop(&mut self) {
        for (leaf, runtime) in &self.leaves {
            let registry = runtime.part::<Registry>();
            let (mut registry, leaf) = (registry.lock(), flow_autograd::identity(leaf));
            let left = registry.get(&leaf).map_or(0, |&count| count - 1);
            match left {
                0 => drop(registry.remove(&leaf)),
                left => drop(registry.insert(leaf, left)),
            }
        }
    }
}

/// What the gradient of a deferred leaf becomes: what that is which it is added to, else the leaf's
/// spec, but partial where the gradient is and the leaf is B. None of other leaves.
pub fn spec_of_gradient(leaf: &Tensor, own: &Spec, gradient: &Spec) -> Result<Option<Arc<Spec>>> {
    let placement = own.placement();
    let is_deferred = || -> Result<bool> {
        let registry = placement.runtime()?.part::<Registry>();
        Ok(registry.lock().contains_key(&flow_autograd::identity(leaf)))
    };
    if placement != gradient.placement() || !is_deferred()? {
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
