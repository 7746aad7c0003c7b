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

/// The values of the other tensor are not needed, so nothing is boxed. Dimensions that have its
/// sizes are split as its are: autograd puts the gradient of a part into zeros of the whole.
fn constants(op: &Op) -> Vec<Signature> {
    let (own, asked) = (&op.inputs[0].shape, op.ints(1));
    let is_kept = |dim: usize| asked.len() == own.len() && asked[dim] == own[dim] as i64;
    let split = |dim| match is_kept(dim) {
        true => Signature::new([S(dim)], [S(dim)]).with_shape(1, S(dim)),
        false => Signature::new([S(dim)], [B]),
    };
    let partial = Signature::new([P], [B]);
    with_code(op, (0..own.len()).map(split).chain([partial]))
}

/// Zeros of the other tensor's shape may be partial, as it is.
fn zeros(op: &Op) -> Vec<Signature> {
    let (own, asked) = (&op.inputs[0].shape, op.ints(1));
    let is_same = own.iter().map(|&size| size as i64).eq(asked.iter().copied());
    let partial = is_same.then(|| Signature::new([P], [P]));
    with_code(op, partial.into_iter().chain(constants(op)))
}

fn with_code(op: &Op, signatures: impl Iterator<Item = Signature>) -> Vec<Signature> {
    let has_code = op.name == "new_empty_strided";
    signatures.map(|signature| signature.with_code(has_code)).collect()
}

fn random(op: &Op) -> Vec<Signature> {
    let splits = (0..op.rank(0)).map(|dim| Signature::aligned(op, dim));
    let all = Signature::all(op, B);
    splits.chain([all]).map(|signature| signature.with_code(true)).collect()
}

#[cfg(test)]
mod tests {
    use super::super::op::{Arg, Input};
    use super::*;
    use crate::placement::Placement;
    use crate::rules::infer::infer;
    use crate::sbp::Sbp;

    /// Of a tensor of 4 x 6.
    fn zeros_like(have: Sbp, asked: &'static [i64]) -> (Sbp, Sbp) {
        let input = Input { shape: vec![4, 6], is_float: true, bytes: 4, is_defined: true };
        let op = Op {
            name: "new_zeros",
            overload: "",
            args: vec![Arg::Tensor(0), Arg::Ints(asked.into())],
            inputs: vec![input],
            outputs: 1,
            in_place: false,
            ranks: 2,
        };
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
