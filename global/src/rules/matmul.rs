//! Matrix products: rows, columns, or the terms of the sum are split.

use super::op::{Op, Rule, Signature};
use crate::sbp::{Sbp, B, P, S};

pub const RULES: &[Rule] = &[
    Rule { names: &["mm", "bmm"], signatures: product },
    Rule { names: &["addmm", "baddbmm"], signatures: product_and_sum },
    Rule {
        names: &["mv"],
        signatures: |_| vec![row_by_vector(), Signature::new([S(1), S(0)], [P])],
    },
    Rule { names: &["dot"], signatures: |_| vec![Signature::new([S(0), S(0)], [P])] },
];

fn row_by_vector() -> Signature {
    Signature::new([S(0), B], [S(0)])
}

/// The dimension of rows; those of a batch come before.
fn rows(op: &Op) -> usize {
    usize::from(op.name.contains("bmm"))
}

fn product(op: &Op) -> Vec<Signature> {
    let rows = rows(op);
    let batch = (rows == 1).then(|| Signature::new([S(0), S(0)], [S(0)]));
    let others = [
        Signature::new([S(rows), B], [S(rows)]),
        Signature::new([B, S(rows + 1)], [S(rows + 1)]),
        Signature::new([S(rows + 1), S(rows)], [P]),
        Signature::new([P, B], [P]),
        Signature::new([B, P], [P]),
    ];
    batch.into_iter().chain(others).collect()
}

fn product_and_sum(op: &Op) -> Vec<Signature> {
    let rows = rows(op);
    let shape = &op.inputs[0].shape;
    // The first tensor is broadcast to the product.
    let bias = |dim: usize| match (dim + shape.len()).checked_sub(rows + 2) {
        Some(own) if shape[own] != 1 => Sbp::Split(own),
        _ => B,
    };
    let batch = (rows == 1).then(|| Signature::new([bias(0), S(0), S(0)], [S(0)]));
    let others = [
        Signature::new([bias(rows), S(rows), B], [S(rows)]),
        Signature::new([bias(rows + 1), B, S(rows + 1)], [S(rows + 1)]),
        Signature::new([P, S(rows + 1), S(rows)], [P]),
        Signature::new([P, P, B], [P]),
        Signature::new([P, B, P], [P]),
    ];
    batch.into_iter().chain(others).collect()
}
