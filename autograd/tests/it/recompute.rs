//! Activations that backward computes anew.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use flow_autograd::{Graph, recompute};
use flow_harness::runs_apart;
use tch::{Kind, Tensor};

fn weights() -> [Tensor; 2] {
    [0.3, 0.7].map(|factor| {
        let numbers = Tensor::arange(64, (Kind::Double, tch::Device::Cpu)) * factor;
        numbers.sin().set_requires_grad(true)
    })
}

/// Two layers with dropout between.
fn layers(x: &Tensor, weights: &[Tensor; 2]) -> Tensor {
    (x * &weights[0]).dropout(0.5, true) * &weights[1]
}

#[test]
fn gradients_are_the_same_with_dropout() {
    // The random numbers are those of the process.
    if runs_apart(gradients_are_the_same_with_dropout, &[]) {
        return;
    }
    let x = || Tensor::ones([64], (Kind::Double, tch::Device::Cpu)).set_requires_grad(true);
    let (kept, kept_x) = (weights(), x());
    tch::manual_seed(5);
    layers(&kept_x, &kept).square().sum(Kind::Double).backward();
    let after = Tensor::rand([3], (Kind::Double, tch::Device::Cpu));

    for needs_input in [true, false] {
        let (anew, anew_x) = (weights(), x().set_requires_grad(needs_input));
        let runs = Arc::new(AtomicUsize::new(0));
        let (counted, own) = (Arc::clone(&runs), [0, 1].map(|at: usize| anew[at].shallow_clone()));
        tch::manual_seed(5);
        let y = recompute(&[&anew_x], move |inputs| {
            counted.fetch_add(1, Ordering::Relaxed);
            Ok(vec![layers(&inputs[0], &own)])
        });
        let loss = y.unwrap()[0].square().sum(Kind::Double);
        let numbers = Tensor::rand([3], (Kind::Double, tch::Device::Cpu));
        assert_eq!(runs.load(Ordering::Relaxed), 1);
        loss.backward();
        assert_eq!(runs.load(Ordering::Relaxed), 2);
        for (anew, kept) in anew.iter().zip(&kept) {
            assert_eq!(anew.grad(), kept.grad());
        }
        assert_eq!(anew_x.grad().defined(), needs_input);
        if needs_input {
            assert_eq!(anew_x.grad(), kept_x.grad());
        }
        // What is drawn after it does not change.
        assert_eq!(numbers, after);
    }
}

#[test]
fn an_error_comes_out_of_forward_and_of_backward() {
    let x = weights()[0].shallow_clone();
    let error = recompute(&[&x], |_| Err("no forward today".into())).unwrap_err().to_string();
    assert!(error.contains("no forward today"), "{error}");
    let runs = AtomicUsize::new(0);
    let y = recompute(&[&x], move |inputs| match runs.fetch_add(1, Ordering::Relaxed) {
        0 => Ok(vec![&inputs[0] * 2]),
        _ => Err("no second forward".into()),
    });
    let error = y.unwrap()[0].sum(Kind::Double).f_backward().unwrap_err().to_string();
    assert!(error.contains("no second forward"), "{error}");
}

/// One half has the gradients of the inputs, the other one those of the weights, each once.
#[test]
fn halves_are_the_whole() {
    let weight = || weights()[0].shallow_clone();
    let (x, whole, other) = (weights()[1].detach().set_requires_grad(true), weight(), weight());
    let layer = |x: &Tensor, weight: &Tensor| (x * weight).tanh();
    (layer(&x, &whole) * &other).sum(Kind::Double).backward();
    let of_x = x.grad();
    let (half, half_other) = (weight(), weight());
    let own = half.shallow_clone();
    let x = x.detach().set_requires_grad(true);
    let y = recompute(&[&x], move |inputs| Ok(vec![layer(&inputs[0], &own)])).unwrap();
    let graph = Graph::of(&[(&y[0] * &half_other).sum(Kind::Double)]).unwrap();
    let one = Some(Tensor::ones([], (Kind::Double, tch::Device::Cpu)));
    let (gradients, rest) = graph.backward_inputs(&[one], &[&x]).unwrap();
    assert_eq!(gradients[0].as_ref().unwrap(), &of_x);
    assert!(!half.grad().defined() && !half_other.grad().defined());
    rest.backward().unwrap();
    assert_eq!((half.grad(), half_other.grad()), (whole.grad(), other.grad()));
    assert!(!x.grad().defined());
}

#[test]
fn a_panic_leaves_gradients_on() {
    let x = weights()[0].shallow_clone();
    let error = recompute(&[&x], |_| panic!("no forward today")).unwrap_err().to_string();
    assert!(error.contains("no forward today"), "{error}");
    assert!((&x * 2).requires_grad());
}

#[test]
fn an_input_that_is_changed_in_place_is_an_error() {
    let x = weights()[0].shallow_clone();
    let add = |inputs: &[Tensor]| Ok(vec![inputs[0].shallow_clone().g_add_scalar_(1.0)]);
    let error = recompute(&[&x], add).unwrap_err().to_string();
    assert!(error.contains("changed in place"), "{error}");
}
