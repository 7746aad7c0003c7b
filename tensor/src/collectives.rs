//! Collectives on tensors, blocking and asynchronous.

use flow_comm::{P2pOp, ProcessGroup, ReduceOp};
use tch::{Device, Tensor};

use crate::batch::Batch;
use crate::coalesced;
use crate::device::{choose, DeviceKind};
use crate::error::{failed, Result};
use crate::nonblocking::Work;
use crate::operation::{Call, Counts, Operation, Output, Prepared};
use crate::tensors::units;

/// What a process group does with tensors, which are on the CPU or on this rank's GPU, the same on
/// all ranks.
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
pub trait TensorCollectives {
    /// Chooses what ranks compute on: for [`DeviceKind::Cuda`], each the GPU of its local rank
    /// (LOCAL_RANK), counted among those that CUDA_VISIBLE_DEVICES leaves. All ranks call this,
    /// before anything else is done with tensors.
    ///
    /// # Errors
    ///
    /// On all ranks, if one cannot have its device: more ranks than GPUs, a libtorch without CUDA,
    /// no driver.
    fn use_device(&self, kind: DeviceKind) -> Result<Device>;
    /// The device this rank computes on: the CPU, unless [`TensorCollectives::use_device`] chose a
    /// GPU.
    fn device(&self) -> Device;

