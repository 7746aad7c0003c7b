//! What data-parallel training needs of a group beyond collectives: buckets that are reduced piece
//! by piece without waiting, and failures that several ranks explain together.

use std::sync::Arc;
use std::time::Instant;

use flow_kernels::{DType, ReduceOp};

use super::lane::Lane;
use super::ProcessGroup;
use crate::backend::BucketLaunch;
use crate::error::Result;
use crate::shm::arena::Arena;
use crate::shm::segments::Segments;

impl ProcessGroup {
    /// The memory that all ranks of the machine map.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.core().world.arena
    }

    /// A bucket of gradients for [`ProcessGroup::launch_bucket`]: pieces of these lengths, in
    /// elements.
    pub fn segments(&self, bucket: u32, dtype: DType, lengths: Vec<usize>) -> Result<Segments> {
        let full =
            || self.system("segments", "the shared memory region of this rank is full".into());
        self.member(&"segments")?;
        Segments::new(self.arena(), bucket, dtype, lengths).ok_or_else(full)
    }

    /// Launches the reduction of a bucket whose pieces are all in place, after the asynchronous
    /// collectives that were started before. It does not wait for other ranks to launch it; false
    /// if too many buckets are under way already. All ranks launch the same buckets in the same
    /// order; [`ProcessGroup::progress`] and [`ProcessGroup::finish_buckets`] reduce them in place.
    pub fn launch_bucket(&self, segments: &Arc<Segments>, op: ReduceOp) -> Result<bool> {
        let group = self.member(&"launch_bucket")?;
        self.drain(Lane::Collectives);
        let refused = |reason: &str| {
            let reason = format!("bucket {} {reason}", segments.bucket);
            self.caller().argument("launch_bucket", reason)
        };
        if !Arc::ptr_eq(segments.arena(), self.arena()) {
            let reason = "was made by a group of another job; make it with this one's segments()";
            return Err(refused(reason));
        }
        let operation = segments.operation(op);
        // Before anything is said of the state in which a failure has left the bucket.
        group.failure.check_poison(&operation).inspect_err(|_| self.fail_buckets())?;
        let launch = BucketLaunch::new(&group.core, segments, operation);
        let launch = launch
            .ok_or_else(|| refused("is being reduced already, or not all its pieces are placed"))?;
        group.backend.launch_bucket(launch).inspect_err(|_| self.fail_buckets())
    }

    /// Does this rank's share of all launched buckets that all ranks have reached, without waiting.
    pub fn progress(&self) -> Result<()> {
        self.member(&"progress")?.backend.progress_buckets().inspect_err(|_| self.fail_buckets())
    }

    /// Records that the launched buckets have failed, if the group has.
    fn fail_buckets(&self) {
        if self.check("progress").is_err() {
            self.core().recorder.fail(self.core().launched_buckets.records());
        }
    }

    /// Waits for all launched buckets.
    pub fn finish_buckets(&self) -> Result<()> {
        let group = self.member(&"finish_buckets")?;
        group.core.within(self.timeout, || group.finish_buckets())
    }

    /// Waits for a launched bucket, and those that were launched with it. Returns when this rank
    /// saw that the bucket was reduced.
    pub fn wait_bucket(&self, segments: &Segments) -> Result<Instant> {
        self.finish_buckets()?;
        let reason = || "the bucket was not launched since it was made or filled".into();
        segments.finished().ok_or_else(|| self.system("wait_bucket", reason()))
    }

    /// The error of `operation` if this process was forked from the rank.
    pub fn check_process(&self, operation: &str) -> Result<()> {
        self.member(&operation).map(drop)
    }

    /// The error of `operation` if the group has failed.
    pub fn check(&self, operation: &str) -> Result<()> {
        self.member(&operation)?.failure.check_poison(&operation)
    }

    /// Fails the group on all ranks for a reason that one or more of them found out. All ranks call
    /// this, with an empty text if they have nothing to add, and get all texts, by rank in the job.
    pub fn fail_and_collect(&self, operation: &str, own: &str) -> Vec<(usize, String)> {
        self.member(&operation)
            .map_or(Vec::new(), |group| group.failure.fail_and_collect(operation, own))
    }

    /// Whether another rank has called [`ProcessGroup::fail_and_collect`].
    pub fn awaits_error_details(&self) -> bool {
        self.member(&"awaits_error_details").is_ok_and(|group| group.failure.awaits_error_details())
    }

    /// Makes the group unusable on all ranks, whose waits end with `cause`.
    pub fn abort(&self, cause: &str) {
        if let Ok(group) = self.member(&"abort") {
            group.failure.abort(cause);
        }
    }
}
