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
//! The gradient is that of the sum of all ranks' losses. Backward is a collective operation as
//! well: an input requires a gradient on all ranks or on none, all ranks run backward through the
//! results, and if a program has several of these operations, the results depend on each other, or
//! else their backwards run in the same order on all ranks. A gradient that is undefined on a rank
//! counts as zeros. But where a rank's loss does not depend on the result at all, no backward runs
//! there, and the others wait for it until the time-out: add `0 * result.sum()` to that loss.
//! Gradients of gradients work, except for those of [`send`], [`recv`] and [`batch_send_recv`].

use std::sync::{Arc, OnceLock};

use flow_autograd::{custom_function, Forward};
use flow_comm::{P2pOp, ProcessGroup, ReduceOp};
use tch::{Device, Kind, Tensor};

use crate::batch::Batch;
use crate::collectives as calls;
use crate::error::{failed, Error, Result};
use crate::operation::{Call, Prepared};

/// The reduction of all ranks' tensors, on all ranks. `op` is `Sum` or `Avg`.
pub fn all_reduce(group: &ProcessGroup, tensor: &Tensor, op: ReduceOp) -> Result<Tensor> {
    check_linear(group, "all_reduce", op)?;
    let forward = |group: &ProcessGroup, tensor: &Tensor| {
        let result = copied(tensor);
        calls::all_reduce(group, &result, op)?.run(group)
    };
    function(group, "all_reduce", tensor, forward, move |group, grad| all_reduce(group, grad, op))
}

/// All ranks' tensors, stacked along a new first dimension, on all ranks.
pub fn all_gather(group: &ProcessGroup, tensor: &Tensor) -> Result<Tensor> {
    let forward = run(calls::all_gather);
    function(group, "all_gather", tensor, forward, |group, grad| {
        reduce_scatter(group, grad, ReduceOp::Sum)
    })
}

/// Rank r's result is `[r]` of the reduction of all ranks' tensors, whose first dimension is the
/// number of ranks. `op` is `Sum` or `Avg`.
pub fn reduce_scatter(group: &ProcessGroup, tensor: &Tensor, op: ReduceOp) -> Result<Tensor> {
    check_linear(group, "reduce_scatter", op)?;
    let forward = run(move |group, tensor| calls::reduce_scatter(group, tensor, op));
    function(group, "reduce_scatter", tensor, forward, move |group, grad| {
        Ok(all_gather(group, grad)? * weight(group, op))
    })
}

/// Rank r's result is block r of every rank's tensor: see
/// [`all_to_all_tensor`](crate::TensorCollectives::all_to_all_tensor).
pub fn all_to_all(group: &ProcessGroup, tensor: &Tensor) -> Result<Tensor> {
    function(group, "all_to_all", tensor, run(calls::all_to_all), all_to_all)
}

/// All ranks' tensors, one after the other along the first dimension: see
/// [`all_gather_v_tensor`](crate::TensorCollectives::all_gather_v_tensor).
pub fn all_gather_v(group: &ProcessGroup, tensor: &Tensor, counts: &[usize]) -> Result<Tensor> {
    let forward = run(|group, tensor| calls::all_gather_v(group, tensor, counts));
    let counts = counts.to_vec();
    function(group, "all_gather_v", tensor, forward, move |group, grad| {
        reduce_scatter_v(group, grad, &counts, ReduceOp::Sum)
    })
}

/// Rank r's part of the reduction of all ranks' tensors: see
/// [`reduce_scatter_v_tensor`](crate::TensorCollectives::reduce_scatter_v_tensor). `op` is `Sum` or
/// `Avg`.
pub fn reduce_scatter_v(
    group: &ProcessGroup,
    tensor: &Tensor,
    counts: &[usize],
    op: ReduceOp,
) -> Result<Tensor> {
    check_linear(group, "reduce_scatter_v", op)?;
    let forward = run(|group, tensor| calls::reduce_scatter_v(group, tensor, counts, op));
    let counts = counts.to_vec();
    function(group, "reduce_scatter_v", tensor, forward, move |group, grad| {
        Ok(all_gather_v(group, grad, &counts)? * weight(group, op))
    })
}

/// What each rank sends this one: see
/// [`all_to_all_v_tensor`](crate::TensorCollectives::all_to_all_v_tensor).
pub fn all_to_all_v(
    group: &ProcessGroup,
    tensor: &Tensor,
    input_counts: &[usize],
    output_counts: &[usize],
) -> Result<Tensor> {
    let forward =
        run(|group, tensor| calls::all_to_all_v(group, tensor, input_counts, output_counts));
    let (sent, received) = (input_counts.to_vec(), output_counts.to_vec());
    function(group, "all_to_all_v", tensor, forward, move |group, grad| {
        all_to_all_v(group, grad, &received, &sent)
    })
}

/// Rank `root`'s tensor, on all ranks. The others pass a tensor of the same shape.
pub fn broadcast(group: &ProcessGroup, tensor: &Tensor, root: usize) -> Result<Tensor> {
    let forward = |group: &ProcessGroup, tensor: &Tensor| {
        let result = copied(tensor);
        calls::broadcast(group, &result, root)?.run(group)
    };
    function(group, "broadcast", tensor, forward, move |group, grad| {
        reduce(group, grad, ReduceOp::Sum, root)
    })
}

