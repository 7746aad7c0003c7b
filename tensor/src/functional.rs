//! Collectives with gradients: `torch.distributed.nn.functional`.
//!
//! Each returns a new tensor. Where tensors of this rank depend on tensors of others, backward
//! sends their gradients there, by the collective that is its counterpart:
//!
//! | forward | backward |
//! |---|---|
//! | [`all_reduce`] | all_reduce |
//! | [`all_gather`] | reduce_scatter |
//! | [`reduce_scatter`] | all_gather |
//! | [`all_to_all`] | all_to_all |
//! | [`all_gather_v`] | reduce_scatter_v |
//! | [`reduce_scatter_v`] | all_gather_v |
//! | [`all_to_all_v`] | all_to_all_v |
//! | [`broadcast`] | reduce |
//! | [`reduce`] | broadcast |
//! | [`scatter`] | gather |
//! | [`gather`] | scatter |
//! | [`send`] | recv |
//! | [`recv`] | send |
//! | [`batch_send_recv`] | batch_send_recv |
//!
//! The gradient is that of the sum of all ranks' losses. Backward is collective too. An input needs
//! a gradient on all ranks or none, and all ranks run backward through the results. Several such
//! operations depend on each other, or run backward in one order everywhere. A gradient that is
//! undefined on a rank counts as zeros. But where a rank's loss does not depend on the result at
//! all, no backward runs there. The others then wait for it until the time-out. Add `0 *
//! result.sum()` to that loss. Gradients of gradients work, except for those of [`send`], [`recv`]
//! and [`batch_send_recv`].

use std::sync::{Arc, OnceLock};

use flow_autograd::{Forward, custom_function};
use flow_comm::{P2pOp, ProcessGroup, ReduceOp};
use tch::{Device, Kind, Tensor};

use crate::batch::Batch;
use crate::error::{Error, Result, failed};
use crate::operation;
use crate::prepared::Prepared;

/// Reduces all ranks' tensors; all ranks get the result. `op` is `Sum` or `Avg`.
pub fn all_reduce(group: &ProcessGroup, tensor: &Tensor, op: ReduceOp) -> Result<Tensor> {
    check_linear(group, "all_reduce", op)?;
    function(
        group,
        "all_reduce",
        tensor,
        |tensor| operation::all_reduce(group, &copied(tensor), op)?.run(group),
        move |group, grad| all_reduce(group, grad, op),
    )
}

/// Gathers all ranks' tensors, stacked along a new first dimension; all ranks get the result.
pub fn all_gather(group: &ProcessGroup, tensor: &Tensor) -> Result<Tensor> {
    function(
        group,
        "all_gather",
        tensor,
        |tensor| operation::all_gather(group, tensor)?.run(group),
        |group, grad| reduce_scatter(group, grad, ReduceOp::Sum),
    )
}

/// Reduces all ranks' tensors, whose first dimension is the number of ranks; rank r gets `[r]` of
/// the result. `op` is `Sum` or `Avg`.
pub fn reduce_scatter(group: &ProcessGroup, tensor: &Tensor, op: ReduceOp) -> Result<Tensor> {
    check_linear(group, "reduce_scatter", op)?;
    function(
        group,
        "reduce_scatter",
        tensor,
        |tensor| operation::reduce_scatter(group, tensor, op)?.run(group),
        move |group, grad| Ok(all_gather(group, grad)? * weight(group, op)),
    )
}

/// Gives rank r block r of every rank's tensor: see
/// [`all_to_all_tensor`](crate::TensorCollectives::all_to_all_tensor).
pub fn all_to_all(group: &ProcessGroup, tensor: &Tensor) -> Result<Tensor> {
    function(
        group,
        "all_to_all",
        tensor,
        |tensor| operation::all_to_all(group, tensor)?.run(group),
        all_to_all,
    )
}

/// Gathers all ranks' tensors, one after the other along the first dimension: see
/// [`all_gather_v_tensor`](crate::TensorCollectives::all_gather_v_tensor).
pub fn all_gather_v(group: &ProcessGroup, tensor: &Tensor, counts: &[usize]) -> Result<Tensor> {
    let counts_of_backward = counts.to_vec();
    function(
        group,
        "all_gather_v",
        tensor,
        |tensor| operation::all_gather_v(group, tensor, counts)?.run(group),
        move |group, grad| reduce_scatter_v(group, grad, &counts_of_backward, ReduceOp::Sum),
    )
}

