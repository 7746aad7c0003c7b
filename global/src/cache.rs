//! Decisions for operations and boxings, kept to be used again.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustc_hash::FxHashMap;

/// More entries than this are forgotten: arguments that differ at each step make new ones.
const MAX_ENTRIES: usize = 1 << 16;

/// Maps a key, a list of numbers, to a shared value. It forgets all when it is full.
pub struct Cache<T>(Mutex<FxHashMap<Box<[u64]>, Arc<T>>>);

impl<T> Default for Cache<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T> Cache<T> {
    /// Returns the value of a key.
    pub fn get(&self, key: &[u64]) -> Option<Arc<T>> {
        self.lock().get(key).cloned()
    }

    /// Keeps a value.
    pub fn insert(&self, key: &[u64], value: &Arc<T>) {
        let mut entries = self.lock();
        if entries.len() >= MAX_ENTRIES {
            entries.clear();
        }
        entries.insert(key.into(), value.clone());
    }

    fn lock(&self) -> MutexGuard<'_, FxHashMap<Box<[u64]>, Arc<T>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