    /// Reduces `tensor` element by element over all ranks, in place.
    fn all_reduce_tensor(&self, tensor: &mut Tensor, op: ReduceOp) -> Result<()>;
    /// Reduces `tensor` element by element over all ranks into rank `root`'s; the others stay as
    /// they are.
    fn reduce_tensor(&self, tensor: &mut Tensor, op: ReduceOp, root: usize) -> Result<()>;
    /// Copies rank `root`'s `tensor` into all ranks'.
    fn broadcast_tensor(&self, tensor: &mut Tensor, root: usize) -> Result<()>;
    /// All ranks' tensors, which have equal shapes, stacked along a new first dimension.
    fn all_gather_tensor(&self, tensor: &Tensor) -> Result<Tensor>;
    /// Reduces `tensor` over all ranks; rank r gets `tensor[r]` of the result. The first dimension
    /// is the number of ranks.
    fn reduce_scatter_tensor(&self, tensor: &Tensor, op: ReduceOp) -> Result<Tensor>;
    /// Divides the first dimension into as many equal blocks as there are ranks; rank r gets block
    /// r of every rank, in rank order. The result has the shape of `tensor`.
    fn all_to_all_tensor(&self, tensor: &Tensor) -> Result<Tensor>;
    /// All ranks' tensors, one after the other along the first dimension; rank r's has
    /// length `counts[r]`; the other dimensions are equal.
    fn all_gather_v_tensor(&self, tensor: &Tensor, counts: &[usize]) -> Result<Tensor>;
    /// Reduces `tensor` over all ranks; rank r gets its part of the result, which has length
    /// `counts[r]` along the first dimension.
    fn reduce_scatter_v_tensor(
        &self,
        tensor: &Tensor,
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<Tensor>;
    /// Sends rank r a part of length `input_counts[r]` of the first dimension, and returns what all
    /// ranks have sent, one after the other: length `output_counts[r]` from rank r.
    fn all_to_all_v_tensor(
        &self,
        tensor: &Tensor,
        input_counts: &[usize],
        output_counts: &[usize],
    ) -> Result<Tensor>;
    /// On rank `root`, all ranks' tensors stacked along a new first dimension; None on the others.
    fn gather_tensor(&self, tensor: &Tensor, root: usize) -> Result<Option<Tensor>>;
    /// Writes `input[r]` of rank `root` to rank r's `output`. Only the root has an input, with the
    /// number of ranks as a new first dimension.
    fn scatter_tensor(
        &self,
        input: Option<&Tensor>,
        output: &mut Tensor,
        root: usize,
    ) -> Result<()>;
    /// Sends `tensor` to rank `to`, which receives it by [`recv_tensor`](Self::recv_tensor).
    fn send_tensor(&self, tensor: &Tensor, to: usize) -> Result<()>;
    /// Receives what rank `from` sends into `tensor`.
    fn recv_tensor(&self, tensor: &mut Tensor, from: usize) -> Result<()>;
    /// Sends and receives all messages of `ops`, whose tensors are on one device. None waits for
    /// another, so that ranks which both send and receive do not wait for each other. Messages from
    /// one rank to another keep their order.
    fn batch_send_recv_tensors(&self, ops: &mut [P2pOp<Tensor>]) -> Result<()>;
    /// Reduces each tensor over all ranks, in place: as
    /// [`all_reduce_tensor`](Self::all_reduce_tensor) for each, in one operation for each kind,
    /// with a copy before and after.
    fn all_reduce_coalesced(&self, tensors: &mut [Tensor], op: ReduceOp) -> Result<()>;

    /// Starts [`all_reduce_tensor`](Self::all_reduce_tensor); `tensor` comes back.
    fn all_reduce_tensor_async(&self, tensor: Tensor, op: ReduceOp) -> Result<Work>;
    /// Starts [`reduce_tensor`](Self::reduce_tensor); `tensor` comes back.
    fn reduce_tensor_async(&self, tensor: Tensor, op: ReduceOp, root: usize) -> Result<Work>;
    /// Starts [`broadcast_tensor`](Self::broadcast_tensor); `tensor` comes back.
    fn broadcast_tensor_async(&self, tensor: Tensor, root: usize) -> Result<Work>;
    /// Starts [`all_gather_tensor`](Self::all_gather_tensor).
    fn all_gather_tensor_async(&self, tensor: Tensor) -> Result<Work>;
    /// Starts [`reduce_scatter_tensor`](Self::reduce_scatter_tensor).
    fn reduce_scatter_tensor_async(&self, tensor: Tensor, op: ReduceOp) -> Result<Work>;
    /// Starts [`all_to_all_tensor`](Self::all_to_all_tensor).
    fn all_to_all_tensor_async(&self, tensor: Tensor) -> Result<Work>;
    /// Starts [`all_gather_v_tensor`](Self::all_gather_v_tensor).
    fn all_gather_v_tensor_async(&self, tensor: Tensor, counts: &[usize]) -> Result<Work>;
    /// Starts [`reduce_scatter_v_tensor`](Self::reduce_scatter_v_tensor).
    fn reduce_scatter_v_tensor_async(
        &self,
        tensor: Tensor,
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<Work>;
    /// Starts [`all_to_all_v_tensor`](Self::all_to_all_v_tensor).
    fn all_to_all_v_tensor_async(
        &self,
        tensor: Tensor,
        input_counts: &[usize],
        output_counts: &[usize],
    ) -> Result<Work>;
    /// Starts [`gather_tensor`](Self::gather_tensor).
    fn gather_tensor_async(&self, tensor: Tensor, root: usize) -> Result<Work<Option<Tensor>>>;
    /// Starts [`scatter_tensor`](Self::scatter_tensor); `output` comes back.
    fn scatter_tensor_async(
        &self,
        input: Option<Tensor>,
        output: Tensor,
        root: usize,
    ) -> Result<Work>;
    /// Starts [`send_tensor`](Self::send_tensor); `tensor` comes back when it has been sent.
    fn send_tensor_async(&self, tensor: Tensor, to: usize) -> Result<Work>;
    /// Starts [`recv_tensor`](Self::recv_tensor); `tensor` comes back.
    fn recv_tensor_async(&self, tensor: Tensor, from: usize) -> Result<Work>;
    /// Starts [`batch_send_recv_tensors`](Self::batch_send_recv_tensors); the tensors come back in
    /// the order of `ops`.
    fn batch_send_recv_tensors_async(&self, ops: Vec<P2pOp<Tensor>>) -> Result<Work<Vec<Tensor>>>;
}

impl TensorCollectives for ProcessGroup {
    fn use_device(&self, kind: DeviceKind) -> Result<Device> {
        choose(self, kind)
    }

    fn device(&self) -> Device {
        self.cuda_device().map_or(Device::Cpu, |device| flow_autograd::torch_device(&device))
    }

    fn all_reduce_tensor(&self, tensor: &mut Tensor, op: ReduceOp) -> Result<()> {
        all_reduce(self, tensor, op)?.run(self).map(drop)
    }

    fn reduce_tensor(&self, tensor: &mut Tensor, op: ReduceOp, root: usize) -> Result<()> {
        reduce(self, tensor, op, root)?.run(self).map(drop)
    }

    fn broadcast_tensor(&self, tensor: &mut Tensor, root: usize) -> Result<()> {
        broadcast(self, tensor, root)?.run(self).map(drop)
    }

    fn all_gather_tensor(&self, tensor: &Tensor) -> Result<Tensor> {
        all_gather(self, tensor)?.run(self)
    }

    fn reduce_scatter_tensor(&self, tensor: &Tensor, op: ReduceOp) -> Result<Tensor> {
        reduce_scatter(self, tensor, op)?.run(self)
    }

    fn all_to_all_tensor(&self, tensor: &Tensor) -> Result<Tensor> {
        all_to_all(self, tensor)?.run(self)
    }

    fn all_gather_v_tensor(&self, tensor: &Tensor, counts: &[usize]) -> Result<Tensor> {
        all_gather_v(self, tensor, counts)?.run(self)
    }

    fn reduce_scatter_v_tensor(
        &self,
        tensor: &Tensor,
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<Tensor> {
        reduce_scatter_v(self, tensor, counts, op)?.run(self)
    }

    fn all_to_all_v_tensor(
        &self,
        tensor: &Tensor,
        input_counts: &[usize],
        output_counts: &[usize],
    ) -> Result<Tensor> {
        all_to_all_v(self, tensor, input_counts, output_counts)?.run(self)
    }

    fn gather_tensor(&self, tensor: &Tensor, root: usize) -> Result<Option<Tensor>> {
        let gathered = gather(self, tensor, root)?.run(self)?;
        Ok((self.rank() == root).then_some(gathered))
    }

    fn scatter_tensor(
        &self,
        input: Option<&Tensor>,
        output: &mut Tensor,
        root: usize,
    ) -> Result<()> {
        scatter(self, input, output, root)?.run(self).map(drop)
    }

    fn send_tensor(&self, tensor: &Tensor, to: usize) -> Result<()> {
        send(self, tensor, to)?.run(self).map(drop)
    }

    fn recv_tensor(&self, tensor: &mut Tensor, from: usize) -> Result<()> {
        recv(self, tensor, from)?.run(self).map(drop)
    }

    fn batch_send_recv_tensors(&self, ops: &mut [P2pOp<Tensor>]) -> Result<()> {
        Batch::new(self, ops)?.run(self).map(drop)
    }

    fn all_reduce_coalesced(&self, tensors: &mut [Tensor], op: ReduceOp) -> Result<()> {
        coalesced::all_reduce(self, tensors, op)
    }

    fn all_reduce_tensor_async(&self, tensor: Tensor, op: ReduceOp) -> Result<Work> {
        Work::start(self, all_reduce(self, &tensor, op)?, itself)
    }

    fn reduce_tensor_async(&self, tensor: Tensor, op: ReduceOp, root: usize) -> Result<Work> {
        Work::start(self, reduce(self, &tensor, op, root)?, itself)
    }

    fn broadcast_tensor_async(&self, tensor: Tensor, root: usize) -> Result<Work> {
        Work::start(self, broadcast(self, &tensor, root)?, itself)
    }

    fn all_gather_tensor_async(&self, tensor: Tensor) -> Result<Work> {
        Work::start(self, all_gather(self, &tensor)?, itself)
    }

    fn reduce_scatter_tensor_async(&self, tensor: Tensor, op: ReduceOp) -> Result<Work> {
        Work::start(self, reduce_scatter(self, &tensor, op)?, itself)
    }

    fn all_to_all_tensor_async(&self, tensor: Tensor) -> Result<Work> {
        Work::start(self, all_to_all(self, &tensor)?, itself)
    }

    fn all_gather_v_tensor_async(&self, tensor: Tensor, counts: &[usize]) -> Result<Work> {
        Work::start(self, all_gather_v(self, &tensor, counts)?, itself)
    }

    fn reduce_scatter_v_tensor_async(
        &self,
        tensor: Tensor,
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<Work> {
        Work::start(self, reduce_scatter_v(self, &tensor, counts, op)?, itself)
    }

    fn all_to_all_v_tensor_async(
        &self,
        tensor: Tensor,
        input_counts: &[usize],
        output_counts: &[usize],
    ) -> Result<Work> {
        Work::start(self, all_to_all_v(self, &tensor, input_counts, output_counts)?, itself)
    }

    fn gather_tensor_async(&self, tensor: Tensor, root: usize) -> Result<Work<Option<Tensor>>> {
        let result = if self.rank() == root { Some } else { |_| None };
        Work::start(self, gather(self, &tensor, root)?, result)
    }

    fn scatter_tensor_async(
        &self,
        input: Option<Tensor>,
        output: Tensor,
        root: usize,
    ) -> Result<Work> {
        Work::start(self, scatter(self, input.as_ref(), &output, root)?, itself)
    }

    fn send_tensor_async(&self, tensor: Tensor, to: usize) -> Result<Work> {
        Work::start(self, send(self, &tensor, to)?, itself)
    }

    fn recv_tensor_async(&self, tensor: Tensor, from: usize) -> Result<Work> {
        Work::start(self, recv(self, &tensor, from)?, itself)
    }

    fn batch_send_recv_tensors_async(&self, ops: Vec<P2pOp<Tensor>>) -> Result<Work<Vec<Tensor>>> {
        Work::start(self, Batch::new(self, &ops)?, itself)
    }
}

fn itself<T>(result: T) -> T {
    result
}

pub(crate) fn all_reduce(group: &ProcessGroup, tensor: &Tensor, op: ReduceOp) -> Result<Call> {
    Call::new(group, Operation::AllReduce(op), None, Output::Given(tensor))
}

pub(crate) fn reduce(
    group: &ProcessGroup,
    tensor: &Tensor,
    op: ReduceOp,
    root: usize,
) -> Result<Call> {
    from_or_to_root(group, Operation::Reduce(op, root), tensor, group.rank() == root)
}

pub(crate) fn broadcast(group: &ProcessGroup, tensor: &Tensor, root: usize) -> Result<Call> {
    from_or_to_root(group, Operation::Broadcast(root), tensor, group.rank() != root)
}

pub(crate) fn all_gather(group: &ProcessGroup, tensor: &Tensor) -> Result<Call> {
    let shape = stacked(group, tensor);
    Call::new(group, Operation::AllGather, Some(tensor), Output::New(shape))
}

pub(crate) fn reduce_scatter(group: &ProcessGroup, tensor: &Tensor, op: ReduceOp) -> Result<Call> {
    let operation = Operation::ReduceScatter(op);
    let size = tensor.size();
    match size.split_first() {
        Some((&ranks, shape)) if ranks == group.world_size() as i64 => {
            Call::new(group, operation, Some(tensor), Output::New(shape.to_vec()))
        }
        _ => Err(failed(group, "reduce_scatter")(format!(
            "the first dimension of {size:?} is not the number of ranks, {}",
            group.world_size()
        ))),
    }
}

pub(crate) fn all_to_all(group: &ProcessGroup, tensor: &Tensor) -> Result<Call> {
    let (operation, size, ranks) = (Operation::AllToAll, tensor.size(), group.world_size() as i64);
    if size.first().is_none_or(|length| length % ranks != 0) {
        return Err(failed(group, "all_to_all")(format!(
            "the first dimension of {size:?} cannot be divided among {ranks} ranks"
        )));
    }
    Call::new(group, operation, Some(tensor), Output::New(size))
}

pub(crate) fn all_gather_v(
    group: &ProcessGroup,
    tensor: &Tensor,
    counts: &[usize],
) -> Result<Call> {
    let rows = Rows::of(group, "all_gather_v", tensor)?;
    rows.check("this rank's count", counts.get(group.rank()).copied())?;
    let (blocks, shape) = rows.blocks(counts)?;
    Call::new(group, Operation::AllGatherV(blocks), Some(tensor), Output::New(shape))
}

pub(crate) fn reduce_scatter_v(
    group: &ProcessGroup,
    tensor: &Tensor,
    counts: &[usize],
    op: ReduceOp,
) -> Result<Call> {
    let rows = Rows::of(group, "reduce_scatter_v", tensor)?;
    rows.check("the sum of counts", sum(counts))?;
    let (blocks, mut shape) = rows.blocks(counts)?;
    shape[0] = counts[group.rank()] as i64;
    Call::new(group, Operation::ReduceScatterV(blocks, op), Some(tensor), Output::New(shape))
}

pub(crate) fn all_to_all_v(
    group: &ProcessGroup,
    tensor: &Tensor,
    input_counts: &[usize],
    output_counts: &[usize],
) -> Result<Call> {
    let rows = Rows::of(group, "all_to_all_v", tensor)?;
    rows.check("the sum of input_counts", sum(input_counts))?;
    let ((sent, _), (received, shape)) = (rows.blocks(input_counts)?, rows.blocks(output_counts)?);
    Call::new(group, Operation::AllToAllV(sent, received), Some(tensor), Output::New(shape))
}

pub(crate) fn gather(group: &ProcessGroup, tensor: &Tensor, root: usize) -> Result<Call> {
    let output = match group.rank() == root {
        true => Output::New(stacked(group, tensor)),
        false => Output::None,
    };
    Call::new(group, Operation::Gather(root), Some(tensor), output)
}

pub(crate) fn scatter(
    group: &ProcessGroup,
    input: Option<&Tensor>,
    output: &Tensor,
    root: usize,
) -> Result<Call> {
    let operation = Operation::Scatter(root);
    let reason = match (input, group.rank() == root) {
        (Some(input), true) if input.size() != stacked(group, output) => {
            format!(
                "the input has shape {:?} instead of {:?}",
                input.size(),
                stacked(group, output)
            )
        }
        (None, true) => format!("rank {root} is the root and has no input"),
        (Some(_), false) => format!("only rank {root}, the root, has an input"),
        _ => return Call::new(group, operation, input, Output::Given(output)),
    };
    Err(failed(group, "scatter")(reason))
}

pub(crate) fn send(group: &ProcessGroup, tensor: &Tensor, to: usize) -> Result<Call> {
    Call::new(group, Operation::Send(to), Some(tensor), Output::None)
}

pub(crate) fn recv(group: &ProcessGroup, tensor: &Tensor, from: usize) -> Result<Call> {
    Call::new(group, Operation::Recv(from), None, Output::Given(tensor))
}

/// An operation on one tensor that is only read on some ranks.
fn from_or_to_root(
    group: &ProcessGroup,
    operation: Operation,
    tensor: &Tensor,
    written: bool,
) -> Result<Call> {
    match written {
        true => Call::new(group, operation, None, Output::Given(tensor)),
        false => Call::new(group, operation, Some(tensor), Output::None),
    }
}

/// The shape of such tensors of all ranks together.
fn stacked(group: &ProcessGroup, tensor: &Tensor) -> Vec<i64> {
    std::iter::once(group.world_size() as i64).chain(tensor.size()).collect()
}

/// A tensor's first dimension, which is divided among ranks.
struct Rows<'a> {
    group: &'a ProcessGroup,
    operation: &'static str,
    size: Vec<i64>,
    /// Of the buffer that a row is, see [`HostTensor`](crate::tensors::HostTensor).
    elements: usize,
}

impl<'a> Rows<'a> {
    fn of(group: &'a ProcessGroup, operation: &'static str, tensor: &Tensor) -> Result<Self> {
        let size = tensor.size();
        let Some((_, row)) = size.split_first() else {
            return Err(failed(group, operation)("the tensor has no first dimension".into()));
        };
        let elements = row.iter().product::<i64>() as usize * units(tensor.kind());
        Ok(Self { group, operation, size, elements })
    }

    /// `counted` must be the length of the first dimension.
    fn check(&self, what: &str, counted: Option<usize>) -> Result<()> {
        if counted == Some(self.size[0] as usize) {
            return Ok(());
        }
        let counted = counted.map_or("missing".into(), |counted| counted.to_string());
        let reason = format!(
            "{what} is {counted}, but the first dimension of {:?} is {}",
            self.size, self.size[0]
        );
        Err(failed(self.group, self.operation)(reason))
    }

    /// Blocks of this many rows as numbers of elements, and the shape of all of them together.
    fn blocks(&self, counts: &[usize]) -> Result<(Counts, Vec<i64>)> {
        let failed = failed(self.group, self.operation);
        if counts.len() != self.group.world_size() {
            let ranks = self.group.world_size();
            return Err(failed(format!(
                "{} counts for {ranks} ranks: give one for each",
                counts.len()
            )));
        }
        let total = sum(counts).filter(|total| total.checked_mul(self.elements.max(1)).is_some());
        let total = total.and_then(|total| i64::try_from(total).ok());
        let total = total.ok_or_else(|| failed("the counts are too large".into()))?;
        let mut shape = self.size.clone();
        shape[0] = total;
        Ok((counts.iter().map(|count| count * self.elements).collect(), shape))
    }
}

fn sum(counts: &[usize]) -> Option<usize> {
    counts.iter().try_fold(0, |sum: usize, &count| sum.checked_add(count))
}
