//! Ranks outside a placement, which call everything that the others call.

use crate::common::ranks::{assert_close, ranks};
use flow_global as global;
use flow_global::{B, GlobalTensor, P, Placement, S, Sbp};
use flow_tensor::{ReduceOp, TensorCollectives};
use tch::{Device, Kind, TchError, Tensor};

const F64: (Kind, Device) = (Kind::Double, Device::Cpu);

fn numbers(sizes: &[i64]) -> Tensor {
    (Tensor::arange(sizes.iter().product::<i64>(), F64).view(sizes) * 0.37).sin()
}

/// Through locals and back, differentiated twice: all ranks run the same operations.
#[test]
fn second_gradients_through_locals() {
    ranks(3, |group| {
        let placement = Placement::new(&group, [0, 2]).unwrap();
        let plain = numbers(&[4, 6]);
        for sbp in [S(0), S(1), B] {
            let x = global::distribute_tensor(&plain, &placement, [sbp]).unwrap();
            let x = x.set_requires_grad(true);
            let local = x.to_local().unwrap().pow_tensor_scalar(3);
            let y = local.to_global(&placement, [sbp]).unwrap().square().sum(Kind::Double);
            let once = Tensor::run_backward(&[&y], &[&x], true, true).remove(0);
            let of_squares = once.square().sum(Kind::Double);
            let twice = Tensor::run_backward(&[of_squares], &[&x], false, false).remove(0);
            assert_close(&once.full().unwrap(), &(plain.pow_tensor_scalar(5) * 6), 1e-12);
            assert_close(&twice.full().unwrap(), &(plain.pow_tensor_scalar(9) * 360), 1e-12);
        }
    });
}

/// Whoever asks for no gradient of its local takes part in backward all the same.
#[test]
fn gradients_of_locals_where_some_ranks_ask_for_none() {
    ranks(3, |group| {
        let first = Placement::new(&group, [0, 2]).unwrap();
        let second = Placement::new(&group, [1]).unwrap();
        let local = match group.rank() {
            1 => Tensor::zeros([0], F64),
            rank => numbers(&[2, 3]).set_requires_grad(rank == 0),
        };
        let x = local.to_global(&first, [S(0)]).unwrap();
        let y = x.to_global(&second, [B]).unwrap().square().sum(Kind::Double);
        y.backward();
        if group.rank() == 0 {
            assert_close(&local.grad(), &(numbers(&[2, 3]) * 2), 1e-12);
        } else {
            assert!(!local.grad().defined());
        }
    });
}

/// What sizes and specs decide is an error of all ranks, and leaves them in step.
#[test]
fn errors_are_everybodys() {
    ranks(3, |group| {
        let placement = Placement::new(&group, [0, 2]).unwrap();
        let plain = numbers(&[4, 6]);
        let x = global::distribute_tensor(&plain, &placement, [S(0)]).unwrap();
        // Views that had to be boxed are not written.
        let mut views =
            vec![x.select(0, 1), x.narrow(0, 1, 2).view([-1]), x.narrow(0, 1, 2).transpose(0, 1)];
        views.extend(x.split_with_sizes([1, 3], 0));
        for mut view in views {
            let error = view.f_zero_().unwrap_err().to_string();
            assert!(error.contains("does not share the tensor's memory"), "{error}");
            assert_close(&x.full().unwrap(), &plain, 0.0);
        }
        // Partial values that cannot be reduced.
        let terms = Sbp::Partial(ReduceOp::Product);
        let complex = global::ones([2], Kind::ComplexFloat, &placement, [terms]).unwrap();
        let error = complex.f_exp().unwrap_err().to_string();
        assert!(error.contains("partial values of kind ComplexFloat cannot be reduced"), "{error}");
        assert_close(&x.full().unwrap(), &plain, 0.0);
        // Sizes that do not fit.
        let error = x.f_matmul(&x).unwrap_err().to_string();
        assert!(error.contains("shapes cannot be multiplied"), "{error}");
        assert_close(&x.exp().full().unwrap(), &plain.exp(), 0.0);
    });
}

