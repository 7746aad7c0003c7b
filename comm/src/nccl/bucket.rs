//! A bucket of gradients on a GPU: packed, reduced, and where the optimizer reads them, without the
//! host ever waiting.

use std::sync::Arc;

use flow_kernels::cuda::{DeviceBuffer, Event, Packer, Stream};
use flow_kernels::{DType, ReduceOp};

use super::error::EnqueueError;
use super::group::CudaGroup;
use super::memory::{FlatMemory, MemoryRegistration};
use super::operations::parts;
use crate::descriptor::OpDescriptor;
use crate::error::Result;
use crate::kind::Kind;

/// Flat device memory with a place for each gradient of a bucket.
///
/// Made by [`CudaGroup::bucket`], reduced by [`CudaGroup::reduce_bucket`].
pub struct FlatBucket {
    /// First, as it is undone before the memory is freed.
    registration: Option<MemoryRegistration>,
    number: u32,
    step: u32,
    packer: Packer,
    flat: BucketView,
    /// Gradients are of another type than what is communicated.
    casts: bool,
    /// Avg or Sum.
    op: ReduceOp,
    timing: Option<[Arc<Event>; 2]>,
}

impl FlatBucket {
    /// Returns where the reduced gradient of a slot lies, in the type of communication; None if
    /// there is no such slot.
    pub fn view(&self, slot: usize) -> Option<BucketView> {
        let size = self.flat.dtype.size();
        let layout = self.packer.layout();
        let start = layout.places().get(slot)?;
        let length = layout.lengths().get(slot)?;
        Some(BucketView {
            start: self.flat.start + start * size,
            bytes: length * size,
            ..self.flat.clone()
        })
    }

    /// Sets whether gradients are added up ([`ReduceOp::Sum`]) or averaged ([`ReduceOp::Avg`]).
    pub fn set_op(&mut self, op: ReduceOp) {
        self.op = op;
    }

    /// Says in which step, from 1 on, the bucket is reduced next: errors name it.
    pub fn set_step(&mut self, step: u32) {
        self.step = step;
    }

    /// Returns the number of bytes as communicated, padding included.
    pub fn bytes(&self) -> usize {
        self.flat.bytes
    }

    /// Returns the events at which the last reduction became possible and was over.
    pub fn timing(&self) -> Option<&[Arc<Event>; 2]> {
        self.timing.as_ref()
    }
}

/// A part of device memory, which it keeps.
#[derive(Clone)]
pub struct BucketView {
    memory: Arc<FlatMemory>,
    start: usize,
    bytes: usize,
    dtype: DType,
}

// SAFETY: a place lies within its memory, which it keeps, and which waits for the device before it
// is freed.
unsafe impl DeviceBuffer for BucketView {
    fn address(&self) -> u64 {
        self.memory.address() + self.start as u64
    }

    fn bytes(&self) -> usize {
        self.bytes
    }

    fn dtype(&self) -> DType {
        self.dtype
    }
}

impl CudaGroup {
    /// Makes bucket `number`, of gradients of these lengths (in elements) and type, which are
    /// communicated as `communication`.
    ///
    /// # Errors
    ///
    /// Too little device memory; a kernel that cannot be compiled.
    pub fn bucket(
        &self,
        number: u32,
        gradients: DType,
        communication: DType,
        lengths: &[usize],
    ) -> Result<FlatBucket> {
        let mut bucket = flat_bucket(self, number, gradients, communication, lengths)?;
        let communicator = &self.member(&"registering device memory")?.communicator;
        let registered = communicator.register(&bucket.flat.memory);
        bucket.registration = registered.map_err(|failure| {
            self.system("registering device memory", EnqueueError::from(failure).reason)
        })?;
        Ok(bucket)
    }

    /// Makes bucket `number`, of tensors of these lengths (in elements) and type, for
    /// [`CudaGroup::broadcast_bucket`].
    ///
    /// # Errors
    ///
    /// Those of [`CudaGroup::bucket`].
    pub fn bucket_to_broadcast(
        &self,
        number: u32,
        dtype: DType,
        lengths: &[usize],
    ) -> Result<FlatBucket> {
        // NCCL need not know the memory: it would gain nothing, and has more to undo in an abort.
        flat_bucket(self, number, dtype, dtype, lengths)
    }