/// Reduces all ranks' tensors; rank r gets its part of the result: see
/// [`reduce_scatter_v_tensor`](crate::TensorCollectives::reduce_scatter_v_tensor). `op` is `Sum` or
/// `Avg`.
pub fn reduce_scatter_v(
    group: &ProcessGroup,
    tensor: &Tensor,
    counts: &[usize],
    op: ReduceOp,
) -> Result<Tensor> {
    check_linear(group, "reduce_scatter_v", op)?;
    let counts_of_backward = counts.to_vec();
    function(
        group,
        "reduce_scatter_v",
        tensor,
        |tensor| operation::reduce_scatter_v(group, tensor, counts, op)?.run(group),
        move |group, grad| Ok(all_gather_v(group, grad, &counts_of_backward)? * weight(group, op)),
    )
}

/// Sends each rank a part, and returns what all ranks have sent: see
/// [`all_to_all_v_tensor`](crate::TensorCollectives::all_to_all_v_tensor).
pub fn all_to_all_v(
    group: &ProcessGroup,
    tensor: &Tensor,
    input_counts: &[usize],
    output_counts: &[usize],
) -> Result<Tensor> {
    let sent = input_counts.to_vec();
    let received = output_counts.to_vec();
    function(
        group,
        "all_to_all_v",
        tensor,
        |tensor| operation::all_to_all_v(group, tensor, input_counts, output_counts)?.run(group),
        move |group, grad| all_to_all_v(group, grad, &received, &sent),
    )
}

/// Gives all ranks rank `root`'s tensor. The others pass a tensor of the same shape.
pub fn broadcast(group: &ProcessGroup, tensor: &Tensor, root: usize) -> Result<Tensor> {
    function(
        group,
        "broadcast",
        tensor,
        |tensor| operation::broadcast(group, &copied(tensor), root)?.run(group),
        move |group, grad| reduce(group, grad, ReduceOp::Sum, root),
    )
}

/// Reduces all ranks' tensors; rank `root` gets the result, the others zeros. `op` is `Sum` or `Avg`.
pub fn reduce(group: &ProcessGroup, tensor: &Tensor, op: ReduceOp, root: usize) -> Result<Tensor> {
    check_linear(group, "reduce", op)?;
    function(
        group,
        "reduce",
        tensor,
        |tensor| {
            let result = operation::reduce(group, &copied(tensor), op, root)?.run(group)?;
            Ok(if group.rank() == root { result } else { result.zeros_like() })
        },
        move |group, grad| Ok(broadcast(group, grad, root)? * weight(group, op)),
    )
}

/// Gathers all ranks' tensors on rank `root`, stacked along a new first dimension. The others get an
/// empty tensor, with 0 as first dimension, through which they run backward.
pub fn gather(group: &ProcessGroup, tensor: &Tensor, root: usize) -> Result<Tensor> {
    function(
        group,
        "gather",
        tensor,
        |tensor| {
            let gathered = operation::gather(group, tensor, root)?.run(group)?;
            if group.rank() == root {
                return Ok(gathered);
            }
            Ok(Tensor::zeros(with_first(0, &tensor.size()), of(tensor)))
        },
        move |group, grad| {
            if group.rank() == root {
                return scatter(group, grad, root);
            }
            // The others have no gradients to send; theirs only has the shape.
            let all = with_first(group.world_size(), &grad.size()[1..]);
            scatter(group, &depends_on(grad, &grad.new_zeros(&all, of(grad))), root)
        },
    )
}

/// Gives rank r `[r]` of rank `root`'s tensor. The others pass a tensor of the same shape.
pub fn scatter(group: &ProcessGroup, tensor: &Tensor, root: usize) -> Result<Tensor> {
    function(
        group,
        "scatter",
        tensor,
        |tensor| {
            let size = tensor.size();
            if size.first() != Some(&(group.world_size() as i64)) {
                return Err(failed(group, "scatter")(format!(
                    "the first dimension of {size:?} is not the number of ranks, {}",
                    group.world_size()
                )));
            }
            let output = Tensor::empty(&size[1..], of(tensor));
            let input = (group.rank() == root).then_some(tensor);
            operation::scatter(group, input, &output, root)?.run(group)
        },
        move |group, grad| {
            let gathered = gather(group, grad, root)?;
            if group.rank() == root {
                return Ok(gathered);
            }
            let all = with_first(group.world_size(), &grad.size());
            Ok(depends_on(&gathered, &Tensor::zeros(all, of(grad))))
        },
    )
}

/// Returns a shape with one dimension more, before the others.
fn with_first(length: usize, shape: &[i64]) -> Vec<i64> {
    std::iter::once(length as i64).chain(shape.iter().copied()).collect()
}