/// Random numbers that nothing can be drawn from are refused as on one device, before any rank draws.
#[test]
fn distributions_that_cannot_be_are_everybodys_errors() {
    type Draw = fn(&mut Tensor) -> Result<Tensor, TchError>;
    const DRAWS: &[(&str, Draw)] = &[
        ("normal_", |x| x.f_normal_(0.0, -1.0)),
        ("log_normal_", |x| x.f_log_normal_(0.0, -1.0)),
        ("exponential_", |x| x.f_exponential_(-1.0)),
        ("geometric_", |x| x.f_geometric_(2.0)),
        ("cauchy_", |x| x.f_cauchy_(0.0, -1.0)),
        ("uniform_", |x| x.f_uniform_(1.0, 0.0)),
        ("bernoulli_", |x| x.f_bernoulli_float_(3.0)),
        ("bernoulli", |x| x.f_bernoulli_p(3.0)),
        ("random_ below", |x| x.f_random_to(0)),
        ("random_ from", |x| x.f_random_from(5, Some(2))),
    ];
    for (name, draw) in DRAWS {
        draw(&mut numbers(&[4, 6])).expect_err(name);
    }
    for members in [vec![0, 2], vec![0, 1, 2]] {
        ranks(3, |group| {
            let plain = numbers(&[4, 6]);
            let placement = Placement::new(&group, members.clone()).unwrap();
            for sbp in [S(0), S(1), B] {
                let mut x = global::distribute_tensor(&plain, &placement, [sbp]).unwrap();
                for (name, draw) in DRAWS {
                    // Once more as a known operation.
                    draw(&mut x).expect_err(name);
                    draw(&mut x).expect_err(name);
                    assert_close(&x.full().unwrap(), &plain, 0.0);
                }
                if members.len() == 3 {
                    let probabilities = &x * 2.0;
                    probabilities.f_bernoulli().expect_err("probabilities");
                }
                // What all have drawn since is the same.
                let drawn = x.exponential_(1.0).full().unwrap();
                let mut sum = drawn.copy();
                group.all_reduce_tensor(&mut sum, ReduceOp::Sum).unwrap();
                assert_close(&sum, &(drawn * 3), 1e-12);
            }
        });
    }
}

/// The product of operands whose locals lie in memory in another order than the whole does.
#[test]
fn kronecker_products_of_views() {
    ranks(4, |group| {
        let placement = Placement::new(&group, [0, 1, 2]).unwrap();
        let plain = numbers(&[3, 3]);
        let expected = plain.unfold(0, 2, 1).kron(&plain.unfold(0, 2, 1));
        for sbp in [S(0), S(1), B] {
            let x = global::distribute_tensor(&plain, &placement, [sbp]).unwrap();
            let windows = x.unfold(0, 2, 1);
            assert_close(&windows.kron(&windows).full().unwrap(), &expected, 1e-12);
        }
    });
}

#[test]
fn a_dummy_of_another_kind_is_an_error_of_all_ranks() {
    ranks(3, |group| {
        let placement = Placement::new(&group, [2, 0]).unwrap();
        let kind = if group.rank() == 1 { Kind::Float } else { Kind::Double };
        let local = Tensor::ones([2, 3], (kind, Device::Cpu));
        let error = local.to_global(&placement, [S(0)]).unwrap_err().to_string();
        let expected = "to_global: the tensors of rank 2 and rank 1 differ in kind; convert one by \
                        to_kind (a rank outside the placement passes any tensor of that kind)";
        assert_eq!(error, expected);
        let global = local.to_kind(Kind::Double).to_global(&placement, [S(0)]).unwrap();
        assert_close(&global.full().unwrap(), &Tensor::ones([4, 3], F64), 0.0);
    });
}