/// The reduction of all ranks' tensors on rank `root`, zeros on the others. `op` is `Sum` or `Avg`.
pub fn reduce(group: &ProcessGroup, tensor: &Tensor, op: ReduceOp, root: usize) -> Result<Tensor> {
    check_linear(group, "reduce", op)?;
    let forward = |group: &ProcessGroup, tensor: &Tensor| {
        let result = copied(tensor);
        let result = calls::reduce(group, &result, op, root)?.run(group)?;
        Ok(if group.rank() == root { result } else { result.zeros_like() })
    };
    function(group, "reduce", tensor, forward, move |group, grad| {
        Ok(broadcast(group, grad, root)? * weight(group, op))
    })
}

/// On rank `root`, all ranks' tensors stacked along a new first dimension; on the others an empty
/// tensor, with 0 as first dimension, through which they run backward.
pub fn gather(group: &ProcessGroup, tensor: &Tensor, root: usize) -> Result<Tensor> {
    let forward = |group: &ProcessGroup, tensor: &Tensor| {
        let gathered = calls::gather(group, tensor, root)?.run(group)?;
        let empty: Vec<i64> = std::iter::once(0).chain(tensor.size()).collect();
        Ok(if group.rank() == root { gathered } else { Tensor::zeros(empty, of(tensor)) })
    };
    function(group, "gather", tensor, forward, move |group, grad| {
        let size = grad.size();
        let all: Vec<i64> =
            std::iter::once(group.world_size() as i64).chain(size[1..].iter().copied()).collect();
        // The others have no gradients to send; theirs only has the shape.
        let grad = if group.rank() == root {
            grad.shallow_clone()
        } else {
            depends_on(grad, &grad.new_zeros(&all, of(grad)))
        };
        scatter(group, &grad, root)
    })
}

/// `[r]` of rank `root`'s tensor, on rank r. The others pass a tensor of the same shape.
pub fn scatter(group: &ProcessGroup, tensor: &Tensor, root: usize) -> Result<Tensor> {
    let forward = |group: &ProcessGroup, tensor: &Tensor| {
        let size = tensor.size();
        if size.first() != Some(&(group.world_size() as i64)) {
            return Err(failed(group, "scatter")(format!(
                "the first dimension of {size:?} is not the number of ranks, {}",
                group.world_size()
            )));
        }
        let output = Tensor::empty(&size[1..], of(tensor));
        let input = (group.rank() == root).then_some(tensor);
        calls::scatter(group, input, &output, root)?.run(group)
    };
    function(group, "scatter", tensor, forward, move |group, grad| {
        let gathered = gather(group, grad, root)?;
        if group.rank() == root {
            return Ok(gathered);
        }
        let all: Vec<i64> = std::iter::once(group.world_size() as i64).chain(grad.size()).collect();
        Ok(depends_on(&gathered, &Tensor::zeros(all, of(grad))))
    })
}

/// Sends the tensor to rank `to`, which receives it by [`recv`]. The result is a zero to add to the
/// loss, or to run backward from: that receives the gradient from rank `to`.
pub fn send(group: &ProcessGroup, tensor: &Tensor, to: usize) -> Result<Tensor> {
    let (shape, options) = (tensor.size(), of(tensor));
    let forward = |group: &ProcessGroup, tensor: &Tensor| {
        drop(calls::send(group, tensor, to)?.run(group)?);
        Ok(Tensor::zeros([0i64; 0], of(tensor)))
    };
    function(group, "send", tensor, forward, move |group, _| {
        recv(group, &shape, options.0, options.1, to)
    })
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
    let forward = |group: &ProcessGroup, _: &Tensor| {
        calls::recv(group, &Tensor::empty(shape, (kind, device)), from)?.run(group)
    };
    function(group, "recv", &anchor((kind, device)), forward, move |group, grad| {
        drop(send(group, grad, from)?);
        Ok(Tensor::zeros([0], of(grad)))
    })
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
    let forward = |inputs: &[Tensor]| {
        let message = |(op, input): (&P2pOp<&Tensor>, &Tensor)| match *op {
            P2pOp::Send { to, .. } => P2pOp::Send { data: input.shallow_clone(), to },
            P2pOp::Recv { buffer, from } => P2pOp::Recv { buffer: buffer.empty_like(), from },
        };
        let messages: Vec<_> = ops.iter().zip(inputs).map(message).collect();
        let tensors = Batch::new(group, &messages)?.run(group)?;
        let result = |(op, tensor): (&P2pOp<&Tensor>, Tensor)| match op {
            P2pOp::Send { .. } => Tensor::zeros([0i64; 0], of(&tensor)),
            P2pOp::Recv { .. } => tensor,
        };
        Ok(ops.iter().zip(tensors).map(result).collect())
    };
    // What backward sends is what forward has received.
    let answers: Vec<P2pOp<TensorMeta>> = ops
        .iter()
        .map(|op| match *op {
            P2pOp::Send { data, to } => P2pOp::Recv { buffer: TensorMeta::of(data), from: to },
            P2pOp::Recv { buffer, from } => P2pOp::Send { data: TensorMeta::of(buffer), to: from },
        })
        .collect();
    let backward = move |group: &ProcessGroup, grads: &[Option<Tensor>]| {
        let has_grad = |answer: &P2pOp<TensorMeta>| match answer {
            P2pOp::Send { data: meta, .. } | P2pOp::Recv { buffer: meta, .. } => {
                is_floating(meta.options.0)
            }
        };
        let message = |(answer, grad): (&P2pOp<TensorMeta>, &Option<Tensor>)| match answer {
            P2pOp::Recv { buffer, from } => P2pOp::Recv { buffer: buffer.zeros(), from: *from },
            P2pOp::Send { data, to } => P2pOp::Send { data: data.or_zeros(grad), to: *to },
        };
        let messages: Vec<_> =
            answers.iter().zip(grads).filter(|(answer, _)| has_grad(answer)).map(message).collect();
        let mut tensors = Batch::new(group, &messages)?.run(group)?.into_iter();
        let result = |answer: &P2pOp<TensorMeta>| match answer {
            _ if !has_grad(answer) => None,
            P2pOp::Recv { .. } => tensors.next(),
            P2pOp::Send { .. } => tensors.next().map(|sent| Tensor::zeros([0], of(&sent))),
        };
        Ok(answers.iter().map(result).collect())
    };
    let inputs: Vec<&Tensor> = inputs.iter().collect();
    functions(group, "batch_send_recv", &inputs, forward, backward)
}

