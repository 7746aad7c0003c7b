//! Sizes that fit no operation on one process are an error on all ranks, also where those of the locals
//! fit; what is right on one process has the same value.

use flow_global as global;
use flow_global::{B, GlobalTensor, P, Placement, S, Sbp};
use tch::{Device, Kind, Reduction, TchError, Tensor};

use crate::common::ranks::{assert_close, ranks};

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
    ("binary_cross_entropy", |x, y, _| {
        x.f_sigmoid()?.f_binary_cross_entropy(&x.f_sigmoid()?, Some(y), Reduction::Mean)
    }),
    ("binary_cross_entropy_with_logits", |x, y, row| {
        x.f_binary_cross_entropy_with_logits(&x.f_sigmoid()?, Some(y), Some(row), Reduction::Mean)
    }),
    ("bmm", |x, y, _| x.f_unsqueeze(0)?.f_bmm(&y.f_unsqueeze(0)?)),
    ("cat", |x, y, _| Tensor::f_cat(&[&*x, y], 0)),
    ("cat of columns", |x, y, _| Tensor::f_cat(&[&*x, y], -1)),
    ("copy_", |x, y, _| x.f_copy_(y).map(|()| x.shallow_clone())),
    ("dot", |x, y, _| x.f_select(1, 0)?.f_dot(&y.f_select(1, 0)?)),
    ("masked_fill", |x, y, _| x.f_masked_fill_tensor(&y.f_isnan()?, &y.f_sum(Kind::Double)?)),
    ("maximum", |x, y, _| x.f_maximum(y)),
    ("mm", |x, y, _| x.f_mm(y)),
    ("mm of columns", |x, y, _| x.f_mm(&y.tr())),
    ("mse_loss", |x, y, _| x.f_mse_loss(y, Reduction::Sum)),
    ("mv", |x, y, _| x.f_mv(&y.f_select(0, 0)?)),
    ("stack", |x, y, _| Tensor::f_stack(&[&*x, y], 1)),
    ("where", |x, y, row| row.f_isnan()?.f_where_self(x, y)),
];

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
            for sbps in [[S(0), S(0)], [S(1), S(1)], [S(0), S(1)], [B, S(0)], [S(0), B], [P, P]] {
                for (name, operation) in OPERATIONS {
                    let what =
                        format!("{name} of {one:?} {:?} and {other:?} {:?}", sbps[0], sbps[1]);
                    let expected = operation(&mut plain[0].copy(), &plain[1], &row);
                    let mut x = distribute(&plain[0], sbps[0]);
                    let found =
                        operation(&mut x, &distribute(&plain[1], sbps[1]), &distribute(&row, B));
                    match (found, expected) {
                        (Ok(found), Ok(expected)) => {
                            assert_eq!(found.size(), expected.size(), "{what}");
                            assert_close(&found.full().unwrap(), &expected, 1e-12);
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