/// One rank has all of a tensor, whatever its SBP is: parts of the tensor are views of it.
#[test]
fn parts_are_written_on_a_placement_of_one_rank() {
    ranks(2, |group| {
        for (ranks, sbp) in [([[0]], [S(0), B]), ([[1]], [S(1), S(0)]), ([[0]], [P, S(0)])] {
            let placement = Placement::new(&group, ranks).unwrap();
            let plain = numbers(&[4, 6]);
            let x = global::distribute_tensor(&plain, &placement, sbp).unwrap();
            let rows = numbers(&[2, 6]).exp();
            x.narrow(0, 1, 2).copy_(&global::distribute_tensor(&rows, &placement, sbp).unwrap());
            let _ = x.narrow(1, 5, 1).fill_(7.0);
            plain.narrow(0, 1, 2).copy_(&rows);
            let _ = plain.narrow(1, 5, 1).fill_(7.0);
            assert_close(&x.full().unwrap(), &plain, 0.0);
        }
        // An axis of one rank beside another one.
        let placement = Placement::new(&group, [[0], [1]]).unwrap();
        let plain = numbers(&[4, 6]);
        let x = global::distribute_tensor(&plain, &placement, [S(1), S(0)]).unwrap();
        x.narrow(0, 1, 2).copy_(&numbers(&[2, 6]));
        plain.narrow(0, 1, 2).copy_(&numbers(&[2, 6]));
        assert_close(&x.full().unwrap(), &plain, 0.0);
    });
}

/// Bits that say how elements are read are those of all ranks, as on one device.
#[test]
fn conj_and_neg_bits() {
    ranks(3, |group| {
        let placement = Placement::new(&group, [2, 0]).unwrap();
        let plain = Tensor::complex(&numbers(&[4, 6]), &(numbers(&[4, 6]) * 3));
        let same = |found: &Tensor, expected: &Tensor| {
            assert_eq!((found.is_conj(), found.is_neg()), (expected.is_conj(), expected.is_neg()));
            let [found, expected] = [found.full().unwrap(), expected.shallow_clone()]
                .map(|one| if one.is_complex() { one.resolve_conj().view_as_real() } else { one });
            assert_close(&found, &expected.resolve_neg(), 1e-12);
        };
        for sbp in [S(0), S(1), B, P] {
            // Once as known operations.
            for _ in 0..2 {
                let x = global::distribute_tensor(&plain, &placement, [sbp]).unwrap();
                same(&x.conj(), &plain.conj());
                same(&x.conj().imag(), &plain.conj().imag());
                same(&x.conj().real(), &plain.conj().real());
                same(&x.conj().conj(), &plain);
                same(&x.conj().detach().tr(), &plain.conj().tr());
                same(&x.conj().resolve_conj(), &plain.conj().resolve_conj());
                same(&(x.conj() * &x), &(plain.conj() * &plain));
                same(&x.conj().matmul(&x.tr()), &plain.conj().matmul(&plain.tr()));
                let mut other = global::zeros([1], Kind::ComplexDouble, &placement, [B]).unwrap();
                other.set_data(&x.conj());
                same(&other, &plain.conj());
                let mut view = x.conj();
                let _ = view.transpose_(0, 1);
                same(&view, &plain.conj().tr());
                view.imag().copy_(&view.real());
                same(&x, &Tensor::complex(&plain.real(), &-plain.real()));
            }
        }
        // Locals of which some have the bit.
        let own = plain.narrow(0, 0, 2);
        let own = if group.rank() == 2 { own.conj() } else { own };
        let x = own.to_global(&placement, [S(0)]).unwrap();
        let expected = Tensor::cat(&[own_of(&plain, true), own_of(&plain, false)], 0);
        same(&x, &expected);
        same(&global::from_local(&own, [4, 6], &placement, [S(0)]).unwrap(), &expected);
        let x = global::distribute_tensor(&plain.conj(), &placement, [S(0)]).unwrap();
        same(&x, &plain.conj().resolve_conj());
    });
}

fn own_of(plain: &Tensor, is_conj: bool) -> Tensor {
    let own = plain.narrow(0, 0, 2);
    if is_conj { own.conj().resolve_conj() } else { own }
}