/// Sends the tensor to rank `to`, which receives it by [`recv`]. The result is a zero to add to the
/// loss, or to run backward from: that receives the gradient from rank `to`.
pub fn send(group: &ProcessGroup, tensor: &Tensor, to: usize) -> Result<Tensor> {
    let sent = TensorMeta::of(tensor);
    function(
        group,
        "send",
        tensor,
        |tensor| {
            drop(operation::send(group, tensor, to)?.run(group)?);
            Ok(Tensor::zeros([0i64; 0], of(tensor)))
        },
        move |group, _| recv(group, &sent.shape, sent.options.0, sent.options.1, to),
    )
}

/// Receives a tensor of this shape and kind that rank `from` sends by [`send`]. The result requires
/// a gradient, if its kind can have one, which backward sends to rank `from`.
pub fn recv(
    group: &ProcessGroup,
    shape: &[i64],
    kind: Kind,
    device: Device,
    from: usize,
) -> Result<Tensor> {
    function(
        group,
        "recv",
        &anchor((kind, device)),
        |_| operation::recv(group, &Tensor::empty(shape, (kind, device)), from)?.run(group),
        move |group, grad| {
            drop(send(group, grad, from)?);
            Ok(Tensor::zeros([0], of(grad)))
        },
    )
}

/// Sends and receives messages together: see
/// [`batch_send_recv_tensors`](crate::TensorCollectives::batch_send_recv_tensors). A tensor to
/// receive into only says its shape, kind and device, and is not written to.
///
/// Returns a tensor for each message, in their order: what was received, or, as [`send`] does, a
/// zero to run backward from. Backward through them sends and receives the gradients, also
/// together. All sent tensors of floating-point kinds require a gradient, or the batches of the
/// group send none.
pub fn batch_send_recv(group: &ProcessGroup, ops: &[P2pOp<&Tensor>]) -> Result<Vec<Tensor>> {
    let inputs: Vec<Tensor> = ops
        .iter()
        .map(|op| match op {
            P2pOp::Send { data, .. } => data.shallow_clone(),
            P2pOp::Recv { buffer, .. } => anchor(of(buffer)),
        })
        .collect();
    // What backward sends is what forward has received.
    let answers: Vec<P2pOp<TensorMeta>> = ops
        .iter()
        .map(|op| match *op {
            P2pOp::Send { data, to } => P2pOp::Recv { buffer: TensorMeta::of(data), from: to },
            P2pOp::Recv { buffer, from } => P2pOp::Send { data: TensorMeta::of(buffer), to: from },
        })
        .collect();
    let inputs: Vec<&Tensor> = inputs.iter().collect();
    functions(
        group,
        "batch_send_recv",
        &inputs,
        |inputs| Ok(Forward { outputs: batch_forward(group, ops, inputs)?, saved: Vec::new() }),
        move |group, _, grads| batch_backward(group, &answers, grads),
    )
}

/// Sends and receives a batch. Returns what was received, and zeros in place of what was sent.
fn batch_forward(
    group: &ProcessGroup,
    ops: &[P2pOp<&Tensor>],
    inputs: &[Tensor],
) -> Result<Vec<Tensor>> {
    let mut messages = Vec::with_capacity(ops.len());
    for (op, input) in ops.iter().zip(inputs) {
        messages.push(match *op {
            P2pOp::Send { to, .. } => P2pOp::Send { data: input.shallow_clone(), to },
            P2pOp::Recv { buffer, from } => P2pOp::Recv { buffer: buffer.empty_like(), from },
        });
    }
    let mut results = Batch::new(group, &messages)?.run(group)?;
    for (op, result) in ops.iter().zip(&mut results) {
        if let P2pOp::Send { .. } = op {
            *result = Tensor::zeros([0i64; 0], of(result));
        }
    }
    Ok(results)
}

/// Sends and receives the gradients of a batch. Kinds that have none are left out.
fn batch_backward(
    group: &ProcessGroup,
    answers: &[P2pOp<TensorMeta>],
    grads: &[Option<Tensor>],
) -> Result<Gradients> {
    let mut messages = Vec::new();
    for (answer, grad) in answers.iter().zip(grads) {
        match answer {
            P2pOp::Recv { buffer, from } if is_floating(buffer.options.0) => {
                messages.push(P2pOp::Recv { buffer: buffer.zeros(), from: *from });
            }
            P2pOp::Send { data, to } if is_floating(data.options.0) => {
                messages.push(P2pOp::Send { data: data.or_zeros(grad), to: *to });
            }
            _ => {}
        }
    }
    let mut tensors = Batch::new(group, &messages)?.run(group)?.into_iter();
    let mut results = Vec::with_capacity(answers.len());
    for answer in answers {
        results.push(match answer {
            P2pOp::Recv { buffer, .. } if is_floating(buffer.options.0) => tensors.next(),
            P2pOp::Send { data, .. } if is_floating(data.options.0) => {
                tensors.next().map(|sent| Tensor::zeros([0], of(&sent)))
            }
            _ => None,
        });
    }
    Ok(results)
}

