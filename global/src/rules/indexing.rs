//! Embeddings, and elements by their indices.

use super::op::{Input, Op, Rule, Signature};
use crate::sbp::{B, P, S, Sbp};

/// The rules of this file's operations.
pub const RULES: &[Rule] = &[
    Rule { names: &["embedding"], signatures: embedding },
    Rule { names: &["embedding_dense_backward"], signatures: embedding_backward },
    Rule { names: &["index_select"], signatures: index_select },
    Rule { names: &["index_add", "index_fill"], signatures: index_rows },
    Rule { names: &["index"], signatures: index },
    Rule { names: &["index_put", "_index_put_impl"], signatures: index_put },
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

fn index_rows(op: &Op) -> Vec<Signature> {
    // (self, dim, index, source or value)
    let rank = op.rank(0);
    let Some(at) = op.dim(1, rank) else { return Vec::new() };
    let dims = (0..rank).filter(|&dim| dim != at);
    dims.filter_map(|dim| split_rows(op, rank, dim)).collect()
}

/// Splits all tensors but the index along a dimension, if they are equally long there.
fn split_rows(op: &Op, rank: usize, dim: usize) -> Option<Signature> {
    let mut inputs = Vec::new();
    for (number, input) in op.inputs.iter().enumerate() {
        if input.shape.len() != rank {
            inputs.push(B);
            continue;
        }
        if input.shape[dim] != op.inputs[0].shape[dim] {
            return None;
        }
        inputs.push(if number == 1 { B } else { S(dim) });
    }
    Some(Signature::new(inputs, [S(dim)]))
}

/// The dimensions of `tensor[indices]`.
pub struct Indexed {
    /// Dimensions that have indices.
    used: Vec<usize>,
    /// The number of the indices' own dimensions, which they are broadcast to.
    width: usize,
    /// The place of the first of these in the result.
    pub at: usize,
}

impl Indexed {
    /// Returns None without indices, and for masks, which stand for as many dimensions as they
    /// have.
    pub fn of(indices: &[Input]) -> Option<Self> {
        let used = indices.iter().enumerate().filter(|(_, index)| index.is_defined());
        let used: Vec<usize> = used.map(|(dim, _)| dim).collect();
        let first = *used.first()?;
        let last = *used.last()?;
        if used.iter().any(|&dim| indices[dim].bytes() == 1) {
            return None;
        }
        let width = used.iter().map(|&dim| indices[dim].shape.len()).max()?;
        // Indices of dimensions that are not side by side come first in the result.
        let at = if last - first + 1 == used.len() { first } else { 0 };
        Some(Self { used, width, at })
    }

    /// Dimensions without indices, and where each is in the result.
    pub fn others(&self, rank: usize) -> impl Iterator<Item = (usize, usize)> + '_ {
        let dims = (0..rank).filter(|dim| !self.used.contains(dim)).enumerate();
        dims.map(|(order, dim)| (dim, if dim < self.at { order } else { order + self.width }))
    }
}

fn index(op: &Op) -> Vec<Signature> {
    // (self, indices)
    let Some((tensor, indices)) = op.inputs.split_first() else { return Vec::new() };
    let Some(indexed) = Indexed::of(indices) else { return Vec::new() };
    let others = indexed.others(tensor.shape.len());
    let others = others.map(|(dim, to)| Signature::new(with_indices(S(dim), indices), [S(to)]));
    let along = (0..indexed.width).map(|dim| {
        let of_indices = indices.iter().map(|index| index.split_as(dim, indexed.width));
        let inputs = [B].into_iter().chain(of_indices);
        Signature::new(inputs.collect::<Vec<_>>(), [S(indexed.at + dim)])
    });
    // Where all have one index, nothing is split.
    let along = along.filter(|signature| signature.inputs.iter().any(|sbp| *sbp != B));
    let terms = Signature::new(with_indices(P, indices), [P]);
    [terms].into_iter().chain(others).chain(along).collect()
}

/// Returns the SBP of the indexed tensor, and B for all indices.
fn with_indices(sbp: Sbp, indices: &[Input]) -> Vec<Sbp> {
    [vec![sbp], vec![B; indices.len()]].concat()
}

fn index_put(op: &Op) -> Vec<Signature> {
    // (self, indices, values, accumulate)
    let [tensor, indices @ .., values] = &op.inputs[..] else { return Vec::new() };
    let Some(indexed) = Indexed::of(indices) else { return Vec::new() };
    let rank = tensor.shape.len();
    // Values are broadcast to what is written, which has so many dimensions.
    let Some(written) = (rank + indexed.width).checked_sub(indexed.used.len()) else {
        return Vec::new();
    };
    if values.shape.len() > written {
        return Vec::new();
    }
    let mut signatures = Vec::new();
    for (dim, to) in indexed.others(rank) {
        let mut inputs = with_indices(S(dim), indices);
        inputs.push(values.split_as(to, written));
        signatures.push(Signature::new(inputs, [S(dim)]));
    }
    signatures
}

/// The tensors must have equal lengths where they are split.
fn gather(op: &Op) -> Vec<Signature> {
    let rank = op.rank(0);
    let Some(at) = op.dim(1, rank) else { return Vec::new() };
    let mut dims: Vec<usize> = (0..rank).filter(|&dim| dim != at).collect();
    for input in &op.inputs {
        dims.retain(|&dim| input.shape.get(dim) == op.inputs[0].shape.get(dim));
    }
    dims.into_iter().map(|dim| Signature::all(op, S(dim))).collect()
}
