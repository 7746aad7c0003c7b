//! Which call of the table of operations each collective is, and what shapes it takes.

use flow_comm::{ProcessGroup, ReduceOp};
use tch::Tensor;

use crate::error::{Result, failed};
use crate::operation::{Call, Counts, Operation, Output};
use crate::tensors::units;

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
    let size = tensor.size();
    let ranks = group.world_size() as i64;
    if size.first().is_none_or(|length| length % ranks != 0) {
        return Err(failed(group, "all_to_all")(format!(
            "the first dimension of {size:?} cannot be divided among {ranks} ranks"
        )));
    }
    Call::new(group, Operation::AllToAll, Some(tensor), Output::New(size))
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
    let (sent, _) = rows.blocks(input_counts)?;
    let (received, shape) = rows.blocks(output_counts)?;
    Call::new(group, Operation::AllToAllV(sent, received), Some(tensor), Output::New(shape))
}

pub(crate) fn gather(group: &ProcessGroup, tensor: &Tensor, root: usize) -> Result<Call> {
    let output =
        if group.rank() == root { Output::New(stacked(group, tensor)) } else { Output::None };
    Call::new(group, Operation::Gather(root), Some(tensor), output)
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
        _ => return Call::new(group, Operation::Scatter(root), input, Output::Given(output)),
    };
    Err(failed(group, "scatter")(reason))
}

pub(crate) fn send(group: &ProcessGroup, tensor: &Tensor, to: usize) -> Result<Call> {
    Call::new(group, Operation::Send(to), Some(tensor), Output::None)
}

pub(crate) fn recv(group: &ProcessGroup, tensor: &Tensor, from: usize) -> Result<Call> {
    Call::new(group, Operation::Recv(from), None, Output::Given(tensor))
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

/// A tensor's first dimension, which is divided among ranks.
struct Rows<'a> {
    group: &'a ProcessGroup,
    operation: &'static str,
    size: Vec<i64>,
    /// How many elements of a buffer a row is, see [`HostTensor`](crate::tensors::HostTensor).
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

    /// Checks that `counted` is the length of the first dimension.
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
        let total = sum(counts)
            .filter(|total| total.checked_mul(self.elements.max(1)).is_some())
            .and_then(|total| i64::try_from(total).ok())
            .ok_or_else(|| failed("the counts are too large".into()))?;
        let mut shape = self.size.clone();
        shape[0] = total;
        Ok((counts.iter().map(|count| count * self.elements).collect(), shape))
    }
}

fn sum(counts: &[usize]) -> Option<usize> {
    counts.iter().try_fold(0, |sum: usize, &count| sum.checked_add(count))
}
