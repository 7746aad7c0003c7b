//! The gradients' hooks reduce buckets, where no core is to spare for a thread.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use flow_comm::{ProcessGroup, ReduceOp, Result, Segments};

/// A hook launches its bucket and reduces its share of those that all ranks have launched, without
/// waiting; [`HookProgress::wait`] does the rest at the end of backward.
pub(super) struct HookProgress {
    group: ProcessGroup,
    op: ReduceOp,
    /// Buckets that the group has no slot for yet: only so many can be under way at a time.
    queue: Mutex<VecDeque<Arc<Segments>>>,
}

impl HookProgress {
    /// Returns a queue without buckets.
    pub fn new(group: ProcessGroup, op: ReduceOp) -> Self {
        Self { group, op, queue: Mutex::default() }
    }

    /// Launches a bucket, after those that still wait for a slot of the group.
    pub fn launch(&self, bucket: &Arc<Segments>) -> Result<()> {
        self.queue().push_back(Arc::clone(bucket));
        self.launch_queued()?;
        Ok(())
    }

    /// Launches the buckets that the group has slots for. Returns whether those are all.
    fn launch_queued(&self) -> Result<bool> {
        let mut queue = self.queue();
        while let Some(bucket) = queue.front() {
            if !self.group.launch_bucket(bucket, self.op)? {
                return Ok(false);
            }
            queue.pop_front();
        }
        Ok(true)
    }

    /// Does this rank's share of the launched buckets, without waiting.
    pub fn advance(&self) -> Result<()> {
        self.launch_queued()?;
        self.group.progress()
    }

    /// Launches all buckets, and waits for slots where need be.
    pub fn flush(&self) -> Result<()> {
        while !self.launch_queued()? {
            self.group.finish_buckets()?;
        }
        Ok(())
    }

    /// Waits until a launched bucket is reduced. Returns when that was.
    pub fn wait(&self, bucket: &Segments) -> Result<Instant> {
        self.flush()?;
        bucket.wait(&self.group)
    }

    /// Waits until a launched bucket is reduced, but not for those that were launched later. Returns
    /// when that was.
    pub fn wait_in_turn(&self, bucket: &Segments) -> Result<Instant> {
        if let Some(finished) = bucket.finished() {
            return Ok(finished);
        }
        self.flush()?;
        bucket.wait_in_turn(&self.group)
    }

    fn queue(&self) -> MutexGuard<'_, VecDeque<Arc<Segments>>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
