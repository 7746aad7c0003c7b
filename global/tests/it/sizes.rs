//! Sizes that fit no operation on one process are an error on all ranks, also where those of the locals
//! fit; what is right on one process has the same value.

use flow_global as global;
use flow_global::{B, GlobalTensor, P, Placement, S, Sbp};
use tch::{Device, Kind, Reduction, TchError, Tensor};

use crate::common::ranks::ranks;

type Operation = fn(&mut Tensor, &Tensor, &Tensor) -> Result<Tensor, TchError>;

/// Operations of two tensors, and of a third one of which `row` is the name: 6 numbers.
const OPERATIONS: &[(&str, Operation)] = &[
    ("add", |x, y, _| x.f_add(y)),
    ("add_", |x, y, _| x.f_add_(y)),
    ("addcmul", |x, y, row| x.f_addcmul(y, row)),
    ("addmm", |x, y, row| row.f_addmm(x, y)),
    ("addmm of a bias", |x, y, _| x.f_addmm(&y.tr(), y)),
    ("addmv", |x, y, row| row.f_addmv(x, &y.f_select(0, 0)?)),
    ("addr", |x, y, row| x.f_addr(row, &y.f_select(0, 0)?)),
    ("atan2", |x, y, _| x.f_atan2(y)),
    ("batch_norm", |x, y, _| {
        let weight = Some(y.f_select(0, 0)?);
        let none = None::<&Tensor>;
        x.f_batch_norm(weight.as_ref(), weight.as_ref(), none, none, true, 0.1, 1e-5, false)
    }),
    ("binary_cross_entropy", |x, y, _| {
        x.f_sigmoid()?.f_binary_cross_entropy(&x.f_sigmoid()?, Some(y), Reduction::Mean)
    }),
    ("binary_cross_entropy_with_logits", |x, y, row| {
        x.f_binary_cross_entropy_with_logits(&x.f_sigmoid()?, Some(y), Some(row), Reduction::Mean)
    }),
    ("bernoulli_", |x, y, _| {
        // All are 1.
        let probabilities = y.f_isfinite()?.f_to_kind(Kind::Double)?;
        x.f_isnan()?.f_to_kind(Kind::Double)?.f_bernoulli_(&probabilities)
    }),
    ("bmm", |x, y, _| x.f_unsqueeze(0)?.f_bmm(&y.f_unsqueeze(0)?)),
    ("cat", |x, y, _| Tensor::f_cat(&[&*x, y], 0)),
    ("cat of columns", |x, y, _| Tensor::f_cat(&[&*x, y], -1)),
    ("clamp", |x, y, row| x.f_clamp_tensor(Some(y), Some(row))),
    ("conv1d", |x, y, _| {
        let weight = y.f_unsqueeze(2)?;
        x.f_unsqueeze(0)?.f_conv1d(&weight, None::<Tensor>, 1, 0, 1, 1)
    }),
    ("copy_", |x, y, _| x.f_copy_(y).map(|()| x.shallow_clone())),
    ("copysign", |x, y, _| x.f_copysign(y)),
    ("cross_entropy", |x, y, _| {
        let target = zeros(&y.f_select(1, 0)?)?;
        x.f_cross_entropy_loss(&target, None::<Tensor>, Reduction::Mean, -100, 0.0)
    }),
    ("dot", |x, y, _| x.f_select(1, 0)?.f_dot(&y.f_select(1, 0)?)),
    ("embedding", |x, y, _| Tensor::f_embedding(x, &zeros(y)?, -1, false, false)),
    ("expand", |x, y, _| x.f_expand(y.size(), false)),
    ("floor_divide", |x, y, row| x.f_floor_divide(y)?.f_add(row)),
    ("gather", |x, y, _| x.f_gather(0, &zeros(y)?, false)),
    ("gather of columns", |x, y, _| x.f_gather(1, &zeros(y)?, false)),
    ("group_norm", |x, y, _| {
        let weight = Some(y.f_select(0, 0)?);
        x.f_group_norm(1, weight.as_ref(), weight.as_ref(), 1e-5, false)
    }),
    ("huber_loss", |x, y, _| x.f_huber_loss(y, Reduction::Mean, 1.0)),
    ("index", |x, y, row| x.f_index(&[Some(zeros(&y.f_select(1, 0)?)?), Some(zeros(row)?)])),
    ("index_add", |x, y, _| x.f_index_add(0, &zeros(&x.f_select(1, 0)?)?, y)),
    ("index_add of columns", |x, y, _| x.f_index_add(1, &zeros(&y.f_select(0, 0)?)?, y)),
    ("index_put", |x, y, _| x.f_index_put(&[Some(zeros(&x.f_select(1, 0)?)?)], y, true)),
    ("index_put of a row", |x, y, _| {
        x.f_index_put(&[Some(zeros(&x.f_select(1, 0)?.f_sum(Kind::Double)?)?)], y, true)
    }),
    ("index_put of columns", |x, y, row| x.f_index_put(&[None, Some(zeros(row)?)], y, true)),
    ("index_put of elements", |x, y, _| {
        let index = zeros(x)?;
        x.f_index_put(&[Some(index.shallow_clone()), Some(index)], y, true)
    }),
    ("index_select", |x, y, _| x.f_index_select(0, &zeros(&y.f_select(1, 0)?)?)),
    ("layer_norm", |x, y, _| {
        let weight = Some(y.f_select(0, 0)?);
        let sizes = [x.size()[1]];
        x.f_layer_norm(sizes, weight.as_ref(), weight.as_ref(), 1e-5, false)
    }),
    ("lerp", |x, y, row| x.f_lerp_tensor(y, row)),
    ("linear", |x, y, _| x.f_linear(y, None::<Tensor>)),
    ("logical_and", |x, y, _| x.f_logical_and(y)),
    ("masked_fill", |x, y, _| x.f_masked_fill_tensor(&y.f_isnan()?, &y.f_sum(Kind::Double)?)),
    ("maximum", |x, y, _| x.f_maximum(y)),
    ("mm", |x, y, _| x.f_mm(y)),
    ("mm of columns", |x, y, _| x.f_mm(&y.tr())),
    ("mse_loss", |x, y, _| x.f_mse_loss(y, Reduction::Sum)),
    ("mv", |x, y, _| x.f_mv(&y.f_select(0, 0)?)),
    ("narrow", |x, y, _| x.f_narrow(0, 0, y.size()[0])),
    ("nll_loss", |x, y, _| {
        let target = zeros(&y.f_select(1, 0)?)?;
        x.f_nll_loss(&target, None::<Tensor>, Reduction::Mean, -100)
    }),
    ("nll_loss with weights", |x, y, _| {
        let target = zeros(&x.f_select(1, 0)?)?;
        x.f_nll_loss(&target, Some(y.f_select(0, 0)?), Reduction::Mean, -100)
    }),
    ("nll_loss2d", |x, y, _| {
        let images = x.f_unsqueeze(0)?.f_unsqueeze(0)?;
        images.f_nll_loss2d(&zeros(&y.f_unsqueeze(0)?)?, None::<Tensor>, Reduction::Sum, -100)
    }),
    ("scatter", |x, y, _| x.f_scatter(0, &zeros(y)?, y)),
    ("scatter_add", |x, y, _| x.f_scatter_add(0, &zeros(x)?, y)),
    ("scatter_add of columns", |x, y, _| x.f_scatter_add(1, &zeros(y)?, y)),
    ("smooth_l1_loss", |x, y, _| x.f_smooth_l1_loss(y, Reduction::None, 1.0)),
    ("softmax of a sum", |x, y, _| x.f_add(y)?.f_softmax(-1, Kind::Double)),
    ("stack", |x, y, _| Tensor::f_stack(&[&*x, y], 1)),
    ("take_along_dim", |x, y, _| x.f_take_along_dim(&zeros(y)?, 0)),
    ("view", |x, y, _| x.f_view(y.size().as_slice())),
    ("where", |x, y, row| row.f_isnan()?.f_where_self(x, y)),
    ("xlogy", |x, y, _| x.f_xlogy(&y.f_abs()?)),
];

