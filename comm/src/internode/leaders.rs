//! A leader's connections to the leaders of other nodes.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::transport::Connections;

/// A leader's connections, one user at a time.
pub struct LeaderConnections(Mutex<LeaderState>);

/// The connections, and memory that their user needs.
pub struct LeaderState {
    /// The connections to the other leaders, by node.
    pub leaders: Box<dyn Connections>,
    /// Memory in which data arrives that is to be reduced.
    pub scratch: Vec<u64>,
    /// The frames of descriptors, by node.
    pub frames: Vec<Vec<u8>>,
}

impl LeaderConnections {
    /// Connections that nobody uses yet.
    pub fn new(leaders: Box<dyn Connections>) -> Self {
        Self(Mutex::new(LeaderState { leaders, scratch: Vec::new(), frames: Vec::new() }))
    }

    /// Waits for the thread that uses them.
    pub fn lock(&self) -> MutexGuard<'_, LeaderState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns None while a thread uses them: that thread sees for itself how they end.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, LeaderState>> {
        self.0.try_lock().ok()
    }
}
