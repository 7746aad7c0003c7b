//! The table of operations: what each does on the host and on GPUs, and what tensors it takes.

use std::sync::Arc;

use flow_comm::nccl::{CudaGroup, Stream};
use flow_comm::{Lane, ProcessGroup, ReduceOp};
use tch::Tensor;

use crate::error::{Result, failed, torch_failed};
use crate::tensors::{
    HostTensor, OVERLAPS, contiguous, copy_back, cuda_buffer, cuda_group, current_stream, overlaps,
};

/// The length of each rank's block, in elements of the buffer.
pub(crate) type Counts = Vec<usize>;

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

/// Runs an operation on `$target`, a process group or, with a stream, a group of GPUs: both have
/// the same functions, except that only the latter broadcasts several buffers.
macro_rules! run_on {
    (
        $operation:expr, $target:expr, $input:ident, $output:ident, $broadcast:expr
        $(, $stream:expr)?
    ) => {
        match $operation {
            AllReduce(op) => $target.all_reduce(&mut $output, *op $(, $stream)?),
            Reduce(op, root) => $target.reduce(&mut $output, *op, *root $(, $stream)?),
            Broadcast(root) => $target.broadcast($broadcast(&mut $output), *root $(, $stream)?),
            AllGather => $target.all_gather(&$input, &mut $output $(, $stream)?),
            ReduceScatter(op) => $target.reduce_scatter(&$input, &mut $output, *op $(, $stream)?),
            AllToAll => $target.all_to_all(&$input, &mut $output $(, $stream)?),
            AllGatherV(counts) => {
                $target.all_gather_v(&$input, &mut $output, counts $(, $stream)?)
            }
            ReduceScatterV(counts, op) => {
                $target.reduce_scatter_v(&$input, &mut $output, counts, *op $(, $stream)?)
            }
            AllToAllV(sent, received) => {
                $target.all_to_all_v(&$input, sent, &mut $output, received $(, $stream)?)
            }
            Gather(root) => {
                let output = (*root == $target.rank()).then_some(&mut $output);
                $target.gather(&$input, output, *root $(, $stream)?)
            }
            Scatter(root) => {
                let input = (*root == $target.rank()).then_some(&$input);
                $target.scatter(input, &mut $output, *root $(, $stream)?)
            }
            Send(to) => $target.send(&$input, *to $(, $stream)?),
            Recv(from) => $target.recv(&mut $output, *from $(, $stream)?),
        }
    };
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

/// Operations and this rank's tensors for them, ready to run.
pub(crate) trait Prepared: std::marker::Send + Sized + 'static {
    /// The caller's result.
    type Output: 'static;

    fn name(&self) -> &'static str;

    /// The group's collectives on the tensors' GPU, if they are on one.
    fn cuda(&self, group: &ProcessGroup) -> Result<Option<Arc<CudaGroup>>>;

    /// Runs on the host until all is done.
    fn run_on_host(&self, group: &ProcessGroup) -> flow_comm::Result<()>;

    /// Starts on the host, beside the caller. What is returned waits for it.
    fn start_on_host(
        self,
        group: &ProcessGroup,
    ) -> Result<impl FnOnce() -> Result<Self> + std::marker::Send + 'static>;

    /// Enqueues the operation in the order of `stream`.
    fn enqueue(&self, group: &ProcessGroup, cuda: &CudaGroup, stream: &Stream) -> Result<()>;

    /// The result, when all is done.
    fn finish(self, group: &ProcessGroup) -> Result<Self::Output>;

    /// Runs the operation: on CPUs until it is done, on GPUs in the order of libtorch's stream.
    fn run(self, group: &ProcessGroup) -> Result<Self::Output> {
        match self.cuda(group)? {
            Some(cuda) => self.enqueue(group, &cuda, &current_stream(group, &cuda)?)?,
            None => self.run_on_host(group)?,
        }
        self.finish(group)
    }
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
        run_on!(&self.operation, group, input, output, std::convert::identity)
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
        run_on!(&self.operation, cuda, input, output, std::slice::from_mut, stream)?;
        Ok(())
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

/// Checks that an operation can read the tensor and, if `written`, write it.
pub(crate) fn check(reduces: bool, tensor: &Tensor, written: bool) -> Result<(), String> {
    if let Some(reason) = flow_autograd::unsendable(tensor) {
        return Err(format!("the tensor {reason}"));
    }
    if reduces && flow_autograd::dtype(tensor.kind()).is_none() {
        return Err(format!(
            "the tensor is {:?}: make it Float, Double, Half, BFloat16, Int, Int64 or Uint8",
            tensor.kind()
        ));
    }
    if written && overlaps(tensor) {
        return Err(format!("no result can be written to the tensor, as it {OVERLAPS}"));
    }
    Ok(())
}
