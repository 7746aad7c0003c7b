//! Custom autograd functions.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use flow_autograd::{BoxError, Error, Forward, custom_function};
use tch::{Device, Kind, Tensor};

fn tensor(values: &[f64]) -> Tensor {
    Tensor::from_slice(values).set_requires_grad(true)
}

fn values(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor).unwrap()
}

type Grads = Result<Vec<Option<Tensor>>, BoxError>;

/// x * y and x + y.
fn product_and_sum(x: &Tensor, y: &Tensor) -> Result<Vec<Tensor>, Error> {
    custom_function(
        &[x, y],
        |inputs| {
            let (x, y) = (&inputs[0], &inputs[1]);
            let product = x * y;
            assert!(!product.requires_grad(), "no graph is recorded inside");
            Ok(Forward {
                outputs: vec![product, x + y],
                saved: vec![x.shallow_clone(), y.shallow_clone()],
            })
        },
        |saved, grads| -> Grads {
            let of = |other: &Tensor| {
                let product = grads[0].as_ref().map(|grad| grad * other);
                match (product, &grads[1]) {
                    (Some(product), Some(sum)) => Some(product + sum),
                    (Some(grad), None) => Some(grad),
                    (None, sum) => sum.as_ref().map(Tensor::shallow_clone),
                }
            };
            Ok(vec![of(&saved[1]), of(&saved[0])])
        },
    )
}

#[test]
fn several_inputs_and_outputs() {
    let (x, y) = (tensor(&[2.0, 3.0]), tensor(&[5.0, 7.0]));
    let outputs = product_and_sum(&x, &y).unwrap();
    assert_eq!(values(&outputs[0]), [10.0, 21.0]);
    assert!(outputs.iter().all(Tensor::requires_grad));
    (&outputs[0] + &outputs[1] * 10).sum(Kind::Double).f_backward().unwrap();
    assert_eq!(values(&x.grad()), [15.0, 17.0]);
    assert_eq!(values(&y.grad()), [12.0, 13.0]);
}

#[test]
fn an_output_without_a_gradient_is_none() {
    let (x, y) = (tensor(&[2.0]), tensor(&[5.0]));
    let outputs = product_and_sum(&x, &y).unwrap();
    outputs[1].sum(Kind::Double).f_backward().unwrap();
    assert_eq!((values(&x.grad()), values(&y.grad())), (vec![1.0], vec![1.0]));
}

#[test]
fn inputs_that_require_no_gradient() {
    let (x, y) = (tensor(&[2.0]), Tensor::from_slice(&[5.0]));
    let outputs = product_and_sum(&x, &y).unwrap();
    outputs[0].sum(Kind::Double).f_backward().unwrap();
    assert_eq!(values(&x.grad()), [5.0]);
    assert!(!y.grad().defined());

    let outputs = product_and_sum(&y, &y).unwrap();
    assert!(!outputs[0].requires_grad());
    let outputs = tch::no_grad(|| product_and_sum(&x, &y).unwrap());
    assert!(!outputs[0].requires_grad());
}

#[test]
fn backward_runs_twice_on_a_retained_graph_only() {
    let (x, y) = (tensor(&[2.0]), tensor(&[5.0]));
    let product = product_and_sum(&x, &y).unwrap().swap_remove(0);
    for _ in 0..2 {
        let grads = Tensor::f_run_backward(&[&product], &[&x], true, false).unwrap();
        assert_eq!(values(&grads[0]), [5.0]);
    }
    product.f_backward().unwrap();
    let text = product.f_backward().unwrap_err().to_string();
    assert!(text.contains("second time"), "{text}");
}

#[test]
fn backward_of_backward() {
    let x = tensor(&[3.0]);
    let square = custom_function(
        &[&x],
        |inputs| {
            Ok(Forward {
                outputs: vec![&inputs[0] * &inputs[0]],
                saved: vec![inputs[0].shallow_clone()],
            })
        },
        |saved, grads| -> Grads { Ok(vec![grads[0].as_ref().map(|grad| grad * &saved[0] * 2)]) },
    )
    .unwrap();
    let first = Tensor::f_run_backward(&[&square[0]], &[&x], true, true).unwrap();
    assert_eq!(values(&first[0]), [6.0]);
    let second = Tensor::f_run_backward(&[&first[0]], &[&x], false, false).unwrap();
    assert_eq!(values(&second[0]), [2.0]);
}

