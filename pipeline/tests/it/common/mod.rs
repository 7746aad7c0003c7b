//! Ranks that are threads, and a model for them.

#![allow(dead_code)] // `ddp_worker` has this file too and uses some of it

pub mod replicas;

use std::sync::OnceLock;
use std::time::Duration;

use flow_comm::Mesh;
use flow_pipeline::Stage;
use flow_tensor::ProcessGroup;
use tch::{Device, Kind, Tensor};

const WIDTH: i64 = 5;
const STEPS: i64 = 2;

/// Runs `body` on each of so many ranks, and returns what they have returned.
pub fn ranks<T: Send>(size: usize, body: impl Fn(ProcessGroup) -> T + Sync) -> Vec<T> {
    let groups = ProcessGroup::in_process(size).unwrap();
    std::thread::scope(|scope| {
        let start = |group: ProcessGroup| {
            group.set_timeout(Duration::from_secs(60));
            scope.spawn(|| body(group))
        };
        let threads: Vec<_> = groups.into_iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// All ranks are on one axis.
pub fn mesh(group: &ProcessGroup) -> Mesh {
    let ranks: Vec<usize> = (0..group.world_size()).collect();
    Mesh::new(group, &ranks, &[ranks.len()]).unwrap().with_names(&["pp"]).unwrap()
}

/// Where tensors are, if not on the CPU.
pub static DEVICE: OnceLock<Device> = OnceLock::new();

pub fn device() -> Device {
    *DEVICE.get().unwrap_or(&Device::Cpu)
}

/// Numbers that are the same on each call.
pub fn numbers(sizes: &[i64], factor: f64) -> Tensor {
    let count: i64 = sizes.iter().product();
    (Tensor::arange(count, (Kind::Double, device())) * factor).sin().view(sizes)
}

/// A model of many stages. From stage to stage go two tensors, one of which needs no gradient. Each
/// stage has a weight, a bias, and a frozen weight.
pub struct Model {
    weights: Vec<[Tensor; 3]>,
}

/// What a model has after training in one process.
pub struct Trained {
    pub model: Model,
    pub losses: Vec<Tensor>,
}

impl Model {
    pub fn new(stages: usize) -> Self {
        let of = |stage: usize| {
            let factor = 0.3 + stage as f64 / 7.0;
            let weight = numbers(&[WIDTH, WIDTH], factor).set_requires_grad(true);
            let bias = numbers(&[WIDTH], factor).set_requires_grad(true);
            [weight, bias, numbers(&[WIDTH], 2.0 * factor)]
        };
        Self { weights: (0..stages).map(of).collect() }
    }

    pub fn of_stage(&self, stage: usize) -> impl Iterator<Item = &Tensor> {
        self.weights[stage].iter()
    }

    pub fn stage(&self, stage: usize) -> Box<dyn Stage> {
        let weights = self.weights[stage].each_ref().map(Tensor::shallow_clone);
        flow_pipeline::stage_fn(move |inputs| Ok(layer(inputs, &weights)))
    }

    pub fn forward(&self, x: &Tensor) -> Vec<Tensor> {
        let first = vec![x.shallow_clone()];
        self.weights.iter().fold(first, |inputs, weights| layer(&inputs, weights))
    }

    pub fn loss(outputs: &[Tensor], y: &Tensor) -> Tensor {
        (&outputs[0] - y).square().mean(Kind::Double)
    }

    pub fn batch(step: i64, rows: i64) -> (Tensor, Tensor) {
        (numbers(&[rows, WIDTH], 0.7 + step as f64), numbers(&[rows, WIDTH], 0.9 + step as f64))
    }

    /// Some steps of gradient descent; `step` leaves the gradients.
    pub fn train<T>(&self, mut step: impl FnMut(Tensor, Tensor) -> T, rows: i64) -> Vec<T> {
        let trainable = || self.weights.iter().flatten().filter(|weight| weight.requires_grad());
        let mut results = Vec::new();
        for number in 0..STEPS {
            for mut weight in trainable().map(Tensor::shallow_clone) {
                weight.zero_grad();
            }
            let (x, y) = Self::batch(number, rows);
            results.push(step(x, y));
            for mut weight in trainable().map(Tensor::shallow_clone) {
                let gradient = weight.grad();
                if gradient.defined() {
                    let _ = tch::no_grad(|| weight.g_sub_(&(gradient * 0.1)));
                }
            }
        }
        results
    }

    /// In one process, by parts of the batch.
    pub fn trained_alone(stages: usize, rows: i64, parts: usize) -> Trained {
        let model = Self::new(stages);
        let losses = model.train(
            |x, y| {
                let parts = parts as i64;
                let pairs = x.tensor_split(parts, 0).into_iter().zip(y.tensor_split(parts, 0));
                let loss = |(x, y): (Tensor, Tensor)| {
                    let share = x.size()[0] as f64 / rows as f64;
                    let loss = Self::loss(&model.forward(&x), &y) * share;
                    loss.backward();
                    loss.detach()
                };
                pairs.map(loss).reduce(|sum, loss| sum + loss).unwrap()
            },
            rows,
        );
        Trained { model, losses }
    }
}

/// The second tensor is one that the first stage makes, and all others use.
fn layer(inputs: &[Tensor], [weight, bias, frozen]: &[Tensor; 3]) -> Vec<Tensor> {
    let x = inputs[0].matmul(&weight.tr()) + bias;
    match inputs.get(1) {
        None => vec![x.tanh(), frozen.expand_as(&x).contiguous()],
        Some(other) => vec![(x * (other + 1.0)).tanh(), other.shallow_clone()],
    }
}

/// To rounding.
pub fn close(one: &Tensor, other: &Tensor) {
    assert_eq!(one.size(), other.size());
    let worst = (one - other).abs().max().double_value(&[]);
    assert!(worst < 1e-13, "{worst}");
}
