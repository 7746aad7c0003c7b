//! The layout of a global tensor: placement and SBP.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::error::Result;
use crate::placement::Placement;
use crate::sbp::{NdSbp, Sbp};

/// A placement, and an SBP for each of its axes. Equal ones of a job are one object, with a number.
#[derive(Debug)]
pub struct Spec {
    id: u64,
    placement: Placement,
    sbp: NdSbp,
}

/// A placement's ranks, its shape, the names of its axes; and SBPs.
type Key = (Vec<usize>, Vec<usize>, Vec<String>, NdSbp);

/// Specs of a job, with numbers that stay: plans know specs by them.
#[derive(Default)]
struct Specs(Mutex<HashMap<Key, (u64, Weak<Spec>)>>);

impl Spec {
    /// Returns the spec of this placement and SBP.
    ///
    /// # Errors
    /// The placement has no process group.
    pub fn of(placement: &Placement, sbp: &[Sbp]) -> Result<Arc<Self>> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let ranks = placement.ranks().to_vec();
        let shape = placement.shape().to_vec();
        let key = (ranks, shape, placement.names().to_vec(), sbp.to_vec());
        let specs = &placement.runtime()?.part::<Specs>().0;
        let mut specs = specs.lock().unwrap_or_else(PoisonError::into_inner);
        let (id, known) =
            specs.entry(key).or_insert_with(|| (NEXT.fetch_add(1, Ordering::Relaxed), Weak::new()));
        Ok(known.upgrade().unwrap_or_else(|| {
            let spec = Arc::new(Self { id: *id, placement: placement.clone(), sbp: sbp.to_vec() });
            *known = Arc::downgrade(&spec);
            spec
        }))
    }

    /// Returns the spec with this number, which [`Spec::of`] has given to the same placement and
    /// SBP.
    pub fn again(id: u64, placement: &Placement, sbp: &[Sbp]) -> Arc<Self> {
        Arc::new(Self { id, placement: placement.clone(), sbp: sbp.to_vec() })
    }

    /// Returns a number that differs for different specs, for as long as the process runs.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Returns the ranks.
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Returns the SBPs, one for each axis of the placement.
    pub fn sbp(&self) -> &[Sbp] {
        &self.sbp
    }
}