#[test]
fn an_output_may_be_an_input() {
    let x = tensor(&[2.0]);
    let outputs = custom_function(
        &[&x],
        |inputs| Ok(Forward { outputs: vec![inputs[0].shallow_clone()], saved: vec![] }),
        |_, grads| -> Grads { Ok(vec![grads[0].as_ref().map(|grad| grad * 10)]) },
    )
    .unwrap();
    outputs[0].sum(Kind::Double).f_backward().unwrap();
    assert_eq!(values(&x.grad()), [10.0]);
}

#[test]
fn outputs_of_integers_have_no_gradient() {
    let x = tensor(&[2.0]);
    let outputs = custom_function(
        &[&x],
        |inputs| {
            Ok(Forward {
                outputs: vec![inputs[0].to_kind(Kind::Int64), &inputs[0] * 2],
                saved: vec![],
            })
        },
        |_, grads| -> Grads {
            assert!(grads[0].is_none());
            Ok(vec![grads[1].as_ref().map(|grad| grad * 2)])
        },
    )
    .unwrap();
    assert!(!outputs[0].requires_grad() && outputs[1].requires_grad());
    outputs[1].sum(Kind::Double).f_backward().unwrap();
    assert_eq!(values(&x.grad()), [2.0]);
}

fn identity(x: &Tensor, backward: impl Fn() -> Grads + Send + 'static) -> Tensor {
    let outputs = custom_function(
        &[x],
        |inputs| Ok(Forward { outputs: vec![&inputs[0] * 1], saved: vec![] }),
        move |_, _| backward(),
    );
    outputs.unwrap().swap_remove(0).sum(Kind::Double)
}

#[test]
fn errors_and_panics_of_backward_come_out_of_backward() {
    let x = tensor(&[2.0, 3.0]);
    let failing = [
        (identity(&x, || Err("no gradient today".into())), "no gradient today"),
        (identity(&x, || panic!("not even an error")), "not even an error"),
        (identity(&x, || Ok(vec![])), "returned 0 gradients for 1 inputs"),
        (identity(&x, || Ok(vec![Some(Tensor::zeros([7], (Kind::Double, Device::Cpu)))])), "shape"),
    ];
    for (loss, expected) in failing {
        let text = loss.f_backward().unwrap_err().to_string();
        assert!(text.contains(expected), "{expected}: {text}");
    }
}

#[test]
fn errors_and_panics_of_forward_come_out_of_it() {
    let fail = |forward: fn() -> Result<Forward, BoxError>| {
        custom_function(&[&tensor(&[1.0])], |_| forward(), |_, _| Ok(vec![None]))
            .unwrap_err()
            .to_string()
    };
    assert!(fail(|| Err("not this one".into())).contains("not this one"));
    assert!(fail(|| panic!("out of the forward")).contains("out of the forward"));
}

/// Counts the closures that are alive.
struct Alive(Arc<AtomicUsize>);

impl Alive {
    fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        Self(count.clone())
    }
}

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

#[test]
fn nothing_leaks() {
    let count = Arc::<AtomicUsize>::default();
    let x = tensor(&[2.0]);
    let make = |x: &Tensor| {
        let alive = Alive::new(&count);
        custom_function(
            &[x],
            |inputs| {
                let output = &inputs[0] * 2;
                // Saving an output must not keep its own graph alive.
                Ok(Forward {
                    saved: vec![output.shallow_clone(), inputs[0].shallow_clone()],
                    outputs: vec![output],
                })
            },
            move |_, grads| -> Grads {
                let _ = &alive;
                Ok(vec![grads[0].as_ref().map(|grad| grad * 2)])
            },
        )
    };
    let handles = flow_autograd::use_count(&x);
    let output = make(&x).unwrap().swap_remove(0);
    assert_eq!(count.load(Ordering::SeqCst), 1);
    output.f_backward().unwrap();
    drop(output);
    assert_eq!(count.load(Ordering::SeqCst), 0, "with the graph");
    assert_eq!(flow_autograd::use_count(&x), handles);

    drop(make(&x).unwrap());
    assert_eq!(count.load(Ordering::SeqCst), 0, "without a backward");
    let output = make(&Tensor::from_slice(&[2.0])).unwrap();
    assert_eq!(count.load(Ordering::SeqCst), 0, "without a graph, at once");
    drop(output);
    let alive = Alive::new(&count);
    let failed = custom_function(
        &[&x],
        |_| Err("no".into()),
        move |_, _| {
            let _ = &alive;
            Ok(vec![None])
        },
    );
    assert!(failed.is_err());
    assert_eq!(count.load(Ordering::SeqCst), 0, "after an error");
}
