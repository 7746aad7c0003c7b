//! Losses. A mean over split samples is a partial sum that code divides by the whole number.

use super::op::{Op, Rule, Signature};
use crate::kinds::is_half;
use crate::sbp::{B, P, S};

/// The rules of this file's operations.
pub const RULES: &[Rule] = &[
    Rule { names: &["nll_loss_forward", "nll_loss2d_forward"], signatures: nll_loss },
    Rule { names: &["nll_loss_backward", "nll_loss2d_backward"], signatures: nll_loss_backward },
    Rule { names: &["mse_loss", "smooth_l1_loss", "huber_loss"], signatures: |op| loss(op, 2) },
    Rule {
        names: &["mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward"],
        signatures: |op| loss_backward(op, 3),
    },
    Rule { names: &["binary_cross_entropy"], signatures: |op| loss(op, 3) },
    Rule { names: &["binary_cross_entropy_backward"], signatures: |op| loss_backward(op, 4) },
    Rule { names: &["binary_cross_entropy_with_logits"], signatures: |op| loss(op, 4) },
];

/// libtorch's `Reduction`.
const NONE: i64 = 0;
const MEAN: i64 = 1;

/// Returns whether code adds up the terms of all ranks, as half precision would round them.
fn adds_up(op: &Op, reduction: usize) -> bool {
    op.int(reduction) != Some(NONE) && op.inputs[0].kind.is_some_and(is_half)
}

fn nll_loss(op: &Op) -> Vec<Signature> {
    // (input, target, weight, reduction, ignored) -> loss, total weight
    match op.int(3) {
        Some(NONE) => vec![Signature::new([S(0), S(0), B], [S(0), B])],
        _ if adds_up(op, 3) => vec![Signature::new([S(0), S(0), B], [B, B]).with_code(true)],
        reduction => {
            let is_mean = reduction == Some(MEAN);
            let total = if is_mean { B } else { P };
            vec![Signature::new([S(0), S(0), B], [P, total]).with_code(is_mean)]
        }
    }
}

fn nll_loss_backward(op: &Op) -> Vec<Signature> {
    // (gradient, input, target, weight, reduction, ignored, total weight)
    let gradient = if op.int(4) == Some(NONE) { S(0) } else { B };
    vec![Signature::new([gradient, S(0), S(0), B, B], [S(0)])]
}

/// Returns whether input and target are alike. Where they are broadcast or converted, the number of
/// elements and the kind of the loss are others than the input's.
fn are_alike(op: &Op, input: usize) -> bool {
    let target = &op.inputs[input + 1];
    let input = &op.inputs[input];
    input.is_float() && input == target
}

/// A loss of pairs of elements: (input, target, ..., reduction). Weights are broadcast to them.
fn loss(op: &Op, reduction: usize) -> Vec<Signature> {
    if !are_alike(op, 0) {
        return Vec::new();
    }
    let dims = 0..op.rank(0);
    dims.map(|dim| {
        let each = Signature::aligned(op, dim);
        match op.int(reduction) {
            Some(NONE) => each,
            _ if adds_up(op, reduction) => Signature { outputs: vec![B], ..each }.with_code(true),
            reduction => Signature { outputs: vec![P], ..each }.with_code(reduction == Some(MEAN)),
        }
    })
    .collect()
}

/// (gradient, input, target, ..., reduction)
fn loss_backward(op: &Op, reduction: usize) -> Vec<Signature> {
    if !are_alike(op, 1) {
        return Vec::new();
    }
    let dims = 0..op.rank(1);
    dims.map(|dim| {
        let mut each = Signature::aligned(op, dim);
        match op.int(reduction) {
            Some(NONE) => each,
            reduction => {
                each.inputs[0] = B;
                each.with_code(reduction == Some(MEAN))
            }
        }
    })
    .collect()
}