/// What another tensor like this one is made of.
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

    /// The gradient. Where there is none, other ranks may have one, and so this one takes part.
    fn or_zeros(&self, gradient: &Option<Tensor>) -> Tensor {
        gradient.as_ref().map_or_else(|| self.zeros(), Tensor::shallow_clone)
    }
}

/// A tensor that a received tensor can depend on.
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
    forward: impl FnOnce(&ProcessGroup, &Tensor) -> Result<Tensor>,
    backward: impl Fn(&ProcessGroup, &Tensor) -> Result<Tensor> + Send + 'static,
) -> Result<Tensor> {
    let of_result = Arc::new(OnceLock::new());
    let meta = Arc::clone(&of_result);
    let forward = |inputs: &[Tensor]| {
        let result = forward(group, &inputs[0])?;
        let _ = of_result.set(TensorMeta::of(&result));
        Ok(vec![result])
    };
    let backward = move |group: &ProcessGroup, grads: &[Option<Tensor>]| {
        let known = || failed(group, operation)("backward before forward".into());
        let grad = meta.get().ok_or_else(known)?.or_zeros(&grads[0]);
        Ok(vec![Some(backward(group, &grad)?)])
    };
    functions(group, operation, &[tensor], forward, backward).map(|mut one| one.swap_remove(0))
}

/// A gradient for each input, if it has one.
type Gradients = Vec<Option<Tensor>>;

/// As [`function`], for any number of tensors and results.
fn functions(
    group: &ProcessGroup,
    operation: &'static str,
    tensors: &[&Tensor],
    forward: impl FnOnce(&[Tensor]) -> Result<Vec<Tensor>>,
    backward: impl Fn(&ProcessGroup, &[Option<Tensor>]) -> Result<Gradients> + Send + 'static,
) -> Result<Vec<Tensor>> {
    let group_of_backward = group.clone();
    let mut own_error = None;
    let result = custom_function(
        tensors,
        |inputs| match forward(inputs) {
            Ok(outputs) => Ok(Forward { outputs, saved: Vec::new() }),
            Err(error) => {
                let text = error.to_string();
                own_error = Some(error);
                Err(text.into())
            }
        },
        move |_, grads| Ok(backward(&group_of_backward, grads)?),
    );
    match (own_error, result) {
        (Some(error), _) => Err(error),
        (None, Ok(outputs)) => Ok(outputs),
        (None, Err(error)) => Err(failed(group, operation)(error.to_string())),
    }
}

fn run(
    call: impl Fn(&ProcessGroup, &Tensor) -> Result<Call>,
) -> impl Fn(&ProcessGroup, &Tensor) -> Result<Tensor> {
    move |group, tensor| call(group, tensor)?.run(group)
}

/// `tensor`, in such a way that backward also runs through `empty`, whose first dimension is 0:
/// what other ranks do to compute a gradient of a gradient, this one must do, too.
fn depends_on(empty: &Tensor, tensor: &Tensor) -> Tensor {
    Tensor::cat(&[empty, tensor], 0)
}

/// A copy in memory of its own; `Tensor::copy` writes zeros there first.
fn copied(tensor: &Tensor) -> Tensor {
    tensor.internal_to_copy(of(tensor), false)
}

fn of(tensor: &Tensor) -> (Kind, Device) {
    (tensor.kind(), tensor.device())
}

/// What each rank's element counts in the result.
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
