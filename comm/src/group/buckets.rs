//! What data-parallel training needs of a group beyond collectives: buckets that are reduced piece
//! by piece without waiting, and failures that several ranks explain together.

use std::sync::{Arc, PoisonError};
use std::time::Instant;

use flow_kernels::{DType, ReduceOp};

use super::ProcessGroup;
use crate::error::Result;
use crate::shm::arena::Arena;
use crate::shm::reduction::Segments;
use crate::work::Worker;

impl ProcessGroup {
    /// The memory that all ranks of the machine map.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.engine().core.world.arena
    }

    /// A bucket of gradients for [`ProcessGroup::launch_bucket`]: pieces of these lengths, in
    /// elements.
    pub fn segments(&self, bucket: u32, dtype: DType, lengths: Vec<usize>) -> Result<Segments> {
        let full =
            || self.system("segments", "the shared memory region of this rank is full".into());
        self.member(&"segments")?;
        Segments::new(self.arena(), bucket, dtype, lengths).ok_or_else(full)
    }

    /// Announces a bucket whose pieces are all in place, without waiting; false if too many are
    /// under way already. All ranks post the same buckets in the same order;
    /// [`ProcessGroup::progress`] and [`ProcessGroup::finish_buckets`] reduce them in place.
    pub fn launch_bucket(&self, segments: &Arc<Segments>, op: ReduceOp) -> Result<bool> {
        let (posted, bucket) = self.member(&"launch_bucket")?.launch_bucket(segments, op)?;
        if let Some(bucket) = bucket {
            let engine = Arc::clone(&self.inner.engine);
            let mut leader_thread =
                self.inner.leader_thread.lock().unwrap_or_else(PoisonError::into_inner);
            let leader_thread = match &mut *leader_thread {
                Some(leader_thread) => leader_thread,
                none => {
                    let started = Worker::start(self.rank());
                    let fail = |e| {
                        self.engine().failure.fail(
                            self.system("launch_bucket", format!("cannot start a thread: {e}")),
                        )
                    };
                    none.insert(started.map_err(fail)?)
                }
            };
            // An error is the group's, and found by whoever waits for the bucket.
            drop(leader_thread.submit(self.rank(), "launch_bucket", move || {
                engine.reduce_bucket_between_nodes(&bucket)
            }));
        }
        Ok(posted)
    }

    /// Does this rank's share of all posted buckets that all ranks have reached, without waiting.
    pub fn progress(&self) -> Result<()> {
        self.member(&"progress")?.progress()
    }

    /// Waits for all posted buckets.
    pub fn finish_buckets(&self) -> Result<()> {
        self.member(&"finish_buckets")?.finish_buckets()
    }

    /// Waits for a posted bucket, and those that were posted with it. Returns when this rank saw
    /// that the bucket was reduced.
    pub fn wait_bucket(&self, segments: &Segments) -> Result<Instant> {
        self.finish_buckets()?;
        let reason = || "the bucket was not posted since it was made or filled".into();
        segments.finished().ok_or_else(|| self.system("wait_bucket", reason()))
    }

    /// The error of `operation` in a process that was forked from this rank; fine in the rank
    /// itself.
    pub fn check_process(&self, operation: &str) -> Result<()> {
        self.member(&operation).map(drop)
    }

    /// The error of `operation`, which is about to begin, if the group has failed.
    pub fn check(&self, operation: &str) -> Result<()> {
        self.member(&operation)?.failure.check_poison(&operation)
    }

    /// Fails the group on all ranks because of something one or more of them found out: all ranks
    /// call this (those with nothing to add with an empty text) and get what all said, by rank in
    /// the job.
    pub fn fail_and_collect(&self, operation: &str, own: &str) -> Vec<(usize, String)> {
        self.member(&operation)
            .map_or(Vec::new(), |engine| engine.failure.fail_and_collect(operation, own))
    }

    /// Whether another rank has called [`ProcessGroup::fail_and_collect`].
    pub fn awaits_error_details(&self) -> bool {
        self.member(&"awaits_error_details")
            .is_ok_and(|engine| engine.failure.awaits_error_details())
    }

    /// Makes the group unusable on all ranks, whose waits end with `cause`.
    pub fn abort(&self, cause: &str) {
        if let Ok(engine) = self.member(&"abort") {
            engine.failure.abort(cause);
        }
    }
}