    /// Enqueues the mean of a bucket over all ranks, or the sum ([`FlatBucket::set_op`]). It begins
    /// when what has been enqueued on the streams `after` is over. Other streams wait for it by
    /// [`CudaGroup::join`]. The result is in the bucket's places or, where the types differ, in the
    /// gradients themselves, in which they are also sent. Gradients are scaled in single precision
    /// (double, if they are) and rounded to the type of communication; NCCL adds in that type.
    ///
    /// Until the join has been passed on all streams that use them, gradients must be left alone.
    ///
    /// # Errors
    ///
    /// A failure of the group, now or before.
    pub fn reduce_bucket<B: DeviceBuffer>(
        &self,
        bucket: &mut FlatBucket,
        gradients: &mut [B],
        after: &[Stream],
    ) -> Result<()> {
        let count = bucket.bytes() / bucket.flat.dtype.size();
        let operation = OpDescriptor::new(Kind::AllReduce, bucket.flat.dtype, count);
        let operation =
            OpDescriptor { bucket: Some(bucket.number), step: bucket.step, ..operation };
        let scale = if bucket.op == ReduceOp::Sum { 1.0 } else { 1.0 / self.size() as f64 };
        let ready = self.event()?;
        if let Some(stream) = after.last() {
            ready
                .record(stream)
                .map_err(|error| self.system("recording an event", error.to_string()))?;
        }
        let packer = &bucket.packer;
        let flat = &mut bucket.flat;
        let casts = bucket.casts;
        let done = self.enqueue(operation, after, |communicator, stream| {
            packer.pack(gradients, flat, scale, stream)?;
            // SAFETY: the bucket's memory is used on this stream only, until others have been made
            // to wait for it.
            unsafe { communicator.all_reduce(flat, ReduceOp::Sum, stream)? };
            if casts {
                packer.unpack(flat, gradients, stream)?;
            }
            Ok(())
        })?;
        bucket.timing = Some([ready, done]);
        Ok(())
    }

    /// Copies rank `root`'s tensors, which a bucket was made for, to all ranks', in the order of
    /// `stream`. One kernel on each side and one transfer, however many tensors there are.
    ///
    /// # Errors
    ///
    /// A failure of the group, now or before.
    pub fn broadcast_bucket<B: DeviceBuffer>(
        &self,
        bucket: &mut FlatBucket,
        tensors: &mut [B],
        root: usize,
        stream: &Stream,
    ) -> Result<()> {
        self.caller().check_rank("broadcast", "root", root)?;
        let count = bucket.bytes() / bucket.flat.dtype.size();
        let operation = OpDescriptor::new(Kind::Broadcast, bucket.flat.dtype, count).root(root);
        let operation = OpDescriptor { bucket: Some(bucket.number), ..operation };
        let packer = &bucket.packer;
        let flat = &mut bucket.flat;
        let done = self.enqueue(operation, std::slice::from_ref(stream), |communicator, own| {
            if self.rank() == root {
                packer.pack(tensors, flat, 1.0, own)?;
            }
            let (data, count, dtype) = parts(flat);
            let stream = own.handle().cast();
            // SAFETY: the bucket's memory holds `count` elements, and is used on this stream only.
            communicator.call("ncclBroadcast", |nccl, comm| unsafe {
                nccl.ncclBroadcast(data, data, count, dtype, root as i32, comm, stream)
            })?;
            if self.rank() != root {
                packer.unpack(flat, tensors, own)?;
            }
            Ok(())
        })?;
        stream.wait(&done).map_err(|error| self.system(&operation.to_string(), error.to_string()))
    }
}

/// Returns a bucket whose memory NCCL does not know.
fn flat_bucket(
    group: &CudaGroup,
    number: u32,
    tensors: DType,
    communication: DType,
    lengths: &[usize],
) -> Result<FlatBucket> {
    let packer = Packer::new(group.device(), tensors, communication, lengths)
        .map_err(|error| group.system("making a bucket", error.to_string()))?;
    let bytes = packer.layout().bytes();
    let memory = Arc::new(group.allocate(bytes)?);
    // The gaps between places are reduced too, whatever they hold: nobody looks at them.
    let flat = BucketView { memory, start: 0, bytes, dtype: communication };
    Ok(FlatBucket {
        registration: None,
        number,
        step: 0,
        packer,
        flat,
        casts: tensors != communication,
        op: ReduceOp::Avg,
        timing: None,
    })
}
