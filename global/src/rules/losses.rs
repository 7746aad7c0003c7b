//! Losses. A mean over split samples is a partial sum that code divides by the whole number.

use super::op::{Op, Rule, Signature};
use crate::sbp::{B, P, S};

pub const RULES: &[Rule] = &[
    Rule { names: &["nll_loss_forward", "nll_loss2d_forward"], signatures: nll_loss },
    Rule { names: &["nll_loss_backward", "nll_loss2d_backward"], signatures: nll_loss_backward },
    Rule { names: &["mse_loss"], signatures: mse_loss },
    Rule { names: &["mse_loss_backward"], signatures: mse_loss_backward },
];

/// libtorch's `Reduction`.
const NONE: i64 = 0;
const MEAN: i64 = 1;

fn nll_loss(op: &Op) -> Vec<Signature> {
    // (input, target, weight, reduction, ignored) -> loss, total weight
    match op.int(3) {
        Some(NONE) => vec![Signature::new([S(0), S(0), B], [S(0), B])],
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

fn mse_loss(op: &Op) -> Vec<Signature> {
    let dims = 0..op.rank(0);
    dims.map(|dim| match op.int(2) {
        Some(NONE) => Signature::new([S(dim), S(dim)], [S(dim)]),
        reduction => Signature::new([S(dim), S(dim)], [P]).with_code(reduction == Some(MEAN)),
    })
    .collect()
}

fn mse_loss_backward(op: &Op) -> Vec<Signature> {
    // (gradient, input, target, reduction)
    let dims = 0..op.rank(1);
    dims.map(|dim| match op.int(3) {
        Some(NONE) => Signature::all(op, S(dim)),
        reduction => {
            let signature = Signature::new([B, S(dim), S(dim)], [S(dim)]);
            signature.with_code(reduction == Some(MEAN))
        }
    })
    .collect()
}
