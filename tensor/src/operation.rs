//! The table of operations: what each calls on the host and on GPUs, and what shapes it takes.

use std::sync::Arc;

use flow_comm::nccl::{CudaGroup, DeviceBuffer, Stream};
use flow_comm::{Lane, ProcessGroup, ReduceOp};
use tch::Tensor;

use crate::error::{Result, failed, torch_failed};
use crate::prepared::{Prepared, check};
use crate::rows::{Counts, Rows, sum};
use crate::tensors::{HostTensor, contiguous, copy_back, cuda_buffer, cuda_group};

/// An operation, with its arguments other than tensors. Roots and peers are ranks of the group.
#[derive(Clone, Debug)]
pub(crate) enum Operation {
    AllReduce(ReduceOp),
    Reduce(ReduceOp, usize),
    Broadcast(usize),
    AllGather,
    ReduceScatter(ReduceOp),
    AllToAll,
    AllGatherV(Counts),
    ReduceScatterV(Counts, ReduceOp),
    AllToAllV(Counts, Counts),
    Gather(usize),
    Scatter(usize),
    Send(usize),
    Recv(usize),
}

use Operation::*;

impl Operation {
    /// Returns the operation's name, as collectives have it.
    pub fn name(&self) -> &'static str {
        match self {
            AllReduce(_) => "all_reduce",
            Reduce(..) => "reduce",
            Broadcast(_) => "broadcast",
            AllGather => "all_gather",
            ReduceScatter(_) => "reduce_scatter",
            AllToAll => "all_to_all",
            AllGatherV(_) => "all_gather_v",
            ReduceScatterV(..) => "reduce_scatter_v",
            AllToAllV(..) => "all_to_all_v",
            Gather(_) => "gather",
            Scatter(_) => "scatter",
            Send(_) => "send",
            Recv(_) => "recv",
        }
    }

    fn reduces(&self) -> bool {
        matches!(self, AllReduce(_) | Reduce(..) | ReduceScatter(_) | ReduceScatterV(..))
    }
}

/// Runs an operation on `$target`, a process group or, with a stream, a group of GPUs. Both have
/// the same functions, except that only the latter broadcasts several buffers.
macro_rules! run_on {
    (
        $operation:expr, $target:expr, $input:ident, $output:ident, $broadcast:expr
        $(, $stream:expr)?
    ) => {
        match $operation {
            AllReduce(op) => $target.all_reduce($output, *op $(, $stream)?),
            Reduce(op, root) => $target.reduce($output, *op, *root $(, $stream)?),
            Broadcast(root) => $target.broadcast($broadcast($output), *root $(, $stream)?),
            AllGather => $target.all_gather($input, $output $(, $stream)?),
            ReduceScatter(op) => $target.reduce_scatter($input, $output, *op $(, $stream)?),
            AllToAll => $target.all_to_all($input, $output $(, $stream)?),
            AllGatherV(counts) => {
                $target.all_gather_v($input, $output, counts $(, $stream)?)
            }
            ReduceScatterV(counts, op) => {
                $target.reduce_scatter_v($input, $output, counts, *op $(, $stream)?)
            }
            AllToAllV(sent, received) => {
                $target.all_to_all_v($input, sent, $output, received $(, $stream)?)
            }
            Gather(root) => {
                let output = (*root == $target.rank()).then_some($output);
                $target.gather($input, output, *root $(, $stream)?)
            }
            Scatter(root) => {
                let input = (*root == $target.rank()).then_some($input);
                $target.scatter(input, $output, *root $(, $stream)?)
            }
            Send(to) => $target.send($input, *to $(, $stream)?),
            Recv(from) => $target.recv($output, *from $(, $stream)?),
        }
    };
}

impl Operation {
    /// Runs on the host until all is done.
    fn run_on_host(
        &self,
        group: &ProcessGroup,
        input: &HostTensor,
        output: &mut HostTensor,
    ) -> flow_comm::Result<()> {
        run_on!(self, group, input, output, std::convert::identity)
    }

    /// Enqueues the operation in the order of `stream`.
    fn enqueue<B: DeviceBuffer>(
        &self,
        cuda: &CudaGroup,
        input: &B,
        output: &mut B,
        stream: &Stream,
    ) -> flow_comm::Result<()> {
        run_on!(self, cuda, input, output, std::slice::from_mut, stream)
    }
}

