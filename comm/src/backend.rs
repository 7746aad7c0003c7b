//! What a group's operations on the host run on.
//!
//! A process group checks arguments, keeps operations in order and offers asynchronous forms; its
//! back-end moves the data. Who the members are (`GroupCore`) and how a group fails (`Failure`) is
//! the same for all back-ends.

use std::sync::Arc;

use crate::descriptor::{MessageDescriptor, OpDescriptor};
use crate::error::Result;
use crate::failure::Failure;
use crate::group::core::GroupCore;
use crate::shm::segments::Segments;
use crate::trace::RecordId;

/// Memory of a caller, valid for the length of the call, or none.
#[derive(Clone, Copy)]
pub struct BufferView {
    pub data: *mut u8,
    pub bytes: usize,
}

impl BufferView {
    /// No memory, of ranks that contribute nothing, or receive nothing.
    pub const NONE: BufferView = BufferView { data: std::ptr::null_mut(), bytes: 0 };
}

/// A rank's memory in a collective.
#[derive(Clone, Copy)]
pub struct Buffers<'a> {
    /// What the rank contributes.
    pub input: BufferView,
    /// Where the result goes; in all_reduce, reduce and broadcast it is the input as well.
    pub output: BufferView,
    /// Elements of each rank's block of the input, where blocks differ in length.
    pub input_counts: &'a [usize],
    /// Elements of each rank's block of the output, where blocks differ in length.
    pub output_counts: &'a [usize],
}

impl Buffers<'static> {
    pub fn new(input: BufferView, output: BufferView) -> Self {
        Self { input, output, input_counts: &[], output_counts: &[] }
    }

    /// The result replaces the input.
    pub fn in_place(data: BufferView) -> Self {
        Self::new(BufferView::NONE, data)
    }
}

/// Moves the data of a group's operations on the host.
///
/// The process group has done what is the same for all back-ends before it calls one: it has
/// checked the arguments and that the group has not failed, waited for earlier operations of the
/// lane (for a collective, for the launched buckets too), given the operation its sequence number,
/// and recorded its begin. It records the end as well.
///
/// What is left to the back-end: all ranks' operations must agree ([`OpDescriptor::agrees`]). Its
/// waits are watched ([`Failure::wait_until`]), and whatever goes wrong on one rank fails the group
/// for all ([`Failure::fail`]).
pub trait HostBackend: Send + Sync {
    /// Its name in traces.
    fn name(&self) -> &'static str;

    /// Runs a collective: all ranks of the group call it with the same operation, in the same
    /// order. Threads of a rank may call it at once: then one waits for the other.
    fn collective(&self, operation: OpDescriptor, buffers: Buffers) -> Result<()>;

    /// Runs a collective in which `read` gets the addresses of all ranks' data, of `lengths` bytes,
    /// on this rank. False if ranks cannot read each other's memory, on all ranks alike.
    fn read_peers(
        &self,
        operation: OpDescriptor,
        data: BufferView,
        lengths: &[usize],
        read: &mut dyn FnMut(&[*const u8]),
    ) -> Result<bool>;

    /// Sends a message to rank `to`. May return before its receiver asks for it.
    fn send(&self, data: BufferView, message: &MessageDescriptor, to: usize) -> Result<()>;

    /// Receives the next message with this tag of rank `from`, or, for None, of any rank. Returns
    /// its sender.
    fn recv(
        &self,
        data: BufferView,
        message: &MessageDescriptor,
        from: Option<usize>,
    ) -> Result<usize>;

    /// Launches the reduction of a bucket, without waiting: [`BucketLaunch::begin`] begins it.
    /// False if too many are under way: then nothing was done. All ranks launch the same buckets in
    /// the same order.
    fn launch_bucket(&self, launch: BucketLaunch) -> Result<bool>;

    /// Does this rank's share of the launched buckets, without waiting. Those that are reduced on
    /// all ranks are over: [`LaunchedBucket::finish`].
    ///
    /// # Errors
    /// The group has failed.
    fn progress_buckets(&self) -> Result<()>;

    /// Waits for all launched buckets.
    fn finish_buckets(&self) -> Result<()>;

    /// The back-end of another group, whose members are some of this one's. `operation` makes it.
    fn new_group(&self, failure: Arc<Failure>, operation: &str) -> Result<Arc<dyn HostBackend>>;
}

/// A bucket that is about to be launched. Its pieces are in place and stay there; if this is
/// dropped instead, nothing was done.
pub struct BucketLaunch<'a> {
    core: &'a Arc<GroupCore>,
    pub segments: &'a Arc<Segments>,
    /// Still without its sequence number.
    pub operation: OpDescriptor,
}

impl<'a> BucketLaunch<'a> {
    /// None if the bucket is being reduced already, or not all its pieces are in place.
    pub fn new(
        core: &'a Arc<GroupCore>,
        segments: &'a Arc<Segments>,
        operation: OpDescriptor,
    ) -> Option<Self> {
        segments.begin().then(|| Self { core, segments, operation })
    }

    /// Gives the operation its sequence number, and records its begin.
    pub fn begin(mut self) -> LaunchedBucket {
        let start = self.core.assign_sequence(&mut self.operation);
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
    /// All ranks have the reduced pieces: lets go of their memory, and records the end.
    pub fn finish(&self) {
        self.segments.finish();
        self.core.recorder.finish(self.record);
        // Last: a thread that finds no bucket under way takes the results.
        self.core.launched_buckets.remove(self.record);
    }
}
