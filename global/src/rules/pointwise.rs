//! Operations on each element by itself, with broadcasting.

use super::op::{Arg, Op, Rule, Signature};
use crate::sbp::{B, P};

pub const RULES: &[Rule] = &[
    Rule { names: &["add", "sub"], signatures: sums },
    Rule { names: &["mul"], signatures: products },
    Rule { names: &["div"], signatures: quotients },
    Rule { names: LINEAR, signatures: linear },
    Rule { names: &["_to_copy"], signatures: conversions },
    Rule { names: &["copy"], signatures: copies },
    Rule { names: &["where"], signatures: choices },
    Rule { names: &["ones_like", "empty_like", "full_like"], signatures: constants },
    Rule { names: BACKWARD, signatures: backwards },
    Rule { names: NONLINEAR, signatures: splits },
];

/// Of one tensor: partial sums give partial sums.
const LINEAR: &[&str] = &[
    "_conj",
    "_conj_physical",
    "_neg_view",
    "alias",
    "clone",
    "conj_physical",
    "detach",
    "lift_fresh",
    "neg",
    "zero",
    "zeros_like",
];

/// Linear in the first tensor, the gradient of the result.
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

/// Some signatures of partial values, then the splits.
fn with(op: &Op, partial: impl IntoIterator<Item = Signature>) -> Vec<Signature> {
    partial.into_iter().chain(splits(op)).collect()
}

fn linear(op: &Op) -> Vec<Signature> {
    with(op, [Signature::all(op, P)])
}

/// Both are partial; a number would be added once for each rank.
fn sums(op: &Op) -> Vec<Signature> {
    with(op, op.is_tensor(1).then(|| Signature::all(op, P)))
}

fn products(op: &Op) -> Vec<Signature> {
    if !op.is_tensor(1) {
        return linear(op);
    }
    let second = (!op.in_place).then(|| Signature::new([B, P], [P]));
    with(op, [Signature::new([P, B], [P])].into_iter().chain(second))
}

/// With a rounding mode it is not linear.
fn quotients(op: &Op) -> Vec<Signature> {
    let is_rounded = !matches!(op.args.get(2), None | Some(Arg::None));
    let inputs = if op.is_tensor(1) { vec![P, B] } else { vec![P] };
    with(op, (!is_rounded).then(|| Signature::new(inputs, [P])))
}

/// Between kinds of floating point, or to another device; a sum of rounded numbers is not the
/// rounded sum.
fn conversions(op: &Op) -> Vec<Signature> {
    let is_linear = op.inputs[0].is_float && op.keeps_terms(1);
    with(op, is_linear.then(|| Signature::all(op, P)))
}

/// Into a tensor that is there, of its kind.
fn copies(op: &Op) -> Vec<Signature> {
    let is_linear = op.inputs.iter().take(2).all(|input| input.is_float)
        || op.inputs.get(1).is_some_and(|input| !input.is_float);
    with(op, is_linear.then(|| Signature::all(op, P)))
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