/// Where an operation writes its result.
pub(crate) enum Output<'a> {
    /// To a tensor of the caller's.
    Given(&'a Tensor),
    /// To a new tensor of this shape, of the input's kind and device.
    New(Vec<i64>),
    /// Nowhere: this rank has no result.
    None,
}

/// One operation and this rank's tensors for it.
pub(crate) struct Call {
    operation: Operation,
    /// Contiguous, on one device, and the same tensor where the operation has only one.
    input: Tensor,
    output: Tensor,
    /// The caller's tensor, where that is what comes back, and whether `output` is copied to it.
    own: Option<(Tensor, bool)>,
}

impl Call {
    /// Checks the tensors, and makes contiguous ones where needed. There is an input, or a given
    /// output, or both.
    pub fn new(
        group: &ProcessGroup,
        operation: Operation,
        input: Option<&Tensor>,
        output: Output,
    ) -> Result<Self> {
        let name = operation.name();
        if let Some(input) = input {
            check(operation.reduces(), input, false).map_err(failed(group, name))?;
        }
        let target = match output {
            Output::Given(tensor) => Some(tensor),
            _ => None,
        };
        if let Some(target) = target {
            check(operation.reduces(), target, true).map_err(failed(group, name))?;
        }
        let own = match (&output, input) {
            (Output::Given(tensor), _) => Some((tensor.shallow_clone(), true)),
            (Output::None, Some(input)) => Some((input.shallow_clone(), false)),
            _ => None,
        };
        let given = target.map(contiguous);
        let input = match (input.map(contiguous), &given) {
            (Some(input), _) => input,
            (None, Some(given)) => given.shallow_clone(),
            (None, None) => return Err(failed(group, name)("there is no tensor".into())),
        };
        let output = match (given, output) {
            (Some(given), _) => given,
            (None, Output::New(shape)) => Tensor::f_empty(shape, (input.kind(), input.device()))
                .map_err(torch_failed(group, name))?,
            (None, _) => input.shallow_clone(),
        };
        Ok(Self { operation, input, output, own })
    }
}

impl Prepared for Call {
    type Output = Tensor;

    fn name(&self) -> &'static str {
        self.operation.name()
    }

    fn cuda(&self, group: &ProcessGroup) -> Result<Option<Arc<CudaGroup>>> {
        cuda_group(group, &self.output)
    }

    fn run_on_host(&self, group: &ProcessGroup) -> flow_comm::Result<()> {
        let input = HostTensor::new(&self.input);
        let mut output = HostTensor::new(&self.output);
        self.operation.run_on_host(group, &input, &mut output)
    }

    fn start_on_host(
        self,
        group: &ProcessGroup,
    ) -> Result<impl FnOnce() -> Result<Self> + std::marker::Send + 'static> {
        let lane = match self.operation {
            Send(to) => Lane::To(to),
            Recv(from) => Lane::From(from, 0),
            _ => Lane::Collectives,
        };
        let name = self.name();
        let work = group.start(lane, name, |group| self.run_on_host(group).map(|()| self))?;
        Ok(move || Ok(work.wait()?))
    }

    fn enqueue(&self, group: &ProcessGroup, cuda: &CudaGroup, stream: &Stream) -> Result<()> {
        let input = cuda_buffer(group, self.name(), &self.input)?;
        let mut output = cuda_buffer(group, self.name(), &self.output)?;
        Ok(self.operation.enqueue(cuda, &input, &mut output, stream)?)
    }

    fn finish(self, group: &ProcessGroup) -> Result<Tensor> {
        match self.own {
            Some((mut own, written)) => {
                if written {
                    copy_back(group, self.operation.name(), &self.output, &mut own)?;
                }
                Ok(own)
            }
            None => Ok(self.output),
        }
    }
}

pub(crate) fn all_reduce(group: &ProcessGroup, tensor: &Tensor, op: ReduceOp) -> Result<Call> {
    Call::new(group, AllReduce(op), None, Output::Given(tensor))
}

pub(crate) fn reduce(
    group: &ProcessGroup,
    tensor: &Tensor,
    op: ReduceOp,
    root: usize,
) -> Result<Call> {
    from_or_to_root(group, Reduce(op, root), tensor, group.rank() == root)
}

