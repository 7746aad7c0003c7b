//! Collectives on tensors, blocking and asynchronous.

use std::convert;

use flow_comm::{P2pOp, ProcessGroup, ReduceOp};
use tch::{Device, Tensor};

use crate::batch::Batch;
use crate::device::{DeviceKind, choose};
use crate::error::Result;
use crate::nonblocking::Work;
use crate::prepared::Prepared;
use crate::{coalesced, operation};

/// The asynchronous form of each operation: its name, the blocking one's, the call with its
/// arguments after the tensor, and what comes back.
macro_rules! asynchronous {
    ($($name:ident, $blocking:ident, $call:ident($($argument:ident: $type:ty),*), $result:literal;)*) => {$(
        #[doc = concat!(
            "Starts [`", stringify!($blocking), "`](Self::", stringify!($blocking), "). ", $result
        )]
        fn $name(&self, tensor: Tensor, $($argument: $type),*) -> Result<Work> {
            let call = operation::$call(self.group(), &tensor, $($argument),*)?;
            Work::start(self.group(), call, convert::identity)
        }
    )*};
}

/// Collectives and messages of a process group on tensors. These are on the CPU or on this rank's
/// GPU, the same on all ranks.
///
/// Contiguous tensors are worked on where they are, others through a contiguous copy. Operations on
/// GPUs are enqueued in the order of libtorch's current stream, as its own are. Roots and peers are
/// ranks of the group.
///
/// Reductions take tensors of kind `Float`, `Double`, `Half`, `BFloat16`, `Int`, `Int64` and
/// `Uint8`; all other operations take tensors of any kind. Tensors are dense. A tensor that a
/// result is written to has memory of its own for each element, unlike one made by `expand`. Any
/// other tensor is an error of this rank, before the others take part.
///
/// Each operation has an asynchronous form, which returns at once: see [`Work`]. Operations with
/// gradients are in [`functional`](crate::functional).
///
/// A type that has a group gets all of this by [`TensorCollectives::group`].
pub trait TensorCollectives {
    /// Returns the group of the ranks that take part.
    fn group(&self) -> &ProcessGroup;

    /// Chooses what ranks compute on: for [`DeviceKind::Cuda`], each the GPU of its local rank
    /// (LOCAL_RANK), counted among those that CUDA_VISIBLE_DEVICES leaves. All ranks call this,
    /// before anything else is done with tensors.
    ///
    /// # Errors
    ///
    /// On all ranks, if one cannot have its device: more ranks than GPUs, a libtorch without CUDA,
    /// no driver.
    fn use_device(&self, kind: DeviceKind) -> Result<Device> {
        choose(self.group(), kind)
    }

    /// Returns the device this rank computes on: the CPU, unless [`TensorCollectives::use_device`]
    /// chose a GPU.
    fn device(&self) -> Device {
        let device = self.group().cuda_device();
        device.map_or(Device::Cpu, |device| flow_autograd::torch_device(&device))
    }

    /// Reduces `tensor` element by element over all ranks, in place.
    fn all_reduce_tensor(&self, tensor: &mut Tensor, op: ReduceOp) -> Result<()> {
        operation::all_reduce(self.group(), tensor, op)?.run(self.group()).map(drop)
    }

    /// Reduces `tensor` element by element over all ranks into rank `root`'s; the others stay as
    /// they are.
    fn reduce_tensor(&self, tensor: &mut Tensor, op: ReduceOp, root: usize) -> Result<()> {
        operation::reduce(self.group(), tensor, op, root)?.run(self.group()).map(drop)
    }

    /// Copies rank `root`'s `tensor` into all ranks'.
    fn broadcast_tensor(&self, tensor: &mut Tensor, root: usize) -> Result<()> {
        operation::broadcast(self.group(), tensor, root)?.run(self.group()).map(drop)
    }

    /// Gathers all ranks' tensors, which have equal shapes, stacked along a new first dimension.
    fn all_gather_tensor(&self, tensor: &Tensor) -> Result<Tensor> {
        operation::all_gather(self.group(), tensor)?.run(self.group())
    }

    /// Gathers all ranks' `input`, one after the other, in `output`, which has as many elements as all
    /// of them.
    fn all_gather_into_tensor(&self, output: &mut Tensor, input: &Tensor) -> Result<()> {
        operation::all_gather_into(self.group(), output, input)?.run(self.group()).map(drop)
    }

    /// Reduces `tensor` over all ranks; rank r gets `tensor[r]` of the result. The first dimension
    /// is the number of ranks.
    fn reduce_scatter_tensor(&self, tensor: &Tensor, op: ReduceOp) -> Result<Tensor> {
        operation::reduce_scatter(self.group(), tensor, op)?.run(self.group())
    }

    /// Divides the first dimension into as many equal blocks as there are ranks; rank r gets block
    /// r of every rank, in rank order. The result has the shape of `tensor`.
    fn all_to_all_tensor(&self, tensor: &Tensor) -> Result<Tensor> {
        operation::all_to_all(self.group(), tensor)?.run(self.group())
    }

    /// Gathers all ranks' tensors, one after the other along the first dimension; rank r's has
    /// length `counts[r]`; the other dimensions are equal.
    fn all_gather_v_tensor(&self, tensor: &Tensor, counts: &[usize]) -> Result<Tensor> {
        operation::all_gather_v(self.group(), tensor, counts)?.run(self.group())
    }

