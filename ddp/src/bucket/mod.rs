//! One bucket's life in a backward: gradients come in, the full bucket is launched, and the reduced
//! gradients are where the optimizer reads them.

pub(crate) mod assignment;
pub(crate) mod comm_hook;
pub(crate) mod cpu;
pub(crate) mod cuda;
pub(crate) mod grad_bytes;
mod hook_progress;
mod kept;
pub(crate) mod pending;
mod progress;
pub(crate) mod sparse;

use flow_comm::ProcessGroup;
use tch::{Kind, Tensor};

use self::pending::Pending;
use crate::error::Result;
use crate::parameter::Parameter;
use crate::stats::{BucketTimes, PhaseTimes};

/// The gradients of some parameters, which are reduced together. A slot is a parameter's place in
/// its bucket.
///
/// In each backward: [`Bucket::mark_ready`] for every slot, [`Bucket::launch`], [`Pending::wait`],
/// [`Bucket::reduced_grad`], [`Bucket::reset`].
pub(crate) trait Bucket: Send {
    /// Sets the step in which the bucket is reduced next.
    fn set_step(&mut self, step: u32);

    /// Takes in the gradient of a slot. `exclusive`: nothing else uses the gradient's memory.
    /// Returns whether the gradient is reduced where it is, without a copy.
    fn mark_ready(&mut self, slot: usize, gradient: &Tensor, exclusive: bool) -> Result<bool>;

    /// Takes in zeros for a slot whose parameter got no gradient.
    fn mark_unused(&mut self, slot: usize) -> Result<()>;

    /// Starts to reduce the bucket over all ranks, without waiting. All slots are ready.
    fn launch(&mut self) -> flow_comm::Result<Pending>;

    /// Returns whether [`Bucket::complete`] reduces the bucket, at the end of backward, as it waits
    /// for other ranks. Communication hooks do not get such a bucket.
    fn waits_for_ranks(&self) -> bool {
        false
    }

    /// Reduces a bucket that waits for ranks. All ranks call this for the same buckets in the same
    /// order, after all launched buckets have been started.
    fn complete(&mut self, _: &ProcessGroup) -> Result<()> {
        Ok(())
    }

    /// Makes libtorch's current stream wait for the gradients that the slots were marked ready
    /// with.
    fn join_gradients(&self) -> Result<()>;

    /// Returns the gradient that a slot was marked ready with, before the bucket is launched; None
    /// if it is the parameter's own `.grad`.
    fn gradient(&self, slot: usize) -> Option<&Tensor>;

    /// Returns the reduced gradient of a slot; None if it is the parameter's own `.grad`. Of a bucket
    /// whose ranks keep parts, this rank's; None if it is where it stays.
    fn reduced_grad(&self, slot: usize) -> Option<&Tensor>;

    /// Returns the number of bytes that are communicated.
    fn bytes(&self) -> usize;

    /// Times of the last reduction on the device's clock, if it has one of its own. The device has
    /// passed the last [`BackwardEvent`].
    fn times(&self) -> Option<BucketTimes>;

    /// Drops the gradients: the bucket is ready for the next backward. `stream_joined`: libtorch's
    /// current stream waits for everything that reads the gradients.
    fn reset(&mut self, stream_joined: bool);
}

/// The part of a device that a reducer needs besides buckets.
pub(crate) trait ReducePath: Send + Sync {
    /// Bucket `number`, of these parameters, whose gradients are communicated as `kind`.
    fn bucket(&self, number: u32, members: &[&Parameter], kind: Kind) -> Result<Box<dyn Bucket>>;

    /// Returns whether `.grad` becomes a view of the bucket, rather than a copy of its part.
    fn grads_are_views(&self) -> bool;

    /// Does what can be done for the launched buckets without waiting. Every hook calls this.
    fn progress(&self) -> flow_comm::Result<()>;

    /// Starts all launched buckets, so that a collective which begins now follows them on all
    /// ranks.
    fn flush(&self) -> flow_comm::Result<()>;

    /// Makes libtorch's current stream wait for all launched buckets.
    fn join(&self) -> Result<()>;

    /// Records a moment of the backward in libtorch's current stream.
    fn record(&self, event: BackwardEvent) -> Result<()>;

    /// Times of the last backward on the device's clock, if it has one. Waits for the device.
    fn phase_times(&self) -> Option<PhaseTimes>;

    /// Waits until all reductions are over.
    fn synchronize(&self) -> Result<()>;

    /// Ends what is under way on the device.
    fn abort(&self, cause: &str);
}

/// A moment of a backward.
#[derive(Debug, Clone, Copy)]
pub(crate) enum BackwardEvent {
    FirstGradient,
    EndOfBackward,
    EndOfReduction,
}
