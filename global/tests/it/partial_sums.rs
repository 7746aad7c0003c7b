//! Sums over split dimensions, and partial tensors. In bf16 and f16 they are as exact as on one process, where
//! only the result is rounded: terms of the ranks may cancel, and be greater than f16 holds. Terms of 0 bear any number.

use flow_global::{self as global, B, GlobalTensor, P, Placement, S, Sbp};
use tch::{Device, Kind, Reduction, Tensor};

use crate::common::ranks::ranks;

type Operation = fn(&Tensor) -> Tensor;

/// Operations of a tensor of 6 x 8 numbers that cancel: rows of the second half are nearly those of the
/// first, and so are columns.
const OPERATIONS: &[(&str, Operation)] = &[
    ("sum", |x| x.sum(None::<Kind>)),
    ("sum of rows", |x| x.sum_dim_intlist(0, false, None::<Kind>)),
    ("sum of columns, kept", |x| x.sum_dim_intlist(-1, true, None::<Kind>)),
    ("sum of both", |x| x.sum_dim_intlist([0i64, 1].as_slice(), false, None::<Kind>)),
    ("sum in f32", |x| x.sum(Kind::Float)),
    ("sum of f32", |x| x.to_kind(Kind::Float).sum(x.kind())),
    ("sum of integers", |x| x.to_kind(Kind::Int64).sum_dim_intlist(0, false, x.kind())),
    ("sum of sums", |x| x.sum_dim_intlist(0, false, None::<Kind>).sum(None::<Kind>)),
    ("mean", |x| x.mean(None::<Kind>)),
    ("mean of rows", |x| x.mean_dim(0, false, None::<Kind>)),
    ("mean of columns, kept", |x| x.mean_dim(-1, true, None::<Kind>)),
    ("mean of f32", |x| x.to_kind(Kind::Float).mean(x.kind())),
    ("cumsum", |x| x.cumsum(0, None::<Kind>)),
    ("norm", |x| (x / 1000).norm()),
    ("nansum", |x| x.nansum(None::<&[i64]>, false, None::<Kind>)),
    ("var", |x| (x / 1000).var(true)),
    ("logsumexp", |x| (x / 1000).logsumexp(0, false)),
    ("prod", |x| scales(x).prod(None::<Kind>)),
    ("prod of rows", |x| scales(x).prod_dim_int(0, false, None::<Kind>)),
    ("mse_loss", |x| (x / 4096).mse_loss(&x.ones_like(), Reduction::Sum)),
    ("mean mse_loss", |x| (x / 4096).mse_loss(&x.ones_like(), Reduction::Mean)),
    ("huber_loss", |x| (x / 4096).huber_loss(&x.ones_like(), Reduction::Sum, 1.0)),
    ("smooth_l1_loss", |x| (x / 4096).smooth_l1_loss(&x.ones_like(), Reduction::Sum, 1.0)),
    ("binary_cross_entropy", |x| {
        let input = (x / 8192).sigmoid();
        input.binary_cross_entropy(&x.ones_like(), None::<Tensor>, Reduction::Sum)
    }),
    ("nll_loss", |x| {
        let target = Tensor::from_slice(&[0_i64, 7, 1, 2, 4, 3]);
        x.f_nll_loss(&target, None::<Tensor>, Reduction::Sum, -100).unwrap()
    }),
    ("mean nll_loss", |x| {
        let target = Tensor::from_slice(&[0_i64, 7, 1, 2, 4, 3]);
        x.f_nll_loss(&target, None::<Tensor>, Reduction::Mean, -100).unwrap()
    }),
    ("gradient of what is broadcast", |x| {
        let bias = x.detach().select(0, 0).zeros_like().set_requires_grad(true);
        (x + &bias).backward_with(x);
        bias.grad()
    }),
];

/// Factors, great ones and small ones.
fn scales(x: &Tensor) -> Tensor {
    (x / 20000).exp2()
}

trait BackwardWith {
    fn backward_with(&self, gradient: &Tensor);
}

impl BackwardWith for Tensor {
    /// Runs backward from this gradient.
    fn backward_with(&self, gradient: &Tensor) {
        (self * gradient.detach()).sum(Kind::Float).backward();
    }
}

/// Numbers up to 40000 that cancel over both dimensions but for small ones.
fn cancelling(kind: Kind) -> Tensor {
    let small = (Tensor::arange(48, (Kind::Double, Device::Cpu)).view([6, 8]) * 0.7).sin() * 900;
    let great = Tensor::from_slice(&[1.0, 0.75, 0.5, -0.5, -0.75, -1.0]).view([6, 1])
        * Tensor::from_slice(&[1.0, 0.9, 0.8, 0.7, -0.7, -0.8, -0.9, -1.0]);
    (small + great * 40000).to_kind(kind)
}

