//! A bucket from its launch to its end.

use std::sync::Arc;

use crate::descriptor::OpDescriptor;
use crate::group::core::GroupCore;
use crate::shm::segments::Segments;
use crate::trace::RecordId;

/// A bucket that is about to be launched. Its pieces are in place and stay there; if this is
/// dropped instead, nothing was done.
pub struct BucketLaunch<'a> {
    core: &'a Arc<GroupCore>,
    pub segments: &'a Arc<Segments>,
    /// Still without its sequence number.
    pub operation: OpDescriptor,
}

impl<'a> BucketLaunch<'a> {
    /// Returns None if the bucket is being reduced already, or not all its pieces are in place.
    pub fn new(
        core: &'a Arc<GroupCore>,
        segments: &'a Arc<Segments>,
        operation: OpDescriptor,
    ) -> Option<Self> {
        segments.begin().then(|| Self { core, segments, operation })
    }

    /// Gives the operation its sequence number, and records its begin.
    pub fn begin(mut self) -> LaunchedBucket {
        let mut start = self.core.assign_sequence(&mut self.operation);
        start.queued = self.segments.take_queued().or(start.queued);
        self.core.count_collective();
        let record = self.core.recorder.start(&start);
        self.core.launched_buckets.add(record);
        let bucket = LaunchedBucket {
            record,
            core: Arc::clone(self.core),
            segments: Arc::clone(self.segments),
            operation: self.operation,
        };
        std::mem::forget(self); // it holds references only
        bucket
    }
}

impl Drop for BucketLaunch<'_> {
    fn drop(&mut self) {
        self.segments.cancel();
    }
}

/// A bucket under way.
pub struct LaunchedBucket {
    core: Arc<GroupCore>,
    record: RecordId,
    pub segments: Arc<Segments>,
    pub operation: OpDescriptor,
}

impl LaunchedBucket {
    /// Notes that all ranks have the reduced pieces: lets go of their memory, and records the end.
    pub fn finish(&self) {
        self.segments.finish();
        self.core.recorder.finish(self.record);
        // Last: a thread that finds no bucket under way takes the results.
        self.core.launched_buckets.remove(self.record);
    }
}
