//! What joins, and the agreement on members, need of the system that they run on.

use std::time::{Duration, Instant};

use flow_store::{Result as StoreResult, Store};

use crate::{interrupt, liveness};

/// The store, the clock and the processes of this host: the real ones, or those of a simulation. The
/// store's operations are those of [`Store`].
pub trait System {
    fn now(&self) -> Instant;

    fn set(&self, key: &str, value: &[u8]) -> StoreResult<()>;

    fn try_get(&self, key: &str) -> StoreResult<Option<Vec<u8>>>;

    fn get(&self, key: &str, timeout: Duration) -> StoreResult<Vec<u8>>;

    fn wait(&self, keys: &[String], timeout: Duration) -> StoreResult<()>;

    /// Sets `key` unless it is set; returns the value that is there instead, if one is.
    fn set_first(&self, key: &str, value: &[u8]) -> StoreResult<Option<Vec<u8>>>;

    /// Whether a process of this host has ended; 0 is none.
    fn has_ended(&self, pid: u32) -> bool;

    /// Whether the program wants to stop waiting. This is said once.
    fn is_interrupted(&self) -> bool;
}

impl System for Store {
    fn now(&self) -> Instant {
        Instant::now()
    }

    fn set(&self, key: &str, value: &[u8]) -> StoreResult<()> {
        self.set(key, value)
    }

    fn try_get(&self, key: &str) -> StoreResult<Option<Vec<u8>>> {
        self.try_get(key)
    }

    fn get(&self, key: &str, timeout: Duration) -> StoreResult<Vec<u8>> {
        self.get(key, timeout)
    }

    fn wait(&self, keys: &[String], timeout: Duration) -> StoreResult<()> {
        self.wait(keys, timeout)
    }

    fn set_first(&self, key: &str, value: &[u8]) -> StoreResult<Option<Vec<u8>>> {
        let set = self.compare_and_set(key, None, value)?;
        Ok(set.err().map(Option::unwrap_or_default))
    }

    fn has_ended(&self, pid: u32) -> bool {
        liveness::has_ended(pid)
    }

    fn is_interrupted(&self) -> bool {
        interrupt::is_interrupted()
    }
}
