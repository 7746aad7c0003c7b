//! Memory for what the workers keep over a restart. It is the launcher's: it outlives the workers, and is
//! gone with the launcher, however that dies.

use std::ffi::OsString;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::fs::{MemfdFlags, memfd_create};

/// Names the memory of a worker.
const VARIABLE: &str = "FLOW_CHECKPOINT_MEMORY";

/// A memfd for each worker of this node, by local rank. One that no worker writes to has no pages.
pub struct CheckpointMemory(Vec<OwnedFd>);

impl CheckpointMemory {
    /// Makes the memfds; none where the kernel refuses.
    pub fn new(local_world_size: u32) -> CheckpointMemory {
        let files = (0..local_world_size)
            .map(|_| memfd_create(c"flow-checkpoint", MemfdFlags::CLOEXEC))
            .collect::<Result<_, _>>();
        CheckpointMemory(files.unwrap_or_else(|error| {
            // Most programs keep nothing there. One that does is told by its first call.
            log::info!("no memory for checkpoints: memfd_create: {error}");
            Vec::new()
        }))
    }

    /// Returns the variable with the path of a worker's memory. It is empty if there is none, so that a
    /// worker does not use the memory of a launcher around this one.
    ///
    /// A worker opens the path. An inherited descriptor would be lost where a program between closes it,
    /// and would keep the memory alive in processes that know nothing of it.
    pub fn variable(&self, local_rank: u32) -> (&'static str, OsString) {
        let path = self
            .0
            .get(local_rank as usize)
            .map(|file| format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()));
        (VARIABLE, path.unwrap_or_default().into())
    }
}
