//! New tensors like another one, and random numbers.
//!
//! Random numbers cannot be those of plain tensors. Cases return what must hold for any, and the
//! numbers, which must be those of one rank.

use tch::{Kind, Tensor};

use super::case::{Case, Input, case, normal, options, positive};

pub fn cases() -> Vec<Case> {
    [constants(), random()].into_iter().flatten().collect()
}

fn like() -> [Input; 1] {
    [normal([5, 6]).constant()]
}

fn constants() -> Vec<Case> {
    vec![
        case("new_zeros", like(), &["new_zeros"], |x| {
            vec![
                x[0].new_zeros([5, 6], options()),
                x[0].new_zeros([3], options()),
                x[0].new_zeros([5, 4], options()),
            ]
        }),
        case("new_ones", like(), &["new_ones"], |x| {
            vec![x[0].new_ones([5, 6], options()), x[0].new_ones([3, 7], options())]
        }),
        case("new_full", like(), &["new_full"], |x| {
            vec![x[0].new_full([5, 6], 2.5, options()), x[0].new_full([6, 5], 2.5, options())]
        }),
        case("new_empty", like(), &["new_empty"], |x| {
            vec![
                x[0].new_empty([5, 6], options()).fill_(1.5),
                x[0].new_empty([2], options()).fill_(1.5),
            ]
        }),
        case("new_empty_strided", like(), &["new_empty_strided"], |x| {
            vec![
                x[0].new_empty_strided([5, 6], [6, 1], options()).fill_(1.5),
                x[0].new_empty_strided([5, 6], [1, 5], options()).fill_(1.5),
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
    let mut cases = vec![
        case("rand_like", large(), &["rand_like"], |x| {
            let y = x[0].rand_like();
            (are_random(&y, 0.0, 1.0), y)
        }),
        case("randn_like", large(), &["randn_like"], |x| {
            let y = x[0].randn_like();
            (are_random(&y, -9.0, 9.0), y)
        }),
        case("randint_like", large(), &["randint_like"], |x| {
            let y = x[0].randint_like(5);
            (are_random(&y, 0.0, 4.0), y)
        }),
        case("uniform_", large(), &["uniform"], |x| {
            let y = x[0].copy().uniform_(2.0, 3.0);
            (are_random(&y, 2.0, 3.0), y)
        }),
        case(
            "uniform_ in f32",
            [normal([10, 12]).kind(Kind::Float).constant()],
            &["uniform"],
            |x| {
                let y = x[0].detach().copy().uniform_(2.0, 3.0);
                (are_random(&y, 2.0, 3.0), y)
            },
        ),
        case("normal_", large(), &["normal"], |x| {
            let y = x[0].copy().normal_(100.0, 1.0);
            (are_random(&y, 90.0, 110.0), y)
        }),
        case("exponential_", large(), &["exponential"], |x| {
            let y = x[0].copy().exponential_(1.0);
            (are_random(&y, 0.0, 100.0), y)
        }),
        case("random_", large(), &["random"], |x| {
            let y = x[0].copy().random_from_(3, 9);
            (are_random(&y, 3.0, 8.0), y)
        }),
        case("bernoulli_", large(), &["bernoulli"], |x| {
            let y = x[0].copy().bernoulli_float_(0.5);
            (are_random(&y, 0.0, 1.0), y.eq(0.0).logical_or(&y.eq(1.0)).all(), y)
        }),
        case("bernoulli", large(), &["bernoulli"], |x| {
            let never = x[0].gt(9.0).to_kind(Kind::Double).bernoulli().eq(0.0).all();
            let y = x[0].sigmoid().bernoulli();
            (are_random(&y, 0.0, 1.0), never, y)
        }),
        case("bernoulli of integers and flags", large(), &["bernoulli"], |x| {
            let p = x[0].sigmoid();
            let mixed = |y: Tensor| y.eq(0).any().logical_and(&y.eq(1).any());
            let truth = [Kind::Int64, Kind::Bool].map(|kind| {
                let mut zeros = x[0].zeros_like().to_kind(kind);
                mixed(zeros.bernoulli_p(0.3)).logical_and(&mixed(zeros.bernoulli_(&p)))
            });
            let never = x[0].bernoulli_tensor(&p.zeros_like()).eq(0.0).all();
            truth.into_iter().chain([never]).collect::<Vec<_>>()
        }),
        case("random_ from a number on", large(), &["random"], |x| {
            let y = x[0].copy().random_from_(5, None);
            (y.ge(5.0).all().logical_and(&y.gt(1e6).any()), y)
        }),
        case("two draws differ", large(), &["rand_like"], |x| {
            let (one, other) = (x[0].rand_like(), x[0].rand_like());
            (one.ne_tensor(&other).all(), &one + &other)
        }),
        case("dropout", [normal([10, 12])], &["bernoulli"], move |x| {
            let y = x[0].dropout(0.5, true);
            let both = y.eq(0.0).any().logical_and(&y.ne(0.0).any());
            (halves(&y.detach(), &x[0].detach()), both, y)
        }),
        case("native_dropout", [normal([10, 12])], DROPOUT, move |x| {
            let (y, mask) = x[0].native_dropout(0.5, true);
            let is_masked = y.ne(0.0).eq_tensor(&mask).all();
            (halves(&y.detach(), &x[0].detach()), is_masked, y)
        }),
        // Without a rule: drawn by libtorch's own generator.
        case("multinomial", [positive([10, 12]).constant()], &[], |x| {
            are_random(&x[0].multinomial(3, false), 0.0, 11.0)
        }),
        case("cauchy_, log_normal_, geometric_", large(), DISTRIBUTIONS, |x| {
            let one = x[0].copy().cauchy_(0.0, 1.0);
            (one, x[0].copy().log_normal_(0.0, 1.0), x[0].copy().geometric_(0.3))
        }),
    ];
    cases = cases.into_iter().map(Case::draws).collect();
    cases.push(case("dropout that does nothing", [normal([5, 6])], &[], |x| {
        vec![x[0].dropout(0.5, false) * 2.0, x[0].dropout(0.0, true)]
    }));
    cases
}

const DISTRIBUTIONS: &[&str] = &["cauchy", "log_normal", "geometric"];
const DROPOUT: &[&str] = &["native_dropout", "native_dropout_backward"];
