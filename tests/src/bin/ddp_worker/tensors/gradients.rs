//! The gradients of differentiable collectives against numerical ones, in double precision.

use anyhow::{ensure, Context, Result};
use flow_tensor::{functional, ProcessGroup, ReduceOp, TensorCollectives};
use tch::{Kind, Tensor};

/// This rank's part of a scalar function of all ranks' tensors, which is the sum of the parts.
type Part<'a> = &'a dyn Fn(&Tensor) -> Result<Tensor>;

type Operation = fn(&ProcessGroup, &Tensor, usize) -> flow_tensor::Result<Tensor>;

/// By name; the number is a root for those that have one.
const OPERATIONS: [(&str, Operation); 10] = [
    ("all_reduce sum", |group, x, _| functional::all_reduce(group, x, ReduceOp::Sum)),
    ("all_reduce avg", |group, x, _| functional::all_reduce(group, x, ReduceOp::Avg)),
    ("all_gather", |group, x, _| functional::all_gather(group, x)),
    ("reduce_scatter sum", |group, x, _| functional::reduce_scatter(group, x, ReduceOp::Sum)),
    ("reduce_scatter avg", |group, x, _| functional::reduce_scatter(group, x, ReduceOp::Avg)),
    ("all_to_all", |group, x, _| functional::all_to_all(group, x)),
    ("broadcast", functional::broadcast),
    ("reduce", |group, x, root| functional::reduce(group, x, ReduceOp::Sum, root)),
    ("gather", functional::gather),
    ("scatter", functional::scatter),
];

fn numbers(group: &ProcessGroup, shape: &[i64], salt: usize) -> Tensor {
    let count = shape.iter().product::<i64>();
    let options = (Kind::Double, group.device());
    let seeds = Tensor::arange(count, options) * 0.7 + (group.rank() * 10 + salt) as f64;
    seeds.sin().view(shape)
}

/// Compares the gradient of `part` at `x` by backward with the one by differences.
fn agrees(group: &ProcessGroup, x: &Tensor, part: Part) -> Result<()> {
    let x = x.detach().copy().set_requires_grad(true);
    part(&x)?.f_backward()?;
    let analytic = x.grad();
    ensure!(analytic.size() == x.size(), "{:?}", analytic.size());
    let step = 1e-5;
    for rank in 0..group.world_size() {
        for index in 0..x.numel() as i64 {
            let total = |step: f64| -> Result<f64> {
                let change = Tensor::zeros([x.numel() as i64], (Kind::Double, x.device()));
                if rank == group.rank() {
                    let _ = change.get(index).fill_(step);
                }
                let x = x.detach() + change.view(x.size().as_slice());
                let mut total = part(&x.set_requires_grad(true))?.detach().copy();
                group.all_reduce_tensor(&mut total, ReduceOp::Sum)?;
                Ok(total.double_value(&[]))
            };
            let numerical = (total(step)? - total(-step)?) / (2.0 * step);
            if rank == group.rank() {
                let own = analytic.contiguous().view([-1]).double_value(&[index]);
                ensure!(
                    (own - numerical).abs() <= 1e-6 * (1.0 + numerical.abs()),
                    "element {index} of rank {rank}: {own} instead of {numerical}"
                );
            }
        }
    }
    Ok(())
}

/// A function of the operation's result whose gradient depends on it.
fn loss(group: &ProcessGroup, operation: Operation, x: &Tensor, root: usize) -> Result<Tensor> {
    let y = operation(group, &(x * x), root)?;
    Ok((&y * &y * numbers(group, &y.size(), 3)).sum(Kind::Double))
}

fn each(
    group: &ProcessGroup,
    check: impl Fn(Operation, &Tensor, usize) -> Result<()>,
) -> Result<()> {
    let ranks = group.world_size();
    for (name, operation) in OPERATIONS {
        for root in 0..ranks {
            // Transposed: gradients need not be contiguous either.
            let x = numbers(group, &[2, ranks as i64], 0).tr();
            check(operation, &x, root).with_context(|| format!("{name}, root {root}"))?;
        }
    }
    Ok(())
}

pub fn first(group: &ProcessGroup) -> Result<()> {
    each(group, |operation, x, root| agrees(group, x, &|x| loss(group, operation, x, root)))
}

/// The gradient of a gradient.
pub fn second(group: &ProcessGroup) -> Result<()> {
    each(group, |operation, x, root| {
        agrees(group, x, &|x| {
            let loss = loss(group, operation, x, root)?;
            let gradient = Tensor::f_run_backward(&[&loss], &[x], true, true)?;
            Ok((&gradient[0] * numbers(group, &x.size(), 5)).sum(Kind::Double))
        })
    })
}

/// Each rank computes on what it receives, and sends it on: gradients come back the same way.
pub fn pipeline(group: &ProcessGroup) -> Result<()> {
    let (rank, last) = (group.rank(), group.world_size() - 1);
    let x = numbers(group, &[3, 2], 0);
    agrees(group, &x, &|x| {
        let mut y = x * x;
        if rank > 0 {
            y *= functional::recv(group, &[3, 2], Kind::Double, group.device(), rank - 1)?;
        }
        if rank < last {
            return Ok(functional::send(group, &y, rank + 1)?);
        }
        Ok((&y * &y).sum(Kind::Double))
    })
}
