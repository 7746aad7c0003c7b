//! Buckets of gradients: pieces of memory that are reduced as one during backward, without waiting.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use flow_kernels::{DType, ReduceOp};

use super::ProcessGroup;
use super::lane::Lane;
use super::member::Member;
use crate::collectives::launch::BucketLaunch;
use crate::error::{Error, Result};
use crate::operation_context::OperationContext;
use crate::shm::arena::no_room;
use crate::shm::segments::Segments;
use crate::trace::{self, BucketTensors};
use crate::virtual_ranks::{NodeTree, VirtualRanks};

impl Member {
    /// Returns a bucket of gradients for [`Member::launch_bucket`]: pieces of these lengths, in
    /// elements.
    pub fn segments(&self, bucket: u32, dtype: DType, lengths: Vec<usize>) -> Result<Segments> {
        self.new_segments(bucket, dtype, lengths, None)
    }

    /// Returns a bucket as [`Member::segments`] does, of which each rank gets other elements: this one
    /// gets `parts`, a range of each piece. The parts of a machine's ranks cover each piece once: over
    /// several machines, each has all. [`Segments::set_destination`] says where they go.
    pub fn scattered_segments(
        &self,
        bucket: u32,
        dtype: DType,
        lengths: Vec<usize>,
        parts: Vec<Range<usize>>,
    ) -> Result<Segments> {
        let fit =
            parts.iter().zip(&lengths).all(|(part, &length)| part.is_empty() || part.end <= length);
        if !fit || parts.len() != lengths.len() {
            let reason =
                format!("the parts {parts:?} are not of pieces of the lengths {lengths:?}");
            return Err(self.caller().argument("scattered_segments", reason));
        }
        self.new_segments(bucket, dtype, lengths, Some(parts))
    }

    /// Returns a bucket as [`Member::segments`] does, whose pieces are added up in the tree of virtual ranks:
    /// this rank's are the sums of its own. An average is over all virtual ranks. The bits depend on the number
    /// of virtual ranks, and not on that of ranks or on their machines. `dtype` is `F32` or `F64`.
    pub fn virtual_segments(
        &self,
        bucket: u32,
        dtype: DType,
        lengths: Vec<usize>,
        virtual_ranks: usize,
    ) -> Result<Segments> {
        let mut ranks = VirtualRanks::new(virtual_ranks, self.world_size());
        if !matches!(dtype, DType::F32 | DType::F64) {
            ranks = Err(format!("virtual ranks add up f32 or f64, and this is {dtype}"));
        }
        let ranks = ranks.map_err(|reason| self.caller().argument("virtual_segments", reason))?;
        let tree = NodeTree::new(&ranks, &self.core().nodes);
        Ok(self.new_segments(bucket, dtype, lengths, None)?.in_tree(tree))
    }

    fn new_segments(
        &self,
        bucket: u32,
        dtype: DType,
        lengths: Vec<usize>,
        parts: Option<Vec<Range<usize>>>,
    ) -> Result<Segments> {
        self.parts(&"segments")?;
        Segments::new(self.arena(), bucket, dtype, lengths, parts)
            .ok_or_else(|| self.system("segments", no_room("a bucket", self.core().world.rank)))
    }

    /// Launches the reduction of a bucket whose pieces are all in place, after the asynchronous
    /// collectives that were started before. It does not wait for other ranks to launch it; false
    /// if too many buckets are under way already. All ranks launch the same buckets in the same
    /// order; [`Member::progress`] and [`ProcessGroup::finish_buckets`] reduce them in place.
    pub fn launch_bucket(&self, segments: &Arc<Segments>, op: ReduceOp) -> Result<bool> {
        let group = self.parts(&"launch_bucket")?;
        self.drain(Lane::Collectives);
        if !Arc::ptr_eq(segments.arena(), self.arena()) {
            let reason = "was made by a group of another job; make it with this one's segments()";
            return Err(self.refused(segments, reason));
        }
        if let Some(tree) = &segments.tree {
            if !matches!(op, ReduceOp::Sum | ReduceOp::Avg) {
                return Err(self.refused(segments, "is of virtual ranks: sum or average it"));
            }
            if tree.nodes != self.core().nodes {
                let reason = "is of virtual ranks of another group: make it with this one's \
                              virtual_segments()";
                return Err(self.refused(segments, reason));
            }
        }
        let operation = segments.operation(op);
        // Before anything is said of the state in which a failure has left the bucket.
        group.failure.check_poison(&operation).inspect_err(|_| self.fail_buckets())?;
        let launch = BucketLaunch::new(&group.core, segments, operation).ok_or_else(|| {
            self.refused(segments, "is being reduced already, or not all its pieces are placed")
        })?;
        group.host.buckets.launch(launch).inspect_err(|_| self.fail_buckets())
    }

    /// Notes in the timeline, if there is one, which tensors were in the group's buckets in the
    /// backward of step `step`, and when their gradients came.
    pub fn trace_buckets(&self, step: u64, buckets: Vec<BucketTensors>) {
        trace::add_buckets(&self.core().name, step, buckets);
    }

    /// Does this rank's share of all launched buckets that all ranks have reached, without waiting.
    pub fn progress(&self) -> Result<()> {
        let group = self.parts(&"progress")?;
        group.host.buckets.progress().inspect_err(|_| self.fail_buckets())
    }

    /// Returns the error of a bucket that cannot be launched.
    fn refused(&self, segments: &Segments, reason: &str) -> Error {
        self.caller().argument("launch_bucket", format!("bucket {} {reason}", segments.bucket))
    }

    /// Records that the launched buckets have failed, if the group has.
    fn fail_buckets(&self) {
        if self.check("progress").is_err() {
            self.core().recorder.fail(self.core().launched_buckets.records());
        }
    }
}

impl ProcessGroup {
    /// Waits for all launched buckets.
    pub fn finish_buckets(&self) -> Result<()> {
        let group = self.parts(&"finish_buckets")?;
        OperationContext::within(self.timeout, || group.finish_buckets())
    }
}

impl Segments {
    /// Waits for all launched buckets of `group`. Returns when this rank saw that this one was reduced.
    pub fn wait(&self, group: &ProcessGroup) -> Result<Instant> {
        group.finish_buckets()?;
        self.finished_in(group)
    }

    /// Waits for this launched bucket and those that were launched before it, but not for later ones.
    /// Returns when this rank saw that the bucket was reduced.
    pub fn wait_in_turn(&self, group: &ProcessGroup) -> Result<Instant> {
        let parts = group.parts(&"wait_in_turn")?;
        OperationContext::within(group.timeout, || parts.finish_bucket(self))?;
        self.finished_in(group)
    }

    fn finished_in(&self, group: &ProcessGroup) -> Result<Instant> {
        self.finished().ok_or_else(|| {
            let reason = "the bucket was not launched since it was made or filled";
            group.system("waiting for a bucket", reason.into())
        })
    }
}
