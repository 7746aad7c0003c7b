//! Whether the logical sizes of an operation's tensors fit, where libtorch does not say so by itself: its
//! `meta` device has not all operations, and does not look at all sizes.

use std::ops::Range;

use super::indexing::Indexed;
use super::op::{Input, Op};
use super::{has_name, pointwise};

/// Losses that broadcast their tensors.
const LOSSES: &[&str] =
    &["huber_loss", "huber_loss_backward", "mse_loss_backward", "smooth_l1_loss_backward"];

/// Checks the sizes as libtorch does on one device: those of operations on each element, of losses, of
/// what is written by indices, and of weights by channel.
///
/// # Errors
/// Returns why the sizes do not fit, in the same words on all ranks.
pub fn check(op: &Op) -> Result<(), String> {
    match op.name {
        "dot" => check_shape(op, 1, &op.inputs[0].shape),
        "binary_cross_entropy" | "binary_cross_entropy_with_logits" => {
            check_shape(op, 0, &broadcast(&op.inputs)?)
        }
        "index_put" | "_index_put_impl" => check_written(op),
        "nll_loss2d_forward" => {
            let [images, _, rows, columns] = op.inputs[0].shape[..] else { return Ok(()) };
            check_shape(op, 1, &[images, rows, columns])?;
            check_channels(op, 2..3)
        }
        "native_batch_norm" | "_native_batch_norm_legit" | "cudnn_batch_norm" => {
            check_channels(op, 1..5)
        }
        "native_group_norm" => check_channels(op, 1..3),
        name if name == "bernoulli" || has_name(pointwise::RULES, name) => {
            let result = broadcast(&op.inputs)?;
            if op.in_place { check_shape(op, 0, &result) } else { Ok(()) }
        }
        name if LOSSES.contains(&name) => broadcast(&op.inputs).map(drop),
        _ => Ok(()),
    }
}

/// Checks that an input has this shape.
fn check_shape(op: &Op, input: usize, shape: &[usize]) -> Result<(), String> {
    let own = &op.inputs[input].shape;
    if own == shape {
        return Ok(());
    }
    Err(format!("a tensor {own:?} is given where one of {shape:?} is needed"))
}

/// Checks that inputs, as far as they are there, have a number for each channel of the first one.
fn check_channels(op: &Op, inputs: Range<usize>) -> Result<(), String> {
    let Some(&channels) = op.inputs[0].shape.get(1) else { return Ok(()) };
    for input in inputs.filter(|&input| op.inputs.get(input).is_some_and(Input::is_defined)) {
        check_shape(op, input, &[channels])?;
    }
    Ok(())
}

/// Checks that values can be broadcast to what is written by indices.
fn check_written(op: &Op) -> Result<(), String> {
    let [tensor, indices @ .., values] = &op.inputs[..] else { return Ok(()) };
    let Some(indexed) = Indexed::of(indices) else { return Ok(()) };
    let others = indexed.others(tensor.shape.len());
    let mut written: Vec<usize> = others.map(|(dim, _)| tensor.shape[dim]).collect();
    written.splice(indexed.at..indexed.at, broadcast(indices)?);
    let values = &values.shape;
    if broadcast_two(values, &written).as_deref() == Some(&written[..]) {
        return Ok(());
    }
    Err(format!("values {values:?} cannot be broadcast to what is written, {written:?}"))
}

/// Returns the shape to which all tensors are broadcast.
fn broadcast(inputs: &[Input]) -> Result<Vec<usize>, String> {
    let mut result = Vec::new();
    for input in inputs.iter().filter(|input| input.is_defined()) {
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
