//! Normalizations. Batch norm over a split batch takes the statistics of all ranks, as SyncBatchNorm.

use super::op::{Input, Op, Rule, Signature};
use crate::sbp::{B, P, S, Sbp};

/// The rules of this file's operations.
pub const RULES: &[Rule] = &[
    Rule { names: &["native_layer_norm"], signatures: layer_norm },
    Rule { names: &["native_layer_norm_backward"], signatures: layer_norm_backward },
    Rule { names: &["native_group_norm"], signatures: group_norm },
    Rule { names: &["native_group_norm_backward"], signatures: group_norm_backward },
    Rule { names: &["native_batch_norm", "_native_batch_norm_legit"], signatures: batch_norm },
    Rule { names: &["native_batch_norm_backward"], signatures: batch_norm_backward },
    Rule { names: &["cudnn_batch_norm"], signatures: cudnn_batch_norm },
    Rule { names: &["cudnn_batch_norm_backward"], signatures: cudnn_batch_norm_backward },
];

/// Returns the dimensions before those that are normalized, whose shape is argument `arg`.
fn outer(op: &Op, input: usize, arg: usize) -> std::ops::Range<usize> {
    0..op.rank(input).saturating_sub(op.ints(arg).len())
}

fn layer_norm(op: &Op) -> Vec<Signature> {
    // (input, shape, weight, bias, eps) -> result, mean, reciprocal deviation
    let dims = outer(op, 0, 1);
    dims.map(|dim| Signature::new([S(dim), B, B], vec![S(dim); 3])).collect()
}

fn layer_norm_backward(op: &Op) -> Vec<Signature> {
    // (gradient, input, shape, mean, reciprocal deviation, weight, bias, mask)
    let mut signatures = Vec::new();
    for dim in outer(op, 0, 2) {
        let mut inputs = vec![B; op.inputs.len()];
        inputs[..4].fill(S(dim));
        signatures.push(Signature::new(inputs, [S(dim), P, P]));
    }
    signatures
}

/// The batch's size is an argument, so code runs on parts of a batch.
fn group_norm(op: &Op) -> Vec<Signature> {
    // (input, weight, bias, images, channels, pixels, groups, eps) -> result, mean, reciprocal deviation
    let mut inputs = vec![B; op.inputs.len()];
    inputs[0] = S(0);
    vec![Signature::new(inputs, [S(0); 3]).with_code(true)]
}

fn group_norm_backward(op: &Op) -> Vec<Signature> {
    // (gradient, input, mean, reciprocal deviation, weight, images, channels, pixels, groups, mask)
    let mut inputs = vec![B; op.inputs.len()];
    inputs[..4].fill(S(0));
    vec![Signature::new(inputs, [S(0), P, P]).with_code(true)]
}

/// SBP of an input that may be missing.
fn optional(op: &Op, input: usize, sbp: Sbp) -> Sbp {
    if op.inputs.get(input).is_some_and(Input::is_defined) { sbp } else { B }
}

fn batch_norm(op: &Op) -> Vec<Signature> {
    // (input, weight, bias, running mean, running variance, training, momentum, eps)
    if op.overload.starts_with("no_stats") {
        return Vec::new(); // no running statistics among its arguments
    }
    let is_training = op.flag(5);
    let statistics = if is_training { S(0) } else { B };
    let mut channels = vec![S(1)];
    channels.extend((1..op.inputs.len()).map(|input| optional(op, input, S(0))));
    let mut batch = vec![B; op.inputs.len()];
    batch[0] = S(0);
    vec![
        Signature::new(channels, [S(1), statistics, statistics]),
        Signature::new(batch, [S(0), B, B]).with_code(is_training),
    ]
}

fn batch_norm_backward(op: &Op) -> Vec<Signature> {
    // (gradient, input, weight, running mean, running variance, mean, deviation, training, ...)
    let is_training = op.flag(7);
    let mut channels = vec![S(1), S(1)];
    channels.extend((2..op.inputs.len()).map(|input| optional(op, input, S(0))));
    let mut batch = vec![B; op.inputs.len()];
    batch[..2].fill(S(0));
    let of_weights = if is_training { B } else { P };
    vec![
        Signature::new(channels, [S(1), S(0), S(0)]),
        Signature::new(batch, [S(0), of_weights, of_weights]).with_code(is_training),
    ]
}

/// Has one more output than [`batch_norm`]: cuDNN's reserve space, which its backward reads. Flow's
/// own code leaves it empty.
fn cudnn_batch_norm(op: &Op) -> Vec<Signature> {
    let is_training = op.flag(5);
    let mut signatures = batch_norm(op);
    for signature in &mut signatures {
        signature.outputs.push(B);
        signature.has_code = is_training;
    }
    signatures
}

/// The backward of training. For evaluation libtorch calls `native_batch_norm_backward`.
fn cudnn_batch_norm_backward(op: &Op) -> Vec<Signature> {
    // (input, gradient, weight, running mean, running variance, mean, deviation, eps, memory)
    let mut channels = vec![S(1), S(1)];
    channels.extend((2..op.inputs.len()).map(|input| optional(op, input, S(0))));
    let mut batch = vec![B; op.inputs.len()];
    batch[..2].fill(S(0));
    let Some(memory) = channels.get_mut(7) else { return Vec::new() };
    *memory = B;
    let mut all = vec![
        Signature::new(channels, [S(1), S(0), S(0)]).with_code(true),
        Signature::new(batch, [S(0), B, B]).with_code(true),
    ];
    // After code there is nothing for cuDNN to read.
    if op.inputs[7].shape == [0] {
        all.push(Signature::all(op, B).with_code(true));
    }
    all
}