#[test]
fn sums_round_once() {
    for (size, shape) in [(2, vec![2]), (3, vec![3]), (4, vec![2, 2])] {
        ranks(size, |group| {
            let all: Vec<usize> = (0..size).collect();
            let placement = match shape[..] {
                [_] => Placement::new(&group, all).unwrap(),
                _ => Placement::new(&group, [[0, 1], [2, 3]]).unwrap(),
            };
            let sbps: Vec<Vec<Sbp>> = match shape[..] {
                [_] => vec![vec![S(0)], vec![S(1)], vec![P], vec![B]],
                _ => vec![vec![S(0), S(0)], vec![S(0), S(1)], vec![S(1), P], vec![B, S(0)]],
            };
            for (kind, step) in [(Kind::Half, 1.0 / 1024.0), (Kind::BFloat16, 1.0 / 128.0)] {
                let plain = cancelling(kind);
                for (name, operation) in OPERATIONS {
                    let expected = operation(&plain);
                    let exact = operation(&plain.to_kind(Kind::Double));
                    let error = |result: &Tensor| (result.to_kind(Kind::Double) - &exact).abs();
                    // Sums of single precision in another order, of at most 48 numbers.
                    let rounding = exact.abs() * step + 48.0 * 40000.0 / 2f64.powi(24);
                    let bound = error(&expected) + rounding;
                    for sbp in &sbps {
                        let x = global::distribute_tensor(&plain, &placement, sbp).unwrap();
                        let found = operation(&x).full().unwrap();
                        let what = format!("{name} of {kind:?} {sbp:?} on {shape:?}");
                        assert_eq!(found.kind(), expected.kind(), "{what}");
                        let is_close = error(&found).le_tensor(&bound).all();
                        assert!(
                            is_close.int64_value(&[]) != 0,
                            "{what}: {found}, on one process {expected}, exactly {exact}"
                        );
                    }
                }
            }
        });
    }
}

/// The terms of a partial tensor are added up before what they are summed to is rounded.
#[test]
fn sums_of_partial_tensors_do_not_overflow() {
    ranks(2, |group| {
        let placement = Placement::all(&group).unwrap();
        let terms = [[40000.0, 30000.0], [-40000.0, -29984.0]];
        let local = Tensor::from_slice(&terms[group.rank()]).to_kind(Kind::Half);
        let x = global::from_local(&local, [2], &placement, [P]).unwrap();
        let operations: [(&str, Operation, f64); 3] = [
            ("sum", |x| x.sum(None::<Kind>), 16.0),
            ("mean", |x| x.mean(None::<Kind>), 8.0),
            ("cumsum", |x| x.cumsum(0, None::<Kind>).select(0, 1), 16.0),
        ];
        for (name, operation, expected) in operations {
            assert_eq!(operation(&x).full().unwrap().double_value(&[]), expected, "{name}");
        }
    });
}

/// An operation that may write its tensor.
type OnCopy = fn(Tensor) -> Tensor;

/// What divides terms by 0, or multiplies them by infinity, reduces them first.
#[test]
fn terms_of_zero_bear_any_number() {
    ranks(2, |group| {
        let placement = Placement::all(&group).unwrap();
        let terms = [[3.0, -2.0, 0.0], [0.0, 5.0, 0.0]];
        let plain = Tensor::from_slice(&[3.0, 3.0, 0.0]);
        let make = || {
            let local = Tensor::from_slice(&terms[group.rank()]);
            global::from_local(&local, [3], &placement, [P]).unwrap()
        };
        let operations: [(&str, OnCopy, bool); 9] = [
            // The first of each kind is planned before one whose number is another.
            ("/ 2", |x| x / 2.0, true),
            ("/ 0", |x| x / 0.0, false),
            ("/ integer 0", |x| x / 0, false),
            ("/ inf", |x| x / f64::INFINITY, true),
            ("/= 0", |mut x| x.divide_scalar_(0.0), false),
            ("* 2", |x| x * 2.0, true),
            ("* 0", |x| x * 0.0, true),
            ("* -inf", |x| x * f64::NEG_INFINITY, false),
            ("*= inf", |mut x| x.multiply_scalar_(f64::INFINITY), false),
        ];
        for (name, operation, stays_partial) in operations {
            let expected = operation(plain.copy());
            let found = operation(make());
            let is_in_place = name.contains('=');
            assert_eq!(found.sbp().unwrap() == [P], stays_partial || is_in_place, "{name}");
            let found = found.full().unwrap();
            let is_same = found.isclose(&expected, 0.0, 0.0, true).all();
            assert!(is_same.int64_value(&[]) != 0, "{name}: {found}, not {expected}");
        }
    });
}
