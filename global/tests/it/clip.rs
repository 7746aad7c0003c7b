//! Clipping of gradients, beside plain torch's formula.

use crate::common::ranks::{assert_close, ranks};
use flow_global::{
    B, GlobalTensor, P, Placement, S, Sbp, clip_grad_norm, clip_grad_value, distribute_tensor,
    record,
};
use tch::{Device, Kind, Tensor};

/// A tensor on a placement with this gradient.
fn with_gradient(gradient: &Tensor, placement: &Placement, sbp: &[Sbp]) -> Tensor {
    let leaf = tch::no_grad(|| distribute_tensor(&gradient.zeros_like(), placement, sbp)).unwrap();
    let leaf = leaf.set_requires_grad(true);
    let factor = distribute_tensor(gradient, placement, vec![B; sbp.len()]).unwrap();
    (&leaf * factor).sum(gradient.kind()).backward();
    leaf
}

/// The norm of order `order` of all elements.
fn norm(tensors: &[Tensor], order: f64) -> f64 {
    let all: Vec<Tensor> = tensors.iter().map(|tensor| tensor.reshape([-1]).abs()).collect();
    let all = Vec::<f64>::try_from(Tensor::cat(&all, 0)).unwrap();
    match order {
        f64::INFINITY => all.into_iter().fold(0.0, f64::max),
        f64::NEG_INFINITY => all.into_iter().fold(f64::INFINITY, f64::min),
        _ => all.into_iter().map(|x| x.powf(order)).sum::<f64>().powf(1.0 / order),
    }
}

/// OneFlow's docstring, in every layout.
#[test]
fn the_documented_example() {
    for sbp in [S(0), S(1), B] {
        ranks(2, |group| {
            let placement = Placement::all(&group).unwrap();
            let x = Tensor::from_slice2(&[[2f32, 3.0, 4.0], [1.5, 2.6, 3.7]]);
            let x = distribute_tensor(&x, &placement, [sbp]).unwrap().set_requires_grad(true);
            x.relu().sum(Kind::Float).backward();
            let total = clip_grad_norm(&[x.shallow_clone()], 0.6, 1.0, false).unwrap();
            assert_eq!(total, 6.0);
            let expected = Tensor::full([2, 3], 0.1, (Kind::Float, Device::Cpu));
            assert_close(&x.grad().full().unwrap(), &expected, 1e-6);
        });
    }
}

/// Of tensors on a mesh, on some ranks, with more ranks than elements, and of a plain one.
#[test]
fn a_norm_is_that_of_all_elements_once() {
    for order in [1.0, 2.0, 3.5, f64::INFINITY, f64::NEG_INFINITY] {
        ranks(4, |group| {
            let mesh = Placement::new(&group, [[0, 1], [2, 3]]).unwrap();
            let two = Placement::new(&group, [1, 3]).unwrap();
            let options = (Kind::Double, Device::Cpu);
            let number = |count: i64, first: i64| (Tensor::arange(count, options) + first) * 0.37;
            let gradients = [
                number(15, 1).view([5, 3]),
                number(12, -5).view([3, 4]) + 0.1,
                number(3, 2),
                number(4, 9),
            ];
            let plain = gradients[3].zeros_like().set_requires_grad(true);
            (&plain * &gradients[3]).sum(Kind::Double).backward();
            let tensors = [
                with_gradient(&gradients[0], &mesh, &[S(0), B]),
                with_gradient(&gradients[1], &two, &[S(1)]),
                with_gradient(&gradients[2], &mesh, &[S(0), S(0)]),
                plain,
                Tensor::zeros([3], options).set_requires_grad(true), // without a gradient
            ];
            let expected = norm(&gradients, order);
            for max in [expected * 2.0, expected / 3.0] {
                let (total, trace) = record(|| clip_grad_norm(&tensors, max, order, true));
                let total = total.unwrap();
                assert!(trace.calls.is_empty(), "nothing is boxed");
                assert!((total / expected - 1.0).abs() < 1e-12, "{total} {expected}");
                let factor = (max / (expected + 1e-6)).min(1.0);
                for (tensor, gradient) in tensors.iter().zip(&gradients) {
                    assert_close(&tensor.grad().full().unwrap(), &(gradient * factor), 1e-9);
                }
            }
        });
    }
}

#[test]
fn a_norm_that_is_no_number() {
    ranks(2, |group| {
        let placement = Placement::all(&group).unwrap();
        let gradient = Tensor::from_slice(&[1.0, 2.0, f64::NAN]);
        let tensors = [with_gradient(&gradient, &placement, &[S(0)])];
        let error = clip_grad_norm(&tensors, 1.0, 2.0, true).unwrap_err().to_string();
        assert!(error.contains("norm of order 2 of the gradients is NaN"), "{error}");
        // On all ranks, and the gradients are as before.
        assert_eq!(tensors[0].grad().full().unwrap().double_value(&[1]), 2.0);
        assert!(clip_grad_norm(&tensors, 1.0, 2.0, false).unwrap().is_nan());
        assert!(tensors[0].grad().full().unwrap().double_value(&[0]).is_nan());
        let error = clip_grad_norm(&tensors, 1.0, 0.0, false).unwrap_err().to_string();
        assert!(error.contains("order of the norm is 0"), "{error}");
    });
}

#[test]
fn elements_are_limited() {
    for sbp in [S(0), B] {
        ranks(2, |group| {
            let placement = Placement::all(&group).unwrap();
            let gradient = Tensor::from_slice(&[-3.0, 0.5, 2.0]);
            let tensor = with_gradient(&gradient, &placement, &[sbp]);
            let outside = Placement::new(&group, [1]).unwrap();
            let other = with_gradient(&gradient, &outside, &[B]);
            clip_grad_value(&[tensor.shallow_clone(), other.shallow_clone()], 1.0).unwrap();
            for tensor in [tensor, other] {
                let expected = Tensor::from_slice(&[-1.0, 0.5, 1.0]);
                assert_close(&tensor.grad().full().unwrap(), &expected, 0.0);
            }
        });
    }
}

/// Terms cannot be limited one by one.
#[test]
fn gradients_that_are_terms() {
    ranks(2, |group| {
        let placement = Placement::all(&group).unwrap();
        let terms = Tensor::from_slice(&[2.0, -2.0]).to_global(&placement, [P]).unwrap();
        let leaf = flow_global::zeros([2], Kind::Double, &placement, [P]).unwrap();
        let leaf = leaf.set_requires_grad(true);
        (leaf.to_global(&placement, [P]).unwrap() * terms.full().unwrap())
            .sum(Kind::Double)
            .backward();
        let gradient = leaf.grad().full().unwrap();
        assert_close(&gradient, &Tensor::from_slice(&[4.0, -4.0]), 0.0);
        let total = clip_grad_norm(&[leaf.shallow_clone()], 4.0, f64::INFINITY, true).unwrap();
        assert_eq!(total, 4.0);
        clip_grad_value(&[leaf.shallow_clone()], 3.0).unwrap();
        let expected = Tensor::from_slice(&[3.0, -3.0]);
        assert_close(&leaf.grad().full().unwrap(), &expected, 1e-5);
    });
}