/// As many indices, all 0.
fn zeros(like: &Tensor) -> Result<Tensor, TchError> {
    like.f_zeros_like()?.f_to_kind(Kind::Int64)
}

/// Pairs of sizes that fit one or the other operation, or whose parts on two ranks do.
const SIZES: &[([i64; 2], [i64; 2])] = &[
    ([4, 6], [2, 6]),
    ([2, 6], [4, 6]),
    ([4, 6], [4, 3]),
    ([4, 6], [1, 6]),
    ([1, 6], [2, 6]),
    ([3, 6], [4, 6]),
    ([4, 6], [6, 6]),
    ([2, 6], [5, 6]),
    ([4, 6], [0, 6]),
    ([4, 6], [4, 6]),
];

fn numbers(sizes: &[i64]) -> Tensor {
    let count: i64 = sizes.iter().product();
    (Tensor::arange(count, (Kind::Double, Device::Cpu)).view(sizes) * 0.37).sin()
}

#[test]
fn sizes_that_do_not_fit_are_everybodys_error() {
    ranks(3, |group| {
        // Rank 0 is outside.
        let placement = Placement::new(&group, [1, 2]).unwrap();
        let distribute =
            |plain: &Tensor, sbp: Sbp| global::distribute_tensor(plain, &placement, [sbp]).unwrap();
        let row = numbers(&[6]);
        for (one, other) in SIZES {
            let plain = [numbers(one), numbers(other)];
            for (name, operation) in OPERATIONS {
                let expected = operation(&mut plain[0].copy(), &plain[1], &row);
                for sbps in [[S(0), S(0)], [S(1), S(1)], [S(0), B], [B, S(0)], [P, P]] {
                    let what =
                        format!("{name} of {one:?} {:?} and {other:?} {:?}", sbps[0], sbps[1]);
                    let mut x = distribute(&plain[0], sbps[0]);
                    let found =
                        operation(&mut x, &distribute(&plain[1], sbps[1]), &distribute(&row, B));
                    match (found, &expected) {
                        (Ok(found), Ok(expected)) => {
                            assert_eq!(found.size(), expected.size(), "{what}");
                            let found = found.full().unwrap().to_kind(Kind::Double);
                            let expected = expected.to_kind(Kind::Double);
                            let is_close = found.isclose(&expected, 1e-12, 1e-12, true).all();
                            assert!(is_close.int64_value(&[]) != 0, "{what}: {found} {expected}");
                        }
                        (Err(_), Err(_)) => {}
                        (Ok(found), Err(error)) => {
                            panic!("{what} gives {:?}: {error}", found.size())
                        }
                        (Err(error), Ok(_)) => panic!("{what}: {error}"),
                    }
                }
            }
        }
    });
}