/// The shape, kind and device of a tensor.
struct TensorMeta {
    shape: Vec<i64>,
    options: (Kind, Device),
}

impl TensorMeta {
    fn of(tensor: &Tensor) -> Self {
        Self { shape: tensor.size(), options: of(tensor) }
    }

    fn zeros(&self) -> Tensor {
        Tensor::zeros(&self.shape, self.options)
    }

    /// Returns the gradient, or zeros: other ranks may have one, and so this one takes part.
    fn or_zeros(&self, gradient: &Option<Tensor>) -> Tensor {
        gradient.as_ref().map_or_else(|| self.zeros(), Tensor::shallow_clone)
    }
}

/// Returns a tensor that a received tensor can depend on.
fn anchor(options: (Kind, Device)) -> Tensor {
    Tensor::zeros([0], options).set_requires_grad(is_floating(options.0))
}

fn is_floating(kind: Kind) -> bool {
    matches!(kind, Kind::Float | Kind::Double | Kind::Half | Kind::BFloat16)
}

/// Runs `forward` on the tensor, with `backward` from the result's gradient to the tensor's.
fn function(
    group: &ProcessGroup,
    operation: &'static str,
    tensor: &Tensor,
    forward: impl FnOnce(&Tensor) -> Result<Tensor>,
    backward: impl Fn(&ProcessGroup, &Tensor) -> Result<Tensor> + Send + 'static,
) -> Result<Tensor> {
    let result_of_forward = Arc::new(OnceLock::new());
    let meta = Arc::clone(&result_of_forward);
    let mut results = functions(
        group,
        operation,
        &[tensor],
        |inputs| {
            let result = forward(&inputs[0])?;
            let _ = result_of_forward.set(TensorMeta::of(&result));
            Ok(Forward { outputs: vec![result], saved: Vec::new() })
        },
        move |group, _, grads| {
            let Some(meta) = meta.get() else {
                return Err(failed(group, operation)("backward before forward".into()));
            };
            Ok(vec![Some(backward(group, &meta.or_zeros(&grads[0]))?)])
        },
    )?;
    Ok(results.swap_remove(0))
}

/// A gradient for each input, if it has one.
pub(crate) type Gradients = Vec<Option<Tensor>>;

/// Runs `forward` on tensors, with `backward` from what it has saved and the results' gradients to
/// the tensors'.
pub(crate) fn functions(
    group: &ProcessGroup,
    operation: &'static str,
    tensors: &[&Tensor],
    forward: impl FnOnce(&[Tensor]) -> Result<Forward>,
    backward: impl Fn(&ProcessGroup, &[Tensor], &[Option<Tensor>]) -> Result<Gradients> + Send + 'static,
) -> Result<Vec<Tensor>> {
    let group_of_backward = group.clone();
    let mut error_of_forward = None;
    let result = custom_function(
        tensors,
        |inputs| {
            forward(inputs).map_err(|error| {
                let text = error.to_string();
                error_of_forward = Some(error);
                text.into()
            })
        },
        move |saved, grads| Ok(backward(&group_of_backward, saved, grads)?),
    );
    if let Some(error) = error_of_forward {
        return Err(error);
    }
    result.map_err(|error| failed(group, operation)(error.to_string()))
}

/// Makes `tensor` depend on `empty`, whose first dimension is 0, so that backward runs through both.
/// What other ranks do to compute a gradient of a gradient, this one must do, too.
fn depends_on(empty: &Tensor, tensor: &Tensor) -> Tensor {
    Tensor::cat(&[empty, tensor], 0)
}

/// Returns a copy in memory of its own; `Tensor::copy` writes zeros there first.
fn copied(tensor: &Tensor) -> Tensor {
    tensor.internal_to_copy(of(tensor), false)
}

fn of(tensor: &Tensor) -> (Kind, Device) {
    (tensor.kind(), tensor.device())
}

/// Returns the factor of each rank's element in the result.
fn weight(group: &ProcessGroup, op: ReduceOp) -> f64 {
    match op {
        ReduceOp::Avg => 1.0 / group.world_size() as f64,
        _ => 1.0,
    }
}

fn check_linear(group: &ProcessGroup, operation: &'static str, op: ReduceOp) -> Result<(), Error> {
    match op {
        ReduceOp::Sum | ReduceOp::Avg => Ok(()),
        _ => Err(failed(group, operation)(format!("{op} has no gradient here: use sum or avg"))),
    }
}
