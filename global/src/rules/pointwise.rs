//! Operations on each element by itself, with broadcasting.

use tch::Kind;

use super::kinds::{keeps_terms, promoted};
use super::op::{Arg, Op, Rule, Signature};
use crate::kinds::{is_float, kind_of};
use crate::sbp::{B, P};

/// The rules of this file's operations.
pub const RULES: &[Rule] = &[
    Rule { names: &["add", "sub"], signatures: sums },
    Rule { names: &["mul"], signatures: products },
    Rule { names: &["div"], signatures: quotients },
    Rule { names: LINEAR, signatures: linear },
    Rule { names: &["where"], signatures: choices },
    Rule { names: &["ones_like", "empty_like", "full_like"], signatures: constants },
    Rule { names: BACKWARD, signatures: backwards },
    Rule { names: NONLINEAR, signatures: splits },
];

/// Operations that are linear in all tensors.
const LINEAR: &[&str] = &[
    "_conj",
    "_conj_physical",
    "_neg_view",
    "_to_copy",
    "alias",
    "clone",
    "conj_physical",
    "copy",
    "detach",
    "lift_fresh",
    "neg",
    "zero",
    "zeros_like",
];

/// Operations that are linear in the first tensor, the gradient of the result.
const BACKWARD: &[&str] = &[
    "elu_backward",
    "gelu_backward",
    "hardsigmoid_backward",
    "hardswish_backward",
    "hardtanh_backward",
    "leaky_relu_backward",
    "logit_backward",
    "native_dropout_backward",
    "sigmoid_backward",
    "silu_backward",
    "softplus_backward",
    "tanh_backward",
    "threshold_backward",
];

const NONLINEAR: &[&str] = &[
    "_prelu_kernel",
    "_prelu_kernel_backward",
    "abs",
    "acos",
    "acosh",
    "addcdiv",
    "addcmul",
    "angle",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "bitwise_and",
    "bitwise_not",
    "bitwise_or",
    "bitwise_xor",
    "ceil",
    "celu",
    "clamp",
    "clamp_max",
    "clamp_min",
    "complex",
    "copysign",
    "cos",
    "cosh",
    "digamma",
    "elu",
    "eq",
    "erf",
    "erfc",
    "erfinv",
    "exp",
    "exp2",
    "expm1",
    "fill",
    "floor",
    "floor_divide",
    "fmod",
    "frac",
    "ge",
    "gelu",
    "gt",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "hypot",
    "isinf",
    "isnan",
    "le",
    "leaky_relu",
    "lerp",
    "lgamma",
    "log",
    "log10",
    "log1p",
    "log2",
    "logaddexp",
    "logaddexp2",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "logit",
    "lt",
    "masked_fill",
    "maximum",
    "minimum",
    "mish",
    "nan_to_num",
    "ne",
    "polar",
    "polygamma",
    "pow",
    "reciprocal",
    "relu",
    "remainder",
    "round",
    "rsqrt",
    "rsub",
    "sgn",
    "sigmoid",
    "sign",
    "silu",
    "sin",
    "sinh",
    "softplus",
    "sqrt",
    "tan",
    "tanh",
    "threshold",
    "trunc",
    "xlogy",
];

/// Split along each dimension of the result that some input has.
fn splits(op: &Op) -> Vec<Signature> {
    let rank = if op.in_place { op.rank(0) } else { op.broadcast_rank() };
    let signatures = (0..rank).map(|dim| Signature::aligned(op, dim));
    signatures.filter(|signature| signature.inputs.iter().any(|sbp| sbp.dim().is_some())).collect()
}

/// Signatures of partial sums, as far as these stay partial sums in the kind of the result; then the
/// splits.
fn with(op: &Op, partial: impl IntoIterator<Item = Signature>) -> Vec<Signature> {
    let kind = result_kind(op);
    let kept = partial.into_iter().filter(|signature| stays_partial(op, signature, kind));
    kept.chain(splits(op)).collect()
}

/// Returns whether the partial sums of a signature stay partial sums in the kind of the result.
fn stays_partial(op: &Op, signature: &Signature, kind: Option<Kind>) -> bool {
    if !signature.outputs.contains(&P) {
        return true;
    }
    let mut terms = op.inputs.iter().zip(&signature.inputs).filter(|&(_, &sbp)| sbp == P);
    terms.all(|(input, _)| input.kind.zip(kind).is_some_and(|(from, to)| keeps_terms(from, to)))
}

/// Returns the kind of the result of an operation that is linear in some input.
fn result_kind(op: &Op) -> Option<Kind> {
    if op.in_place || op.name == "copy" {
        return op.inputs.first()?.kind;
    }
    let promoted = promoted(op, op.args.get(1));
    match op.name {
        "_to_copy" => op.int(1).map_or(promoted, kind_of),
        // Of integers it is one of floating point, as libtorch's default says.
        "div" => promoted.map(|kind| if is_float(kind) { kind } else { Kind::Float }),
        _ => promoted,
    }
}

fn linear(op: &Op) -> Vec<Signature> {
    with(op, [Signature::all(op, P)])
}

/// Both tensors are partial; a number would be added once for each rank.
fn sums(op: &Op) -> Vec<Signature> {
    let is_linear = op.is_tensor(1) && is_factor(op.args.get(2));
    with(op, is_linear.then(|| Signature::all(op, P)))
}

/// Returns whether terms times this number add up to the sum times it. Times infinity, a term of 0 is
/// no number.
fn is_factor(arg: Option<&Arg>) -> bool {
    !matches!(arg, Some(Arg::Float(value)) if !value.is_finite())
}

/// Returns whether terms divided by this number add up to the sum divided by it. Divided by 0, a term of
/// 0 is no number, and those of other signs are infinite.
fn is_divisor(arg: Option<&Arg>) -> bool {
    match arg {
        Some(Arg::Float(value)) => *value != 0.0,
        Some(Arg::Int(value)) => *value != 0,
        Some(Arg::Bool(value)) => *value,
        _ => true,
    }
}

fn products(op: &Op) -> Vec<Signature> {
    if !op.is_tensor(1) {
        return with(op, is_factor(op.args.get(1)).then(|| Signature::all(op, P)));
    }
    let second = (!op.in_place).then(|| Signature::new([B, P], [P]));
    with(op, [Signature::new([P, B], [P])].into_iter().chain(second))
}

/// Division is linear in what is divided, but not with a rounding mode.
fn quotients(op: &Op) -> Vec<Signature> {
    let is_rounded = !matches!(op.args.get(2), None | Some(Arg::None));
    let inputs = if op.is_tensor(1) { vec![P, B] } else { vec![P] };
    let is_linear = !is_rounded && is_divisor(op.args.get(1));
    with(op, is_linear.then(|| Signature::new(inputs, [P])))
}

fn choices(op: &Op) -> Vec<Signature> {
    let is_of_tensors = op.inputs.len() == 3;
    with(op, is_of_tensors.then(|| Signature::new([B, P, P], [P])))
}

fn constants(op: &Op) -> Vec<Signature> {
    with(op, [Signature::new([P], [B])])
}

fn backwards(op: &Op) -> Vec<Signature> {
    let mut inputs = vec![B; op.inputs.len()];
    inputs[0] = P;
    with(op, [Signature::new(inputs, [P])])
}
