//! Operations over dimensions: sums, means, extremes, norms, sorting, softmax.

use super::op::{Arg, Op, Rule, Signature};
use crate::sbp::{B, P, S, Sbp};
use flow_comm::ReduceOp;

/// The rules of this file's operations.
pub const RULES: &[Rule] = &[
    // Numbers, of all of a tensor.
    Rule {
        names: &["_local_scalar_dense", "allclose", "equal", "is_same_size"],
        signatures: |_| Vec::new(),
    },
    Rule { names: &["sum"], signatures: sum },
    Rule { names: &["mean"], signatures: mean },
    Rule { names: &["amax"], signatures: |op| extreme(op, ReduceOp::Max) },
    Rule { names: &["amin"], signatures: |op| extreme(op, ReduceOp::Min) },
    Rule { names: &["max", "min"], signatures: maximum },
    Rule { names: &["prod"], signatures: product },
    Rule { names: &["any"], signatures: |op| folded(op, ReduceOp::Max) },
    Rule { names: &["all"], signatures: |op| folded(op, ReduceOp::Min) },
    Rule { names: &["argmax", "argmin"], signatures: |op| kept(op, &overloaded(op, 1), 2) },
    Rule { names: &["logsumexp"], signatures: |op| kept(op, &op.dims(1, op.rank(0)), 2) },
    Rule { names: &["var", "std", "var_mean"], signatures: |op| kept(op, &dims(op, 1), 3) },
    Rule { names: &["linalg_vector_norm", "norm"], signatures: norm },
    Rule { names: &["trace"], signatures: trace },
    Rule { names: &["kthvalue"], signatures: |op| kept(op, &overloaded(op, 2), 3) },
    Rule {
        names: &["median", "nanmedian", "mode"],
        signatures: |op| kept(op, &overloaded(op, 1), 2),
    },
    Rule { names: &["sort", "topk"], signatures: order },
    Rule { names: ALONG, signatures: along },
    Rule {
        names: &["_softmax_backward_data", "_log_softmax_backward_data", "glu_backward"],
        signatures: along_backward,
    },
    Rule { names: &["bucketize"], signatures: bucketize },
];

/// Operations along one dimension, which argument 1 is.
const ALONG: &[&str] = &[
    "_log_softmax",
    "_safe_softmax",
    "_softmax",
    "cummax",
    "cummin",
    "cumprod",
    "glu",
    "logcumsumexp",
];

/// Dimensions that are an argument; all, if it is none.
fn dims(op: &Op, arg: usize) -> Vec<usize> {
    op.dims(arg, op.rank(0))
}

/// Returns the dimension that is an argument; all, if it is none, as in the overload without one.
fn overloaded(op: &Op, arg: usize) -> Vec<usize> {
    let rank = op.rank(0);
    op.dim(arg, rank).map_or_else(|| (0..rank).collect(), |dim| vec![dim])
}

/// Splits along dimensions that are not reduced; argument `keep` says whether the reduced ones stay,
/// with one element.
fn kept(op: &Op, reduced: &[usize], keep: usize) -> Vec<Signature> {
    let mut signatures = Vec::new();
    for dim in (0..op.rank(0)).filter(|dim| !reduced.contains(dim)) {
        let gone = reduced.iter().filter(|&&other| other < dim && !op.flag(keep)).count();
        signatures.push(Signature::new([S(dim)], vec![S(dim - gone); op.outputs]));
    }
    signatures
}

/// A split along a reduced dimension gives partial values, which are reduced by `op`.
fn partial(reduced: &[usize], op: ReduceOp) -> impl Iterator<Item = Signature> + '_ {
    reduced.iter().map(move |&dim| Signature::new([S(dim)], [Sbp::Partial(op)]))
}

fn sum(op: &Op) -> Vec<Signature> {
    // sum(self, dtype) and sum(self, dims, keepdim, dtype)
    let reduced = dims(op, 1);
    let kind = if op.overload.is_empty() { 1 } else { 3 };
    let linear = op.keeps_terms(kind).then(|| Signature::all(op, P)).into_iter();
    let signatures = linear.chain(kept(op, &reduced, 2)).chain(partial(&reduced, ReduceOp::Sum));
    reduced_at_once(op, kind, signatures.collect())
}

/// Has the signatures of a sum; code divides by the number of elements of the logical tensor.
fn mean(op: &Op) -> Vec<Signature> {
    let mut signatures = sum(op);
    for signature in &mut signatures {
        signature.has_code |= signature.outputs[0] == P && signature.inputs[0] != P;
    }
    signatures
}

