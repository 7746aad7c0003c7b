//! Embeddings, and elements by their indices.

use super::op::{Op, Rule, Signature};
use crate::sbp::{B, P, S};

pub const RULES: &[Rule] = &[
    Rule { names: &["embedding"], signatures: embedding },
    Rule { names: &["embedding_dense_backward"], signatures: embedding_backward },
    Rule { names: &["index_select"], signatures: index_select },
    Rule { names: &["gather", "scatter", "scatter_add"], signatures: gather },
];

/// Indices are split, or the width, or the vocabulary: then code gives zeros for rows of other ranks.
fn embedding(op: &Op) -> Vec<Signature> {
    let rank = op.rank(1);
    let indices = (0..rank).map(|dim| Signature::new([B, S(dim)], [S(dim)]));
    let width = Signature::new([S(1), B], [S(rank)]);
    let vocabulary = Signature::new([S(0), B], [P]).with_code(true);
    indices.chain([width, vocabulary]).collect()
}

fn embedding_backward(op: &Op) -> Vec<Signature> {
    // (gradient, indices, rows, padding index, scaling by frequency)
    let rank = op.rank(1);
    // Frequencies are those of all indices.
    let is_counted = op.flag(4);
    let indices =
        (0..rank).filter(|_| !is_counted).map(|dim| Signature::new([S(dim), S(dim)], [P]));
    let others = [Signature::new([S(rank), B], [S(1)]), Signature::new([P, B], [P])];
    indices.chain(others).collect()
}

fn index_select(op: &Op) -> Vec<Signature> {
    let rank = op.rank(0);
    let Some(at) = op.dim(1, rank) else { return Vec::new() };
    let others = (0..rank).filter(|&dim| dim != at);
    let others = others.map(|dim| Signature::new([S(dim), B], [S(dim)]));
    others.chain([Signature::new([B, S(0)], [S(at)])]).collect()
}

/// The tensors must have equal lengths where they are split.
fn gather(op: &Op) -> Vec<Signature> {
    let rank = op.rank(0);
    let Some(at) = op.dim(1, rank) else { return Vec::new() };
    let is_equal = |dim: usize| {
        let mut sizes = op.inputs.iter().map(|input| input.shape.get(dim));
        let first = sizes.next();
        sizes.all(|size| Some(size) == first)
    };
    let dims = (0..rank).filter(|&dim| dim != at && is_equal(dim));
    dims.map(|dim| Signature::all(op, S(dim))).collect()
}
