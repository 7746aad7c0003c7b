//! The gradients of differentiable collectives against numerical ones, in double precision.

use anyhow::{Context, Result, ensure};
use flow_autograd::Forward;
use flow_tensor::{P2pOp, ProcessGroup, ReduceOp, TensorCollectives, functional};
use tch::{Kind, Tensor};

/// This rank's part of a scalar function of all ranks' tensors, which is the sum of the parts.
type Part<'a> = &'a dyn Fn(&Tensor) -> Result<Tensor>;

type Operation = fn(&ProcessGroup, &Tensor, usize) -> flow_tensor::Result<Tensor>;

/// By name; the number is a root for those that have one, which are the last [`ROOTED`].
const OPERATIONS: [(&str, Operation); 14] = [
    ("all_reduce sum", |group, x, _| functional::all_reduce(group, x, ReduceOp::Sum)),
    ("all_reduce avg", |group, x, _| functional::all_reduce(group, x, ReduceOp::Avg)),
    ("all_gather", |group, x, _| functional::all_gather(group, x)),
    ("reduce_scatter sum", |group, x, _| functional::reduce_scatter(group, x, ReduceOp::Sum)),
    ("reduce_scatter avg", |group, x, _| functional::reduce_scatter(group, x, ReduceOp::Avg)),
    ("all_to_all", |group, x, _| functional::all_to_all(group, x)),
    ("all_gather_v", |group, x, _| {
        let counts: Vec<usize> = (0..group.world_size()).map(|rank| 1 + rank % 2).collect();
        functional::all_gather_v(group, &x.narrow(0, 0, counts[group.rank()] as i64), &counts)
    }),
    ("reduce_scatter_v sum", |group, x, _| {
        functional::reduce_scatter_v(group, x, &sent(group, 0), ReduceOp::Sum)
    }),
    ("reduce_scatter_v avg", |group, x, _| {
        functional::reduce_scatter_v(group, x, &sent(group, 0), ReduceOp::Avg)
    }),
    ("all_to_all_v", |group, x, _| {
        let rank = group.rank();
        let received: Vec<usize> =
            (0..group.world_size()).map(|from| sent(group, from)[rank]).collect();
        functional::all_to_all_v(group, x, &sent(group, rank), &received)
    }),
    ("broadcast", functional::broadcast),
    ("reduce", |group, x, root| functional::reduce(group, x, ReduceOp::Sum, root)),
    ("gather", functional::gather),
    ("scatter", functional::scatter),
];

const ROOTED: usize = 4;

/// How many of as many rows as there are ranks a rank sends each: none to itself, two to the next,
/// one to each other.
fn sent(group: &ProcessGroup, from: usize) -> Vec<usize> {
    let ranks = group.world_size();
    let count = |to: usize| match to {
        _ if ranks == 1 => 1,
        _ if to == from => 0,
        _ if to == (from + 1) % ranks => 2,
        _ => 1,
    };
    (0..ranks).map(count).collect()
}

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
    for (index, (name, operation)) in OPERATIONS.into_iter().enumerate() {
        let has_root = index >= OPERATIONS.len() - ROOTED;
        let roots = if has_root { ranks } else { 1 };
        for root in 0..roots {
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

/// Each rank sends to the next one and receives from the one before, at once.
pub fn batch(group: &ProcessGroup) -> Result<()> {
    let (rank, ranks) = (group.rank(), group.world_size());
    let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    let x = numbers(group, &[3, 2], 0);
    agrees(group, &x, &|x| {
        let y = x * x;
        let place = Tensor::empty([3, 2], (Kind::Double, group.device()));
        let number = Tensor::full([1], rank as i64, (Kind::Int64, group.device()));
        let numbers_place = number.zeros_like();
        let results = functional::batch_send_recv(
            group,
            &[
                P2pOp::Send { data: &y, to: next },
                P2pOp::Send { data: &number, to: next },
                P2pOp::Recv { buffer: &place, from: previous },
                P2pOp::Recv { buffer: &numbers_place, from: previous },
            ],
        )?;
        ensure!(results[3].int64_value(&[0]) == previous as i64);
        let received = &results[2];
        Ok((received * received * numbers(group, &[3, 2], 3)).sum(Kind::Double) + &results[0])
    })
}

/// On one rank nothing that the loss depends on has a gradient: that counts as zeros.
pub fn undefined(group: &ProcessGroup) -> Result<()> {
    let last = group.world_size() - 1;
    let is_last = group.rank() == last;
    for (name, operation) in OPERATIONS {
        let x = numbers(group, &[group.world_size() as i64, 2], 0).set_requires_grad(true);
        let y = operation(group, &x, 0)?;
        let passed_on = flow_autograd::custom_function(
            &[&y],
            |inputs| Ok(Forward { outputs: vec![inputs[0].copy()], saved: Vec::new() }),
            move |_, grads| Ok(vec![grads[0].as_ref().filter(|_| !is_last).map(Tensor::copy)]),
        )?;
        passed_on[0].sum(Kind::Double).f_backward()?;

        // The same with a loss of zero.
        let same = x.detach().set_requires_grad(true);
        let factor = if is_last { 0.0 } else { 1.0 };
        (operation(group, &same, 0)?.sum(Kind::Double) * factor).f_backward()?;
        ensure!(x.grad() == same.grad(), "{name}: {} instead of {}", x.grad(), same.grad());
    }
    Ok(())
}