    /// Reduces `tensor` over all ranks; rank r gets its part of the result, which has length
    /// `counts[r]` along the first dimension.
    fn reduce_scatter_v_tensor(
        &self,
        tensor: &Tensor,
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<Tensor> {
        operation::reduce_scatter_v(self.group(), tensor, counts, op)?.run(self.group())
    }

    /// Sends rank r a part of length `input_counts[r]` of the first dimension, and returns what all
    /// ranks have sent, one after the other. Rank r has sent length `output_counts[r]`.
    fn all_to_all_v_tensor(
        &self,
        tensor: &Tensor,
        input_counts: &[usize],
        output_counts: &[usize],
    ) -> Result<Tensor> {
        operation::all_to_all_v(self.group(), tensor, input_counts, output_counts)?
            .run(self.group())
    }

    /// Gathers all ranks' tensors on rank `root`, stacked along a new first dimension. The others
    /// get None.
    fn gather_tensor(&self, tensor: &Tensor, root: usize) -> Result<Option<Tensor>> {
        let gathered = operation::gather(self.group(), tensor, root)?.run(self.group())?;
        Ok((self.group().rank() == root).then_some(gathered))
    }

    /// Writes `input[r]` of rank `root` to rank r's `output`. Only the root has an input, with the
    /// number of ranks as a new first dimension.
    fn scatter_tensor(
        &self,
        input: Option<&Tensor>,
        output: &mut Tensor,
        root: usize,
    ) -> Result<()> {
        operation::scatter(self.group(), input, output, root)?.run(self.group()).map(drop)
    }

    /// Sends `tensor` to rank `to`, which receives it by [`recv_tensor`](Self::recv_tensor).
    fn send_tensor(&self, tensor: &Tensor, to: usize) -> Result<()> {
        operation::send(self.group(), tensor, to)?.run(self.group()).map(drop)
    }

    /// Receives into `tensor` what rank `from` sends.
    fn recv_tensor(&self, tensor: &mut Tensor, from: usize) -> Result<()> {
        operation::recv(self.group(), tensor, from)?.run(self.group()).map(drop)
    }

    /// Sends and receives all messages of `ops`, whose tensors are on one device. None waits for
    /// another, so that ranks which both send and receive do not wait for each other. Messages from
    /// one rank to another keep their order.
    fn batch_send_recv_tensors(&self, ops: &mut [P2pOp<Tensor>]) -> Result<()> {
        Batch::new(self.group(), ops)?.run(self.group()).map(drop)
    }

    /// Reduces each tensor over all ranks, in place, as
    /// [`all_reduce_tensor`](Self::all_reduce_tensor) does. There is one operation for each kind of
    /// tensor, with a copy before and after.
    fn all_reduce_coalesced(&self, tensors: &mut [Tensor], op: ReduceOp) -> Result<()> {
        coalesced::all_reduce(self.group(), tensors, op)
    }

    asynchronous! {
        all_reduce_tensor_async, all_reduce_tensor, all_reduce(op: ReduceOp), "`tensor` comes back.";
        reduce_tensor_async, reduce_tensor, reduce(op: ReduceOp, root: usize), "`tensor` comes back.";
        broadcast_tensor_async, broadcast_tensor, broadcast(root: usize), "`tensor` comes back.";
        all_gather_tensor_async, all_gather_tensor, all_gather(), "";
        reduce_scatter_tensor_async, reduce_scatter_tensor, reduce_scatter(op: ReduceOp), "";
        all_to_all_tensor_async, all_to_all_tensor, all_to_all(), "";
        all_gather_v_tensor_async, all_gather_v_tensor, all_gather_v(counts: &[usize]), "";
        reduce_scatter_v_tensor_async, reduce_scatter_v_tensor,
            reduce_scatter_v(counts: &[usize], op: ReduceOp), "";
        all_to_all_v_tensor_async, all_to_all_v_tensor,
            all_to_all_v(input_counts: &[usize], output_counts: &[usize]), "";
        send_tensor_async, send_tensor, send(to: usize), "`tensor` comes back when it has been sent.";
        recv_tensor_async, recv_tensor, recv(from: usize), "`tensor` comes back.";
    }

    /// Starts [`all_gather_into_tensor`](Self::all_gather_into_tensor); `output` comes back.
    fn all_gather_into_tensor_async(&self, output: Tensor, input: &Tensor) -> Result<Work> {
        let call = operation::all_gather_into(self.group(), &output, input)?;
        Work::start(self.group(), call, convert::identity)
    }

    /// Starts [`gather_tensor`](Self::gather_tensor).
    fn gather_tensor_async(&self, tensor: Tensor, root: usize) -> Result<Work<Option<Tensor>>> {
        let result = if self.group().rank() == root { Some } else { |_| None };
        Work::start(self.group(), operation::gather(self.group(), &tensor, root)?, result)
    }

    /// Starts [`scatter_tensor`](Self::scatter_tensor); `output` comes back.
    fn scatter_tensor_async(
        &self,
        input: Option<Tensor>,
        output: Tensor,
        root: usize,
    ) -> Result<Work> {
        let call = operation::scatter(self.group(), input.as_ref(), &output, root)?;
        Work::start(self.group(), call, convert::identity)
    }

    /// Starts [`batch_send_recv_tensors`](Self::batch_send_recv_tensors); the tensors come back in
    /// the order of `ops`.
    fn batch_send_recv_tensors_async(&self, ops: Vec<P2pOp<Tensor>>) -> Result<Work<Vec<Tensor>>> {
        Work::start(self.group(), Batch::new(self.group(), &ops)?, convert::identity)
    }
}

impl TensorCollectives for ProcessGroup {
    fn group(&self) -> &ProcessGroup {
        self
    }
}
