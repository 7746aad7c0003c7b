//! Whether the logical sizes of an operation's tensors fit.
//!
//! libtorch sees the locals' sizes, and these may fit where the logical ones do not. Of tensors with 2
//! rows and with 4, split by rows, each of two ranks has 1 row and 2: libtorch would broadcast the 1.

use super::op::Op;
use super::{has_name, pointwise};

/// Losses that broadcast their tensors.
const LOSSES: &[&str] = &[
    "huber_loss",
    "huber_loss_backward",
    "mse_loss",
    "mse_loss_backward",
    "smooth_l1_loss",
    "smooth_l1_loss_backward",
];

/// Checks the sizes as libtorch does on one device: those of operations on each element, of products,
/// of losses, and of tensors that are joined.
///
/// # Errors
/// Returns why the sizes do not fit, in the same words on all ranks.
pub fn check(op: &Op) -> Result<(), String> {
    match op.name {
        "mm" | "bmm" | "mv" | "dot" => product(op, 0).map(drop),
        "addmm" | "baddbmm" | "addmv" => check_added(op, &product(op, 1)?),
        "addr" => check_added(op, &[&op.inputs[1].shape[..], &op.inputs[2].shape].concat()),
        "binary_cross_entropy" | "binary_cross_entropy_with_logits" => {
            check_same(op, &broadcast(op)?)
        }
        "cat" => check_joined(op, op.dim(1, op.broadcast_rank())),
        "stack" => check_joined(op, None),
        name if has_name(pointwise::RULES, name) => {
            let result = broadcast(op)?;
            if op.in_place { check_same(op, &result) } else { Ok(()) }
        }
        name if LOSSES.contains(&name) => broadcast(op).map(drop),
        _ => Ok(()),
    }
}

/// Checks that the first input, to which a product is added, can be broadcast to the product, and is as
/// large if it is written.
fn check_added(op: &Op, product: &[usize]) -> Result<(), String> {
    let first = &op.inputs[0].shape;
    if op.in_place || broadcast_two(first, product).as_deref() != Some(product) {
        return check_same(op, product);
    }
    Ok(())
}

/// Checks that the result has the sizes of the first input.
fn check_same(op: &Op, result: &[usize]) -> Result<(), String> {
    let first = &op.inputs[0].shape;
    if first == result {
        return Ok(());
    }
    Err(format!("a tensor {first:?} does not fit a result {result:?}"))
}

/// Returns the shape of a product of matrices, of batches of them, or of vectors: of input `first` and
/// the next one.
fn product(op: &Op, first: usize) -> Result<Vec<usize>, String> {
    let one = &op.inputs[first].shape;
    let other = &op.inputs[first + 1].shape;
    match (&one[..], &other[..]) {
        ([rows, inner], [also, columns]) if inner == also => Ok(vec![*rows, *columns]),
        ([batch, rows, inner], [same, also, columns]) if batch == same && inner == also => {
            Ok(vec![*batch, *rows, *columns])
        }
        ([rows, inner], [also]) if inner == also => Ok(vec![*rows]),
        ([inner], [also]) if inner == also => Ok(Vec::new()),
        _ => Err(format!("mat1 and mat2 shapes cannot be multiplied: {one:?} and {other:?}")),
    }
}

/// Checks that tensors are alike in all dimensions but the one along which they are joined. `cat`
/// takes no notice of empty lists.
fn check_joined(op: &Op, along: Option<usize>) -> Result<(), String> {
    let mut shapes = op
        .inputs
        .iter()
        .map(|input| &input.shape)
        .filter(|shape| along.is_none() || **shape != [0]);
    let Some(first) = shapes.next() else { return Ok(()) };
    for shape in shapes {
        let is_alike = shape.len() == first.len()
            && (0..first.len()).all(|dim| Some(dim) == along || shape[dim] == first[dim]);
        if !is_alike {
            return Err(format!("tensors {first:?} and {shape:?} cannot be joined"));
        }
    }
    Ok(())
}

/// Returns the shape to which all tensors are broadcast.
fn broadcast(op: &Op) -> Result<Vec<usize>, String> {
    let mut result = Vec::new();
    for input in op.inputs.iter().filter(|input| input.is_defined()) {
        result = broadcast_two(&result, &input.shape).ok_or_else(|| {
            let shape = &input.shape;
            format!("a tensor {shape:?} cannot be broadcast with one of {result:?}")
        })?;
    }
    Ok(result)
}

/// Returns the shape to which both are broadcast, if there is one.
fn broadcast_two(one: &[usize], other: &[usize]) -> Option<Vec<usize>> {
    let rank = one.len().max(other.len());
    let padded = |shape: &[usize]| [&vec![1; rank - shape.len()], shape].concat();
    let pairs = padded(one).into_iter().zip(padded(other));
    pairs
        .map(|pair| match pair {
            (1, size) | (size, 1) => Some(size),
            (size, same) if size == same => Some(size),
            _ => None,
        })
        .collect()
}
