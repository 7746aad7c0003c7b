//! The process groups that boxing needs, made when first used.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use flow_tensor::ProcessGroup;

use crate::error::Result;

/// Groups of ranks of a job, by their ordered ranks.
#[derive(Clone)]
pub struct Groups {
    world: ProcessGroup,
    made: Arc<Mutex<HashMap<Vec<usize>, ProcessGroup>>>,
    /// Ranks of groups that have failed because their ranks called different operations.
    mismatched: Arc<Mutex<HashSet<Vec<usize>>>>,
    received: Arc<AtomicU64>,
    /// Of these groups, and no others of the process.
    number: u64,
    pub(crate) reads_peers: bool,
}

impl Groups {
    /// Groups of ranks of `world`.
    pub fn new(world: &ProcessGroup) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self {
            world: world.clone(),
            made: Arc::default(),
            mismatched: Arc::default(),
            received: Arc::default(),
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            reads_peers: true,
        }
    }

    /// Groups as [`Groups::new`] makes them, but boxing goes by collectives even where ranks could read each other's
    /// memory, as it does between machines.
    pub fn by_collectives(world: &ProcessGroup) -> Self {
        Self { reads_peers: false, ..Self::new(world) }
    }

    /// Returns this rank.
    pub fn rank(&self) -> usize {
        self.world.rank()
    }

    /// Returns the group of these ranks, in this order. The first time, all of them call this.
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

    /// Makes the groups unusable on all their ranks.
    pub(crate) fn abort(&self, cause: &str) {
        self.made().values().for_each(|group| group.abort(cause));
    }

    /// Notes that the group of these ranks has failed because they called different operations.
    /// Returns whether this rank did not know.
    pub(crate) fn is_first_mismatch(&self, ranks: &[usize]) -> bool {
        let mut mismatched = self.mismatched.lock().unwrap_or_else(PoisonError::into_inner);
        mismatched.insert(ranks.to_vec())
    }

    /// Returns how many bytes this rank has received from others by boxing.
    pub fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    /// Returns a number that other process groups do not have.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    pub(crate) fn count(&self, bytes: usize) {
        self.received.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    fn made(&self) -> std::sync::MutexGuard<'_, HashMap<Vec<usize>, ProcessGroup>> {
        self.made.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
