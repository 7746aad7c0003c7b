//! Matrix products: rows, columns, or the terms of the sum are split.

use super::op::{Op, Rule, Signature};
use crate::sbp::{B, P, S};

/// The rules of this file's operations.
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
    let of_rows = op.inputs[0].split_as(0, 1);
    vec![Signature::new([of_rows, S(0), B], [S(0)]), Signature::new([P, S(1), S(0)], [P])]
}

fn outer_and_sum(op: &Op) -> Vec<Signature> {
    let of_rows = op.inputs[0].split_as(0, 2);
    let of_columns = op.inputs[0].split_as(1, 2);
    vec![Signature::new([of_rows, S(0), B], [S(0)]), Signature::new([of_columns, B, S(0)], [S(1)])]
}

/// Returns the dimension of rows; those of a batch come before.
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
    let columns = rows + 1;
    let bias = &op.inputs[0];
    let of_batch = bias.split_as(0, rows + 2);
    let of_rows = bias.split_as(rows, rows + 2);
    let of_columns = bias.split_as(columns, rows + 2);
    let batch = (rows == 1).then(|| Signature::new([of_batch, S(0), S(0)], [S(0)]));
    let others = [
        Signature::new([of_rows, S(rows), B], [S(rows)]),
        Signature::new([of_columns, B, S(columns)], [S(columns)]),
        Signature::new([P, S(columns), S(rows)], [P]),
        Signature::new([P, P, B], [P]),
        Signature::new([P, B, P], [P]),
    ];
    batch.into_iter().chain(others).collect()
}