pub(crate) fn broadcast(group: &ProcessGroup, tensor: &Tensor, root: usize) -> Result<Call> {
    from_or_to_root(group, Broadcast(root), tensor, group.rank() != root)
}

pub(crate) fn all_gather(group: &ProcessGroup, tensor: &Tensor) -> Result<Call> {
    let shape = stacked(group, tensor);
    Call::new(group, AllGather, Some(tensor), Output::New(shape))
}

pub(crate) fn all_gather_into(
    group: &ProcessGroup,
    output: &Tensor,
    input: &Tensor,
) -> Result<Call> {
    Call::new(group, AllGather, Some(input), Output::Given(output))
}

pub(crate) fn reduce_scatter(group: &ProcessGroup, tensor: &Tensor, op: ReduceOp) -> Result<Call> {
    let operation = ReduceScatter(op);
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
    let size = tensor.size();
    let ranks = group.world_size() as i64;
    if size.first().is_none_or(|length| length % ranks != 0) {
        return Err(failed(group, "all_to_all")(format!(
            "the first dimension of {size:?} cannot be divided among {ranks} ranks"
        )));
    }
    Call::new(group, AllToAll, Some(tensor), Output::New(size))
}

pub(crate) fn all_gather_v(
    group: &ProcessGroup,
    tensor: &Tensor,
    counts: &[usize],
) -> Result<Call> {
    let rows = Rows::of(group, "all_gather_v", tensor)?;
    rows.check("this rank's count", counts.get(group.rank()).copied())?;
    let (blocks, shape) = rows.blocks(counts)?;
    Call::new(group, AllGatherV(blocks), Some(tensor), Output::New(shape))
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
    Call::new(group, ReduceScatterV(blocks, op), Some(tensor), Output::New(shape))
}

pub(crate) fn all_to_all_v(
    group: &ProcessGroup,
    tensor: &Tensor,
    input_counts: &[usize],
    output_counts: &[usize],
) -> Result<Call> {
    let rows = Rows::of(group, "all_to_all_v", tensor)?;
    rows.check("the sum of input_counts", sum(input_counts))?;
    let (sent, _) = rows.blocks(input_counts)?;
    let (received, shape) = rows.blocks(output_counts)?;
    Call::new(group, AllToAllV(sent, received), Some(tensor), Output::New(shape))
}

pub(crate) fn gather(group: &ProcessGroup, tensor: &Tensor, root: usize) -> Result<Call> {
    let output =
        if group.rank() == root { Output::New(stacked(group, tensor)) } else { Output::None };
    Call::new(group, Gather(root), Some(tensor), output)
}

pub(crate) fn scatter(
    group: &ProcessGroup,
    input: Option<&Tensor>,
    output: &Tensor,
    root: usize,
) -> Result<Call> {
    let is_root = group.rank() == root;
    let expected = stacked(group, output);
    let reason = match input {
        Some(_) if !is_root => format!("only rank {root}, the root, has an input"),
        None if is_root => format!("rank {root} is the root and has no input"),
        Some(input) if input.size() != expected => {
            format!("the input has shape {:?} instead of {expected:?}", input.size())
        }
        _ => return Call::new(group, Scatter(root), input, Output::Given(output)),
    };
    Err(failed(group, "scatter")(reason))
}

pub(crate) fn send(group: &ProcessGroup, tensor: &Tensor, to: usize) -> Result<Call> {
    Call::new(group, Send(to), Some(tensor), Output::None)
}

pub(crate) fn recv(group: &ProcessGroup, tensor: &Tensor, from: usize) -> Result<Call> {
    Call::new(group, Recv(from), None, Output::Given(tensor))
}

/// An operation on one tensor that only some ranks write to.
fn from_or_to_root(
    group: &ProcessGroup,
    operation: Operation,
    tensor: &Tensor,
    written: bool,
) -> Result<Call> {
    if written {
        Call::new(group, operation, None, Output::Given(tensor))
    } else {
        Call::new(group, operation, Some(tensor), Output::None)
    }
}

/// The shape of all ranks' tensors together, if each is like this one.
fn stacked(group: &ProcessGroup, tensor: &Tensor) -> Vec<i64> {
    std::iter::once(group.world_size() as i64).chain(tensor.size()).collect()
}
