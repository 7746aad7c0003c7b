//! What a group's operations on the host run on.
//!
//! A process group checks arguments, keeps operations in order and offers asynchronous forms; its
//! back-end moves the data. Who the members are (`GroupCore`) and how a group fails (`Failure`) is
//! the same for all back-ends.

use std::sync::Arc;

use flow_kernels::{DType, ReduceOp};

use crate::collectives::segments::Segments;
use crate::descriptor::OpDescriptor;
use crate::error::Result;
use crate::failure::Failure;

/// Memory of a caller, valid for the length of the call.
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

/// A group's operations on the host. Every call checks whether the group has failed, and records
/// the operation.
pub trait HostBackend: Send + Sync {
    /// Runs a collective: all ranks of the group call it with the same operation, one after the
    /// other. Launched buckets come first. The operation gets its sequence number here.
    fn collective(&self, operation: OpDescriptor, buffers: Buffers) -> Result<()>;

    /// Sends a message. May return before its receiver asks for it.
    fn send(&self, data: BufferView, dtype: DType, to: usize, tag: u32) -> Result<()>;

    /// Receives the next message with this tag of rank `from`, or, for None, of any rank. Returns
    /// its sender.
    fn recv(&self, data: BufferView, dtype: DType, from: Option<usize>, tag: u32) -> Result<usize>;

    /// Launches the reduction of a bucket whose pieces are all in place, without waiting. False if
    /// too many are under way: then nothing was done. All ranks launch the same buckets in the same
    /// order.
    fn launch_bucket(&self, segments: &Arc<Segments>, reduce: ReduceOp) -> Result<bool>;

    /// Does this rank's share of the launched buckets, without waiting.
    fn progress_buckets(&self) -> Result<()>;

    /// Waits for all launched buckets.
    fn finish_buckets(&self) -> Result<()>;

    /// The back-end of another group, whose members are some of this one's. `operation` makes it.
    fn new_group(&self, failure: Arc<Failure>, operation: &str) -> Result<Arc<dyn HostBackend>>;
}
