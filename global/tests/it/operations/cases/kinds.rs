//! Operations that change the kind of a tensor, on whole numbers whose terms are great and cancel
//! each other: terms that are rounded before they are added give something else.

use tch::{Kind, Tensor};

use super::case::{Case, case, whole};

const KINDS: [Kind; 6] =
    [Kind::Double, Kind::Float, Kind::Half, Kind::BFloat16, Kind::Int64, Kind::Uint8];

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for from in KINDS {
        for to in KINDS.into_iter().filter(|&to| to != from) {
            cases.push(conversions(from, to));
            cases.push(promotions(from, to));
        }
    }
    cases
}

fn conversions(from: Kind, to: Kind) -> Case {
    const COVERS: &[&str] = &["_to_copy", "copy", "cumsum", "sum"];
    let inputs = [whole([3, 4]).kind(from), whole([3, 4]).kind(to)];
    case(format!("{from:?} to {to:?}"), inputs, COVERS, move |x| {
        let mut copy = x[1].copy();
        copy.copy_(&x[0]);
        let over_rows = x[0].sum_dim_intlist([0i64].as_slice(), false, to);
        vec![copy, x[0].to_kind(to), x[0].sum(to), over_rows, x[0].cumsum(1, to)]
    })
}

fn promotions(from: Kind, to: Kind) -> Case {
    const COVERS: &[&str] = &["add", "cat", "div", "mul", "stack", "sub", "where"];
    let inputs = [whole([3, 4]).kind(from), whole([3, 4]).kind(to), whole([]).kind(from)];
    case(format!("{from:?} with {to:?}"), inputs, COVERS, move |x| {
        let [one, other, number] = [&x[0], &x[1], &x[2]];
        let mut results = vec![
            one + other,
            one - other,
            one * other,
            number * other,
            number + other,
            one * 0.5,
            one / 2.0,
            one.where_self(&other.gt(1), other),
            Tensor::cat(&[one, other], 0),
            Tensor::stack(&[one, other], 0),
        ];
        // Results of floating point do not go into integers.
        let is_integer = |kind| matches!(kind, Kind::Int64 | Kind::Uint8);
        if is_integer(from) || !is_integer(to) {
            results.push(other.copy().g_add_(one));
            results.push(other.copy().g_mul_(one));
        }
        results
    })
}
