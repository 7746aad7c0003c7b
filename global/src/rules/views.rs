//! Views, and operations that only move elements: where a split goes.

use super::kinds::{keeps_terms, promoted};
use super::op::{Arg, Op, Rule, Signature};
use crate::sbp::{P, S};

/// The rules of this file's operations.
pub const RULES: &[Rule] = &[
    Rule { names: &["t"], signatures: |op| moved(op, |dim, rank| Some(rank - 1 - dim)) },
    Rule { names: &["transpose"], signatures: transpose },
    Rule { names: &["permute"], signatures: permute },
    Rule { names: &["unsqueeze"], signatures: unsqueeze },
    Rule { names: &["squeeze"], signatures: squeeze },
    Rule { names: &["expand"], signatures: expand },
    Rule { names: &["view", "_unsafe_view", "view_copy"], signatures: reshape },
    Rule { names: &["select", "unbind"], signatures: select },
    Rule { names: &["slice"], signatures: slice },
    Rule { names: &["select_backward", "slice_backward"], signatures: into_zeros },
    Rule { names: &["split", "split_with_sizes"], signatures: |op| others(op, &dims_at(op, 2)) },
    Rule { names: &["unfold"], signatures: |op| others(op, &dims_at(op, 1)) },
    Rule { names: &["cumsum"], signatures: cumsum },
    Rule { names: &["unfold_backward"], signatures: unfold_backward },
    Rule { names: &["flip"], signatures: |op| others(op, &op.dims(1, op.rank(0))) },
    Rule { names: &["roll"], signatures: |op| others(op, &op.dims(2, op.rank(0))) },
    Rule { names: &["repeat"], signatures: repeat },
    Rule { names: &["diagonal"], signatures: diagonal },
    Rule { names: &["diagonal_backward"], signatures: diagonal_backward },
    Rule { names: &["view_as_real"], signatures: |op| others(op, &[]) },
    // The last dimension is that of the two parts.
    Rule {
        names: &["view_as_complex"],
        signatures: |op| moved(op, |dim, rank| (dim + 1 < rank).then_some(dim)),
    },
    Rule { names: &["constant_pad_nd"], signatures: pad },
    Rule { names: &["tril", "triu"], signatures: triangle },
    Rule { names: &["cat"], signatures: cat },
    Rule { names: &["stack"], signatures: stack },
];

/// Partial sums stay so, and each dimension goes where `to(dim, rank)` says, if anywhere.
pub(super) fn moved(op: &Op, to: impl Fn(usize, usize) -> Option<usize>) -> Vec<Signature> {
    let rank = op.rank(0);
    let splits = (0..rank).filter_map(|dim| {
        let to = to(dim, rank)?;
        Some(Signature::new([S(dim)], vec![S(to); op.outputs]))
    });
    [Signature::all(op, P)].into_iter().chain(splits).collect()
}

/// All dimensions but these stay.
fn others(op: &Op, dims: &[usize]) -> Vec<Signature> {
    moved(op, |dim, _| (!dims.contains(&dim)).then_some(dim))
}

fn cumsum(op: &Op) -> Vec<Signature> {
    // (self, dim, dtype)
    let mut signatures = others(op, &dims_at(op, 1));
    if !op.keeps_terms(2) || op.rounds_terms(2) {
        signatures.remove(0);
    }
    signatures
}

/// Returns the dimension that an argument is; all, if it is none.
fn dims_at(op: &Op, arg: usize) -> Vec<usize> {
    let rank = op.rank(0);
    op.dim(arg, rank).map_or_else(|| (0..rank).collect(), |dim| vec![dim])
}

fn transpose(op: &Op) -> Vec<Signature> {
    let rank = op.rank(0);
    let (Some(one), Some(other)) = (op.dim(1, rank), op.dim(2, rank)) else { return Vec::new() };
    moved(op, |dim, _| {
        Some(match dim {
            _ if dim == one => other,
            _ if dim == other => one,
            _ => dim,
        })
    })
}

fn permute(op: &Op) -> Vec<Signature> {
    let dims = op.dims(1, op.rank(0));
    moved(op, |dim, _| dims.iter().position(|&from| from == dim))
}

fn unsqueeze(op: &Op) -> Vec<Signature> {
    let Some(at) = op.dim(1, op.rank(0) + 1) else { return Vec::new() };
    moved(op, |dim, _| Some(if dim >= at { dim + 1 } else { dim }))
}