/// Leaves no partial values of half precision: code reduces them in single precision. Argument `kind`
/// is the kind of the result.
fn reduced_at_once(op: &Op, kind: usize, mut signatures: Vec<Signature>) -> Vec<Signature> {
    if op.rounds_terms(kind) {
        for signature in signatures.iter_mut().filter(|one| one.outputs[0].is_partial()) {
            signature.outputs[0] = B;
            signature.has_code = true;
        }
    }
    signatures
}

fn extreme(op: &Op, by: ReduceOp) -> Vec<Signature> {
    let reduced = dims(op, 1);
    kept(op, &reduced, 2).into_iter().chain(partial(&reduced, by)).collect()
}

/// Reduces all elements, a dimension, or several.
fn folded(op: &Op, by: ReduceOp) -> Vec<Signature> {
    let reduced = match op.args.get(1) {
        // prod(self, dtype)
        _ if op.overload.is_empty() => (0..op.rank(0)).collect(),
        // Here no dimensions are none, and not all.
        Some(Arg::Ints(dims)) if dims.is_empty() => Vec::new(),
        Some(Arg::Ints(_)) => dims(op, 1),
        _ => overloaded(op, 1),
    };
    kept(op, &reduced, 2).into_iter().chain(partial(&reduced, by)).collect()
}

fn product(op: &Op) -> Vec<Signature> {
    // prod(self, dtype) and prod(self, dim, keepdim, dtype)
    let kind = if op.overload.is_empty() { 1 } else { 3 };
    reduced_at_once(op, kind, folded(op, ReduceOp::Product))
}

/// Reduces all elements or a dimension (with indices), or compares two tensors.
fn maximum(op: &Op) -> Vec<Signature> {
    if op.is_tensor(1) {
        return (0..op.broadcast_rank()).map(|dim| Signature::aligned(op, dim)).collect();
    }
    if op.args.len() > 1 {
        return kept(op, &overloaded(op, 1), 2);
    }
    let all: Vec<usize> = (0..op.rank(0)).collect();
    let by = if op.name == "max" { ReduceOp::Max } else { ReduceOp::Min };
    partial(&all, by).collect()
}

/// Keeps splits along other dimensions; code makes the norm of all elements from those of the parts.
fn norm(op: &Op) -> Vec<Signature> {
    let reduced = dims(op, 2);
    let is_of_all = reduced.len() == op.rank(0);
    let parts = reduced.iter().filter(|_| is_of_all);
    let parts = parts.map(|&dim| Signature::new([S(dim)], [B]).with_code(true));
    kept(op, &reduced, 3).into_iter().chain(parts).collect()
}

fn trace(op: &Op) -> Vec<Signature> {
    let is_linear = op.keeps_terms(1) && !op.rounds_terms(1);
    is_linear.then(|| Signature::new([P], [P])).into_iter().collect()
}

fn order(op: &Op) -> Vec<Signature> {
    let rank = op.rank(0);
    let arg = match op.name {
        "topk" => 2,
        // sort(self, stable, dim, descending) and sort(self, dim, descending)
        _ if matches!(op.args.get(1), Some(Arg::Int(_))) => 1,
        _ => 2,
    };
    let Some(at) = op.dim(arg, rank) else { return Vec::new() };
    let dims = (0..rank).filter(|&dim| dim != at);
    dims.map(|dim| Signature::new([S(dim)], vec![S(dim); op.outputs])).collect()
}

fn along(op: &Op) -> Vec<Signature> {
    let rank = op.rank(0);
    let Some(at) = op.dim(1, rank) else { return Vec::new() };
    (0..rank).filter(|&dim| dim != at).map(|dim| Signature::all(op, S(dim))).collect()
}

/// The backward is linear in the gradient.
fn along_backward(op: &Op) -> Vec<Signature> {
    // (gradient, output, dim, dtype of the input)
    let rank = op.rank(0);
    let Some(at) = op.dim(2, rank) else { return Vec::new() };
    let splits = (0..rank).filter(|&dim| dim != at);
    let splits = splits.map(|dim| Signature::new([S(dim), S(dim)], [S(dim)]));
    let linear = op.keeps_terms(3).then(|| Signature::new([P, B], [P]));
    linear.into_iter().chain(splits).collect()
}

/// All ranks have the boundaries.
fn bucketize(op: &Op) -> Vec<Signature> {
    // Of a number there is the other input only.
    let dims = 0..if op.inputs.len() == 2 { op.rank(0) } else { 0 };
    dims.map(|dim| Signature::new([S(dim), B], [S(dim)])).collect()
}
