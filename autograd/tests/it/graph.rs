//! Backwards of several tensors, as a whole and in two halves.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use flow_autograd::{Forward, GradHook, Graph, custom_function};
use tch::{Device, Kind, Tensor};

const OPTIONS: (Kind, Device) = (Kind::Double, Device::Cpu);

/// Numbers that are the same on each call.
fn numbers(sizes: &[i64], factor: f64) -> Tensor {
    let count: i64 = sizes.iter().product();
    (Tensor::arange(count, OPTIONS) * factor).sin().view(sizes)
}

fn weight(sizes: &[i64], factor: f64) -> Tensor {
    numbers(sizes, factor).set_requires_grad(true)
}

/// Leaves, two of which are inputs, and a model of them with two outputs.
struct Model {
    inputs: [Tensor; 2],
    weights: Vec<Tensor>,
}

impl Model {
    fn new() -> Self {
        let inputs = [weight(&[3, 4], 0.3), weight(&[3, 4], 0.7)];
        let weights = vec![
            weight(&[4, 4], 0.2),
            weight(&[4], 0.9),
            weight(&[4, 4], 1.1),
            weight(&[3, 4], 1.3),
            numbers(&[4], 0.4), // frozen
        ];
        Self { inputs, weights }
    }

    /// Weight 0 is used on the way of both inputs, and twice on the way of the first.
    fn outputs(&self) -> Vec<Tensor> {
        let [x, y] = &self.inputs;
        let [tied, bias, other, alone, frozen] = &self.weights[..] else { unreachable!() };
        let hidden = Tensor::addmm(bias, x, &tied.tr()).tanh();
        let hidden = hidden.matmul(&tied.tr()) * frozen + bias;
        let parts = hidden.chunk(2, 1);
        let first = Tensor::cat(&[&parts[1], &parts[0]], 1).matmul(other).relu();
        let second = y.matmul(tied).layer_norm([4], Some(bias), Some(bias), 1e-5, false);
        vec![first * &second, second, alone.square()]
    }

    fn gradients(&self) -> Vec<Tensor> {
        self.inputs.iter().chain(&self.weights).map(Tensor::grad).collect()
    }
}

fn given() -> Vec<Option<Tensor>> {
    [0.5, 0.6, 0.8].map(|factor| Some(numbers(&[3, 4], factor))).into()
}

/// The gradients that libtorch has for the same, by a scalar.
fn expected() -> Vec<Tensor> {
    let model = Model::new();
    let terms = model.outputs().into_iter().zip(given()).map(|(y, grad)| y * grad.unwrap());
    terms.map(|term| term.sum(Kind::Double)).reduce(|a, b| a + b).unwrap().backward();
    model.gradients()
}

fn assert_equal(found: &[Tensor], expected: &[Tensor]) {
    for (number, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert_eq!(found.defined(), expected.defined(), "leaf {number}");
        if found.defined() {
            let worst = (found - expected).abs().max().double_value(&[]);
            assert!(worst < 1e-13, "leaf {number}: {worst}");
        }
    }
}

#[test]
fn a_backward_of_several_tensors_is_that_of_their_sum() {
    let model = Model::new();
    Graph::of(&model.outputs()).unwrap().backward(&given()).unwrap();
    assert_equal(&model.gradients(), &expected());
}

#[test]
fn halves_are_the_whole() {
    let model = Model::new();
    let [x, y] = &model.inputs;
    let graph = Graph::of(&model.outputs()).unwrap();
    let (gradients, weights) = graph.backward_inputs(&given(), &[x, y]).unwrap();
    assert!(model.gradients().iter().all(|gradient| !gradient.defined()));
    weights.backward().unwrap();
    let of_weights = model.gradients().split_off(2);
    let all: Vec<Tensor> = gradients.into_iter().flatten().chain(of_weights).collect();
    assert_equal(&all, &expected());
    assert!(!x.grad().defined() && !y.grad().defined());
}

#[test]
fn without_inputs_all_is_in_the_second_half() {
    let model = Model::new();
    let graph = Graph::of(&model.outputs()).unwrap();
    let (gradients, weights) = graph.backward_inputs(&given(), &[]).unwrap();
    assert!(gradients.is_empty());
    weights.backward().unwrap();
    assert_equal(&model.gradients(), &expected());
}

#[test]
fn the_way_to_the_inputs_is_gone_once() {
    // A function without weights of its own, between two layers.
    let runs = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&runs);
    let (x, first, second) = (weight(&[4], 0.3), weight(&[4], 0.5), weight(&[4], 0.7));
    let double = custom_function(
        &[&(&x * &first)],
        |inputs| Ok(Forward { outputs: vec![&inputs[0] * 2], saved: Vec::new() }),
        move |_, gradients| {
            counted.fetch_add(1, Ordering::Relaxed);
            Ok(vec![gradients[0].as_ref().map(|gradient| gradient * 2)])
        },
    );
    let y = &double.unwrap()[0] * &second;
    let graph = Graph::of(&[y]).unwrap();
    let ones = Some(Tensor::ones([4], OPTIONS));
    let (gradients, weights) = graph.backward_inputs(&[ones], &[&x]).unwrap();
    weights.backward().unwrap();
    assert_eq!(runs.load(Ordering::Relaxed), 1);
    assert_eq!(gradients[0].as_ref().unwrap(), &(&first * 2 * &second));
    assert_eq!(first.grad(), &x * 2 * &second);
    assert_eq!(second.grad(), &x * 2 * &first);
}

#[test]
fn hooks_of_weights_run_in_the_second_half() {
    let (x, w) = (weight(&[4], 0.3), weight(&[4], 0.5));
    let runs = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&runs);
    let hook = GradHook::install(&w, move |_| {
        counted.fetch_add(1, Ordering::Relaxed);
        Ok(())
    });
    let graph = Graph::of(&[&x * &w]).unwrap();
    let ones = Some(Tensor::ones([4], OPTIONS));
    let (_, weights) = graph.backward_inputs(&[ones], &[&x]).unwrap();
    assert_eq!(runs.load(Ordering::Relaxed), 0);
    weights.backward().unwrap();
    assert_eq!(runs.load(Ordering::Relaxed), 1);
    drop(hook);
}

#[test]
fn outputs_may_be_left_out_and_inputs_unused() {
    let (x, unused, w) = (weight(&[2], 0.3), weight(&[2], 0.4), weight(&[2], 0.5));
    let graph = Graph::of(&[&x * &w, &w * 3, x.detach()]).unwrap();
    let one = Some(Tensor::ones([2], OPTIONS));
    let given = [None, one, Some(Tensor::ones([2], OPTIONS))];
    let (gradients, weights) = graph.backward_inputs(&given, &[&x, &unused]).unwrap();
    assert!(gradients.iter().all(Option::is_none));
    weights.backward().unwrap();
    assert_eq!(w.grad(), Tensor::ones([2], OPTIONS) * 3);
}

#[test]
fn what_does_not_fit_is_an_error() {
    let x = weight(&[2], 0.3);
    let graph = || Graph::of(&[&x * 2]).unwrap();
    let error = graph().backward(&[]).unwrap_err().to_string();
    assert!(error.contains("0 gradients for 1 tensors"), "{error}");
    assert!(graph().backward(&[Some(Tensor::ones([3], OPTIONS))]).is_err());
    let ones = || [Some(Tensor::ones([2], OPTIONS))];
    assert!(graph().backward_inputs(&ones(), &[&x.detach()]).is_err());
    graph().backward(&ones()).unwrap();
    assert_eq!(x.grad(), Tensor::ones([2], OPTIONS) * 2);
}
