//! Memory for what the workers keep over a restart. It is the launcher's: it outlives the workers, and is
//! gone with the launcher, however that dies.

use std::ffi::OsString;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::fs::{MemfdFlags, memfd_create};

/// Names the memory of a worker.
const OWN: &str = "FLOW_CHECKPOINT_MEMORY";
/// Names the memory of all workers of this node, of those that have ended as well.
const ALL: &str = "FLOW_CHECKPOINT_MEMORIES";

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

    /// Returns the variables with the path of a worker's memory, and with those of all. They are empty if there is
    /// none, so that a worker does not use the memory of a launcher around this one.
    ///
    /// A worker opens the paths. An inherited descriptor would be lost where a program between closes it,
    /// and would keep the memory alive in processes that know nothing of it.
    pub fn variables(&self, local_rank: u32) -> [(&'static str, OsString); 2] {
        let launcher = std::process::id();
        let path = |file: &OwnedFd| format!("/proc/{launcher}/fd/{}", file.as_raw_fd());
        let paths: Vec<String> = self.0.iter().map(path).collect();
        let own = paths.get(local_rank as usize).cloned().unwrap_or_default();
        [(OWN, own.into()), (ALL, paths.join(":").into())]
    }
}
