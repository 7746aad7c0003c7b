//! How a global tensor lies on the ranks.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::placement::Placement;
use crate::sbp::{NdSbp, Sbp};

/// A placement, and an SBP for each of its axes. Equal ones of a job are one object, with a number.
#[derive(Debug)]
pub struct Spec {
    id: u64,
    placement: Placement,
    sbp: NdSbp,
}

impl Spec {
    pub(crate) fn new(id: u64, placement: Placement, sbp: NdSbp) -> Self {
        Self { id, placement, sbp }
    }

    /// A number that no other spec has.
    pub(crate) fn next_id() -> u64 {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        NEXT.fetch_add(1, Ordering::Relaxed)
    }

    /// Different for different specs, for as long as the process runs.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The ranks.
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// One for each axis of the placement.
    pub fn sbp(&self) -> &[Sbp] {
        &self.sbp
    }
}
