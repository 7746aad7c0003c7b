//! New tensors like another one: constants and random numbers.

use super::op::{Op, Rule, Signature};
use crate::sbp::{B, P, S};

pub const RULES: &[Rule] = &[
    Rule { names: &["new_empty", "new_zeros", "new_empty_strided"], signatures: zeros },
    Rule { names: &["new_ones", "new_full"], signatures: constants },
    Rule { names: RANDOM, signatures: random },
];

/// Drawn by logical element, by code.
const RANDOM: &[&str] = &[
    "bernoulli",
    "cauchy",
    "exponential",
    "geometric",
    "log_normal",
    "native_dropout",
    "normal",
    "rand_like",
    "randint_like",
    "randn_like",
    "random",
    "uniform",
];

/// Split as the tensor is, if they have its shape.
fn constants(op: &Op) -> Vec<Signature> {
    let shape = op.ints(1).iter().map(|&size| usize::try_from(size).ok());
    if !shape.eq(op.inputs[0].shape.iter().map(|&size| Some(size))) {
        return Vec::new();
    }
    let has_code = op.name == "new_empty_strided";
    let dims = 0..op.rank(0);
    let split = |dim| Signature::all(op, S(dim)).with_shape(1, S(dim)).with_code(has_code);
    dims.map(split).collect()
}

fn zeros(op: &Op) -> Vec<Signature> {
    let splits = constants(op);
    let partial = Signature::all(op, P).with_code(op.name == "new_empty_strided");
    let has_partial = !splits.is_empty();
    has_partial.then_some(partial).into_iter().chain(splits).collect()
}

fn random(op: &Op) -> Vec<Signature> {
    let splits = (0..op.rank(0)).map(|dim| Signature::aligned(op, dim));
    let all = Signature::all(op, B);
    splits.chain([all]).map(|signature| signature.with_code(true)).collect()
}
