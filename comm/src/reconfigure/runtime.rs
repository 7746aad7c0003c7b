//! What the agreement needs of the system that it runs on.

use std::time::{Duration, Instant};

use flow_store::Result as StoreResult;

use crate::bootstrap::JoinError;
use crate::bootstrap::lineage::{Lineage, Members, Process};
use crate::stall::Stall;

/// The store, the clock, the processes of this host and the join of members: the real ones, or those
/// of a simulation. The store's operations are those of [`flow_store::Store`].
pub trait Runtime {
    /// What members have when they have met.
    type Group;

    fn now(&self) -> Instant;

    fn set(&self, key: &str, value: &[u8]) -> StoreResult<()>;

    fn try_get(&self, key: &str) -> StoreResult<Option<Vec<u8>>>;

    fn wait(&self, keys: &[String], timeout: Duration) -> StoreResult<()>;

    /// Sets `key` unless it is set; returns whether it was not.
    fn set_first(&self, key: &str, value: &[u8]) -> StoreResult<bool>;

    /// Whether a process of this host has ended.
    fn has_ended(&self, process: &Process) -> bool;

    fn is_interrupted(&self) -> bool;

    /// Begins a wait that is reported when it becomes long, if somebody listens.
    fn begin_wait(&self) -> Option<Stall<'_>>;

    /// Meets the members, of which this process is one, and returns the group of all when all have it.
    fn meet(
        &self,
        lineage: &Lineage,
        members: &Members,
        own: &Process,
        deadline: Instant,
    ) -> Result<Self::Group, JoinError>;
}
