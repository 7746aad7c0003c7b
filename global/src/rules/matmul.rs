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
    Rule { names: &["addmv"], signatures: row_by_vector_and_sum },
    Rule { names: &["addr"], signatures: outer_and_sum },
    Rule { names: &["dot"], signatures: |_| vec![Signature::new([S(0), S(0)], [P])] },
];

fn row_by_vector() -> Signature {
    Signature::new([S(0), B], [S(0)])
}

/// The first tensor is broadcast to the product, as in `addmm`.
fn row_by_vector_and_sum(op: &Op) -> Vec<Signature> {
    let bias = bias(op, 1);
    vec![Signature::new([bias(0), S(0), B], [S(0)]), Signature::new([P, S(1), S(0)], [P])]
}

fn outer_and_sum(op: &Op) -> Vec<Signature> {
    let bias = bias(op, 2);
    vec![Signature::new([bias(0), S(0), B], [S(0)]), Signature::new([bias(1), B, S(0)], [S(1)])]
}

/// What the first tensor is to have where the result, of so many dimensions, is split: the first
/// tensor is broadcast to the result.
fn bias<'a>(op: &'a Op, rank: usize) -> impl Fn(usize) -> Sbp + 'a {
    let shape = &op.inputs[0].shape;
    move |dim| match (dim + shape.len()).checked_sub(rank) {
        Some(own) if shape[own] != 1 => S(own),
        _ => B,
    }
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
    let bias = bias(op, rows + 2);
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
