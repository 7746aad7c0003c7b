//! The process groups that boxing needs, made when first used.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use flow_tensor::ProcessGroup;

use crate::error::Result;

/// Groups of ranks of a job, by their ordered ranks.
#[derive(Clone)]
pub struct Groups {
    world: ProcessGroup,
    made: Arc<Mutex<HashMap<Vec<usize>, ProcessGroup>>>,
    moved: Arc<AtomicU64>,
}

impl Groups {
    /// Groups of ranks of `world`.
    pub fn new(world: &ProcessGroup) -> Self {
        Self { world: world.clone(), made: Arc::default(), moved: Arc::default() }
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.world.rank()
    }

    /// The group of these ranks, in this order. The first time, all of them call this.
    ///
    /// # Errors
    /// The group cannot be made: a rank is gone, or others do not call this in time.
    pub fn group(&self, ranks: &[usize]) -> Result<ProcessGroup> {
        if let Some(group) = self.made().get(ranks) {
            return Ok(group.clone());
        }
        let group = self.world.new_group_of(ranks, &format!("boxing {ranks:?}"))?;
        self.made().insert(ranks.to_vec(), group.clone());
        Ok(group)
    }

    /// Counts bytes that boxing moves.
    pub(crate) fn add_moved(&self, bytes: usize) {
        self.moved.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Bytes that all boxings so far have moved between ranks: what all ranks together receive.
    pub fn moved(&self) -> u64 {
        self.moved.load(Ordering::Relaxed)
    }

    fn made(&self) -> std::sync::MutexGuard<'_, HashMap<Vec<usize>, ProcessGroup>> {
        self.made.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
