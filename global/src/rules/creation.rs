//! New tensors like another one: constants and random numbers.

use super::op::{Op, Rule, Signature};
use crate::sbp::{B, P, S};

/// The rules of this file's operations.
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

/// The values of the other tensor are not needed, so nothing is boxed. Dimensions that have its
/// sizes are split as its are: autograd puts the gradient of a part into zeros of the whole.
fn constants(op: &Op) -> Vec<Signature> {
    let own = &op.inputs[0].shape;
    let asked = op.ints(1);
    let mut signatures = Vec::new();
    for (dim, &size) in own.iter().enumerate() {
        let is_kept = asked.len() == own.len() && asked[dim] == size as i64;
        signatures.push(if is_kept {
            Signature::new([S(dim)], [S(dim)]).with_shape(1, S(dim))
        } else {
            Signature::new([S(dim)], [B])
        });
    }
    signatures.push(Signature::new([P], [B]));
    with_code(op, signatures)
}

/// Zeros of the other tensor's shape may be partial, as it is.
fn zeros(op: &Op) -> Vec<Signature> {
    let own = op.inputs[0].shape.iter().map(|&size| size as i64);
    let is_same = own.eq(op.ints(1).iter().copied());
    let partial = is_same.then(|| Signature::new([P], [P]));
    with_code(op, partial.into_iter().chain(constants(op)).collect())
}

/// The strides that are asked for are those of the whole tensor, so code runs instead.
fn with_code(op: &Op, signatures: Vec<Signature>) -> Vec<Signature> {
    let has_code = op.name == "new_empty_strided";
    signatures.into_iter().map(|signature| signature.with_code(has_code)).collect()
}

fn random(op: &Op) -> Vec<Signature> {
    let splits = (0..op.rank(0)).map(|dim| Signature::aligned(op, dim));
    let all = Signature::all(op, B);
    splits.chain([all]).map(|signature| signature.with_code(true)).collect()
}

#[cfg(test)]
mod tests {
    use tch::Kind;

    use super::super::op::{Arg, Input};
    use super::*;
    use crate::placement::Placement;
    use crate::rules::infer::infer;
    use crate::sbp::Sbp;

    /// Of a tensor of 4 x 6.
    fn zeros_like(have: Sbp, asked: &'static [i64]) -> (Sbp, Sbp) {
        let args = vec![Arg::Tensor(0), Arg::Ints(asked.into())];
        let op = Op::new("new_zeros", "", args, vec![Input::new([4, 6], Kind::Float)], 1, false);
        let choice = infer(&op, &Placement::of([0, 1]).unwrap(), &[vec![have]]).unwrap();
        (choice.inputs[0][0], choice.outputs[0][0])
    }

    #[test]
    fn zeros_box_nothing() {
        for have in [S(0), S(1), P, B] {
            for asked in [&[4, 6][..], &[4, 9], &[9, 6], &[3], &[]] {
                assert_eq!(zeros_like(have, asked).0, have, "{asked:?}");
            }
        }
        assert_eq!(zeros_like(S(0), &[4, 9]).1, S(0));
        assert_eq!(zeros_like(S(1), &[4, 9]).1, B);
        assert_eq!(zeros_like(P, &[4, 6]).1, P);
    }
}