/// Dimensions of one element are left out: all of them, one, or several.
fn squeeze(op: &Op) -> Vec<Signature> {
    let shape = &op.inputs[0].shape;
    let named: Vec<usize> = match op.args.get(1) {
        None => (0..shape.len()).collect(),
        Some(Arg::Int(_)) => op.dim(1, shape.len()).into_iter().collect(),
        Some(Arg::Ints(dims)) if dims.is_empty() => Vec::new(),
        Some(_) => op.dims(1, shape.len()),
    };
    moved(op, |dim, _| {
        // On the locals, it would leave out a part of one element.
        if named.contains(&dim) && op.left[0][dim] / op.ranks <= 1 {
            return None;
        }
        let gone = named.iter().filter(|&&other| other < dim && shape[other] == 1).count();
        Some(dim - gone)
    })
}

fn expand(op: &Op) -> Vec<Signature> {
    let shape = &op.inputs[0].shape;
    let to = op.ints(1);
    let Some(new) = to.len().checked_sub(shape.len()) else { return Vec::new() };
    let splits = shape.iter().enumerate().filter_map(|(dim, &size)| {
        let asked = to[dim + new];
        let signature = Signature::new([S(dim)], [S(dim + new)]);
        match asked {
            -1 => Some(signature),
            _ if asked == size as i64 => Some(signature.with_shape(1, S(dim + new))),
            _ => None,
        }
    });
    [Signature::all(op, P)].into_iter().chain(splits).collect()
}

/// A split dimension may begin a group of dimensions that are taken together or apart, if the cuts
/// are at the same elements before and after.
fn reshape(op: &Op) -> Vec<Signature> {
    // view(self, dtype) takes the bits for those of another kind.
    if !matches!(op.args.get(1), Some(Arg::Ints(_))) {
        return Vec::new();
    }
    let from = &op.inputs[0].shape;
    let to = sizes(op.ints(1), from.iter().product());
    let splits = (0..from.len()).filter_map(|dim| {
        let target = target(from, &to, dim)?;
        // With the axes before.
        let parts = from[dim].checked_div(op.left[0][dim]).unwrap_or(1) * op.ranks;
        let are_alike = from[dim] == to[target]
            || (from[dim].is_multiple_of(parts) && to[target].is_multiple_of(parts));
        are_alike.then(|| Signature::new([S(dim)], [S(target)]).with_shape(1, S(target)))
    });
    [Signature::all(op, P)].into_iter().chain(splits).collect()
}

/// Returns the sizes asked for; one of them may be -1: what is left.
fn sizes(asked: &[i64], elements: usize) -> Vec<usize> {
    let known: usize = asked.iter().filter_map(|&size| usize::try_from(size).ok()).product();
    let left = elements.checked_div(known).unwrap_or(0);
    asked.iter().map(|&size| usize::try_from(size).unwrap_or(left)).collect()
}

/// Returns the dimension of the new shape that begins where a dimension of the old one does.
fn target(from: &[usize], to: &[usize], dim: usize) -> Option<usize> {
    let before: usize = from[..dim].iter().product();
    let mut product = 1;
    to.iter().position(|&size| {
        let begins = product == before && size != 1;
        product *= size;
        begins
    })
}

/// Dimensions that are repeated once stay.
fn repeat(op: &Op) -> Vec<Signature> {
    let times = op.ints(1);
    let new = times.len().saturating_sub(op.rank(0));
    moved(op, |dim, _| (times.get(dim + new) == Some(&1)).then_some(dim + new))
}

/// Returns the place of a dimension after two others were taken away, and have become the last one.
fn beside(dim: usize, diagonal: [usize; 2]) -> Option<usize> {
    let gone = diagonal.iter().filter(|&&other| other < dim).count();
    (!diagonal.contains(&dim)).then(|| dim - gone)
}

fn diagonal(op: &Op) -> Vec<Signature> {
    // (self, offset, dim1, dim2)
    let rank = op.rank(0);
    let (Some(one), Some(other)) = (op.dim(2, rank), op.dim(3, rank)) else { return Vec::new() };
    moved(op, |dim, _| beside(dim, [one, other]))
}

fn diagonal_backward(op: &Op) -> Vec<Signature> {
    // (gradient, shape, offset, dim1, dim2)
    let rank = op.ints(1).len();
    let (Some(one), Some(other)) = (op.dim(3, rank), op.dim(4, rank)) else { return Vec::new() };
    into(op, |dim| beside(dim, [one, other]))
}

fn unfold_backward(op: &Op) -> Vec<Signature> {
    // (gradient, shape, dim, size, step)
    let Some(at) = op.dim(2, op.ints(1).len()) else { return Vec::new() };
    into(op, |dim| (dim != at).then_some(dim))
}

fn select(op: &Op) -> Vec<Signature> {
    let Some(at) = op.dim(1, op.rank(0)) else { return Vec::new() };
    moved(op, |dim, _| (dim != at).then_some(if dim > at { dim - 1 } else { dim }))
}

