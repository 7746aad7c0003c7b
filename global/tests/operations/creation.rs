//! New tensors like another one, and random numbers.
//!
//! Random numbers cannot be those of plain tensors. Cases return what must hold for any.

use tch::{Kind, Tensor};

use crate::case::{case, normal, Case, Input, CPU};

pub fn cases() -> Vec<Case> {
    [constants(), random()].into_iter().flatten().collect()
}

fn like() -> [Input; 1] {
    [normal([5, 6]).constant()]
}

fn constants() -> Vec<Case> {
    vec![
        case("new_zeros", like(), &["new_zeros"], |x| {
            vec![x[0].new_zeros([5, 6], CPU), x[0].new_zeros([3], CPU), x[0].new_zeros([5, 4], CPU)]
        }),
        case("new_ones", like(), &["new_ones"], |x| {
            vec![x[0].new_ones([5, 6], CPU), x[0].new_ones([3, 7], CPU)]
        }),
        case("new_full", like(), &["new_full"], |x| {
            vec![x[0].new_full([5, 6], 2.5, CPU), x[0].new_full([6, 5], 2.5, CPU)]
        }),
        case("new_empty", like(), &["new_empty"], |x| {
            vec![x[0].new_empty([5, 6], CPU).fill_(1.5), x[0].new_empty([2], CPU).fill_(1.5)]
        }),
        case("new_empty_strided", like(), &["new_empty_strided"], |x| {
            vec![
                x[0].new_empty_strided([5, 6], [6, 1], CPU).fill_(1.5),
                x[0].new_empty_strided([5, 6], [1, 5], CPU).fill_(1.5),
            ]
        }),
        case("new_zeros of another kind", like(), &["new_zeros"], |x| {
            x[0].new_zeros([5, 6], (Kind::Int64, x[0].device()))
        }),
    ]
}

/// Whether all elements are in a range, and not all are alike.
fn are_random(x: &Tensor, low: f64, high: f64) -> Tensor {
    let is_in = x.ge(low).logical_and(&x.le(high)).all();
    let is_spread = (x.max() - x.min()).gt(0.0);
    is_in.logical_and(&is_spread)
}

fn random() -> Vec<Case> {
    let large = || [normal([10, 12]).constant()];
    let halves = |y: &Tensor, x: &Tensor| {
        // Kept elements are doubled.
        let kept = (y - x * 2.0).abs().lt(1e-12);
        kept.logical_or(&y.eq(0.0)).all()
    };
    vec![
        case("rand_like", large(), &["rand_like"], |x| are_random(&x[0].rand_like(), 0.0, 1.0)),
        case("randn_like", large(), &["randn_like"], |x| are_random(&x[0].randn_like(), -9.0, 9.0)),
        case("randint_like", large(), &["randint_like"], |x| {
            are_random(&x[0].randint_like(5), 0.0, 4.0)
        }),
        case("uniform_", large(), &["uniform"], |x| {
            are_random(&x[0].copy().uniform_(2.0, 3.0), 2.0, 3.0)
        }),
        case("normal_", large(), &["normal"], |x| {
            are_random(&x[0].copy().normal_(100.0, 1.0), 90.0, 110.0)
        }),
        case("exponential_", large(), &["exponential"], |x| {
            are_random(&x[0].copy().exponential_(1.0), 0.0, 100.0)
        }),
        case("random_", large(), &["random"], |x| {
            are_random(&x[0].copy().random_from_(3, 9), 3.0, 8.0)
        }),
        case("bernoulli_", large(), &["bernoulli"], |x| {
            let y = x[0].copy().bernoulli_float_(0.5);
            vec![are_random(&y, 0.0, 1.0), y.eq(0.0).logical_or(&y.eq(1.0)).all()]
        }),
        case("bernoulli", large(), &["bernoulli"], |x| {
            vec![
                are_random(&x[0].sigmoid().bernoulli(), 0.0, 1.0),
                x[0].gt(9.0).to_kind(Kind::Double).bernoulli(),
            ]
        }),
        case("dropout", large(), &["bernoulli"], move |x| {
            let y = x[0].dropout(0.5, true);
            vec![halves(&y, &x[0]), y.eq(0.0).any(), y.ne(0.0).any()]
        }),
        case(
            "native_dropout",
            [normal([10, 12])],
            &["native_dropout", "native_dropout_backward"],
            move |x| {
                let (y, mask) = x[0].native_dropout(0.5, true);
                let is_masked = y.ne(0.0).eq_tensor(&mask).all();
                // The gradient goes through the same mask.
                let gradient = Tensor::run_backward(&[y.sum(Kind::Double)], &[&x[0]], true, false);
                let expected = mask.to_kind(Kind::Double) * 2.0;
                let is_right = (&gradient[0] - expected).abs().lt(1e-12).all();
                vec![halves(&y.detach(), &x[0].detach()), is_masked, is_right, &x[0] * 1.0]
            },
        ),
        case("dropout that does nothing", [normal([5, 6])], &[], |x| {
            vec![x[0].dropout(0.5, false) * 2.0, x[0].dropout(0.0, true)]
        }),
        case("multinomial", [crate::case::positive([5, 6]).constant()], &[], |x| {
            are_random(&x[0].multinomial(3, false), 0.0, 5.0)
        }),
    ]
}
