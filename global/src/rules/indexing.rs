//! Embeddings, and elements by their indices.

use super::op::{Input, Op, Rule, Signature};
use crate::sbp::{Sbp, B, P, S};

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
    let own = &op.inputs[0].shape;
    let is_equal = |dim: usize| {
        op.inputs.iter().all(|input| input.shape.len() != rank || input.shape[dim] == own[dim])
    };
    let signature = |dim| {
        let sbp = |(number, input): (usize, &Input)| match number {
            1 => B,
            _ if input.shape.len() == rank => S(dim),
            _ => B,
        };
        Signature::new(op.inputs.iter().enumerate().map(sbp).collect::<Vec<_>>(), [S(dim)])
    };
    (0..rank).filter(|&dim| dim != at && is_equal(dim)).map(signature).collect()
}

/// What `tensor[indices]` is made of.
struct Indexed {
    /// Dimensions that have indices.
    used: Vec<usize>,
    /// The indices' own dimensions, which they are broadcast to: how many, and where in the result.
    width: usize,
    at: usize,
}

impl Indexed {
    /// None without indices, and for masks, which stand for as many dimensions as they have.
    fn of(indices: &[Input]) -> Option<Self> {
        let used = indices.iter().enumerate().filter(|(_, index)| index.is_defined);
        let used: Vec<usize> = used.map(|(dim, _)| dim).collect();
        let is_mask = |&dim: &usize| indices[dim].bytes == 1;
        let (&first, &last) = (used.first()?, used.last()?);
        if used.iter().any(is_mask) {
            return None;
        }
        let width = used.iter().map(|&dim| indices[dim].shape.len()).max()?;
        // Indices of dimensions that are not side by side come first in the result.
        let at = if last - first + 1 == used.len() { first } else { 0 };
        Some(Self { used, width, at })
    }

    /// Dimensions without indices, and where each is in the result.
    fn others(&self, rank: usize) -> impl Iterator<Item = (usize, usize)> + '_ {
        let dims = (0..rank).filter(|dim| !self.used.contains(dim)).enumerate();
        dims.map(|(order, dim)| (dim, if dim < self.at { order } else { order + self.width }))
    }
}

fn index(op: &Op) -> Vec<Signature> {
    // (self, indices)
    let Some((tensor, indices)) = op.inputs.split_first() else { return Vec::new() };
    let Some(indexed) = Indexed::of(indices) else { return Vec::new() };
    let all = |sbp: Sbp| [vec![sbp], vec![B; indices.len()]].concat();
    let others = indexed.others(tensor.shape.len());
    let others = others.map(|(dim, to)| Signature::new(all(S(dim)), [S(to)]));
    let along = (0..indexed.width).map(|dim| {
        let of = |index: &Input| match (dim + index.shape.len()).checked_sub(indexed.width) {
            Some(own) if index.is_defined && index.shape[own] != 1 => S(own),
            _ => B,
        };
        let inputs = [B].into_iter().chain(indices.iter().map(of));
        Signature::new(inputs.collect::<Vec<_>>(), [S(indexed.at + dim)])
    });
    // Where all have one index, nothing is split.
    let along = along.filter(|signature| signature.inputs.iter().any(|sbp| *sbp != B));
    [Signature::new(all(P), [P])].into_iter().chain(others).chain(along).collect()
}

fn index_put(op: &Op) -> Vec<Signature> {
    // (self, indices, values, accumulate)
    let [tensor, indices @ .., values] = &op.inputs[..] else { return Vec::new() };
    let Some(indexed) = Indexed::of(indices) else { return Vec::new() };
    let rank = tensor.shape.len();
    // Values are broadcast to what is written.
    let missing = (rank + indexed.width).checked_sub(indexed.used.len() + values.shape.len());
    let Some(missing) = missing else { return Vec::new() };
    let signature = |(dim, to): (usize, usize)| {
        let own = to.checked_sub(missing).filter(|&own| values.shape[own] != 1);
        let of_values = own.map_or(B, S);
        let inputs = [vec![S(dim)], vec![B; indices.len()], vec![of_values]].concat();
        Signature::new(inputs, [S(dim)])
    };
    indexed.others(rank).map(signature).collect()
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