fn slice(op: &Op) -> Vec<Signature> {
    let Some(at) = op.dim(1, op.rank(0)) else { return Vec::new() };
    let size = op.inputs[0].shape[at] as i64;
    let is_whole = op.int(2).is_none_or(|start| start == 0)
        && op.int(3).is_none_or(|end| end >= size)
        && op.int(4).is_none_or(|step| step == 1);
    moved(op, |dim, _| (dim != at || is_whole).then_some(dim))
}

/// A tensor of the shape that argument 1 is, made of the gradient. Each dimension of the tensor
/// comes from one of the gradient, if any.
fn into(op: &Op, from: impl Fn(usize) -> Option<usize>) -> Vec<Signature> {
    let splits = (0..op.ints(1).len())
        .filter_map(|dim| Some(Signature::new([S(from(dim)?)], [S(dim)]).with_shape(1, S(dim))));
    [Signature::all(op, P)].into_iter().chain(splits).collect()
}

/// The gradient is put into zeros.
fn into_zeros(op: &Op) -> Vec<Signature> {
    let rank = op.ints(1).len();
    let Some(at) = op.dim(2, rank) else { return Vec::new() };
    let is_select = op.name == "select_backward";
    into(op, |dim| (dim != at).then_some(if is_select && dim > at { dim - 1 } else { dim }))
}

/// Pairs of what is added before and after, from the last dimension on.
fn pad(op: &Op) -> Vec<Signature> {
    let rank = op.rank(0);
    let pairs = op.ints(1).chunks(2).enumerate();
    let padded: Vec<usize> = pairs
        .filter(|(_, pair)| pair.iter().any(|&count| count != 0))
        .filter_map(|(index, _)| rank.checked_sub(index + 1))
        .collect();
    let is_zero = match op.args.get(2) {
        None | Some(Arg::Int(0)) => true,
        Some(Arg::Float(value)) => *value == 0.0,
        Some(_) => false,
    };
    let mut signatures = others(op, &padded);
    if !is_zero {
        // Each rank would add it.
        signatures.remove(0);
    }
    signatures
}

fn triangle(op: &Op) -> Vec<Signature> {
    moved(op, |dim, rank| (dim + 2 < rank).then_some(dim))
}

fn cat(op: &Op) -> Vec<Signature> {
    let rank = op.broadcast_rank();
    let Some(at) = op.dim(1, rank) else { return Vec::new() };
    // Empty tensors of one dimension are left out by libtorch, whatever the others have.
    let is_left_out = op.inputs.iter().any(|input| input.shape == [0] && rank != 1);
    let splits = (0..rank).filter(|&dim| dim != at && !is_left_out);
    let splits = splits.map(|dim| Signature::all(op, S(dim)));
    joined_terms(op).into_iter().chain(splits).collect()
}

/// All tensors are partial, if each keeps its terms in the kind of them all.
fn joined_terms(op: &Op) -> Option<Signature> {
    let kind = promoted(op, None)?;
    let mut own_kinds = op.inputs.iter().filter_map(|input| input.kind);
    own_kinds.all(|own| keeps_terms(own, kind)).then(|| Signature::all(op, P))
}

fn stack(op: &Op) -> Vec<Signature> {
    let rank = op.rank(0);
    let Some(at) = op.dim(1, rank + 1) else { return Vec::new() };
    let splits = (0..rank).map(|dim| {
        let to = if dim >= at { dim + 1 } else { dim };
        Signature::new(vec![S(dim); op.inputs.len()], [S(to)])
    });
    joined_terms(op).into_iter().chain(splits).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As OneFlow's own test of reshape: a dimension that begins a group goes on.
    #[test]
    fn reshape_moves_a_split_to_where_its_group_begins() {
        let to = |from: &[usize], to: &[usize], dim| target(from, to, dim);
        assert_eq!(to(&[4], &[2, 2], 0), Some(0));
        assert_eq!(to(&[2, 4], &[8], 0), Some(0));
        assert_eq!(to(&[2, 4], &[8], 1), None);
        assert_eq!(to(&[2, 1, 4], &[8], 2), None);
        assert_eq!(to(&[8, 2], &[2, 4, 2], 1), Some(2));
        assert_eq!(to(&[8, 1, 2], &[2, 1, 4, 2], 2), Some(3));
        assert_eq!(to(&[2, 2, 5, 4], &[4, 5, 2, 2], 3), Some(2));
        assert_eq!(to(&[3, 2, 3, 5], &[3, 30], 1), Some(1));
        assert_eq!(sizes(&[2, -1, 3], 24), [2, 4, 3]);
    }
}
