//! Trains a network on global tensors, and compares with one process.

pub mod layouts;
mod networks;

use std::sync::OnceLock;

use flow_autograd::OptimizerState;
use flow_global::{B, GlobalTensor, Placement, distribute, distribute_tensor};
use flow_tensor::ProcessGroup;
use layouts::Layout;
use networks::Network;
use tch::nn::{self, OptimizerConfig};
use tch::{Device, Kind, Reduction, Tensor};

/// A network, its data, and how it is trained.
#[derive(Clone, Copy)]
pub struct Training {
    pub name: &'static str,
    network: fn(&nn::Path) -> Network,
    batch: fn() -> (Tensor, Tensor),
    loss: fn(&Tensor, &Tensor) -> Tensor,
    pub optimizer: Optimizer,
    steps: usize,
    /// What follows the convolutions is in single precision, as tch's MobileNetV2 is made so.
    has_single_head: bool,
    /// It draws random numbers: one rank's are compared with those of many.
    draws: bool,
}

#[derive(Clone, Copy, Debug)]
pub enum Optimizer {
    Sgd,
    ClippedSgd,
    Adam,
    AdamW,
    RmsProp,
}

impl Optimizer {
    pub const ALL: [Self; 5] =
        [Self::Sgd, Self::ClippedSgd, Self::Adam, Self::AdamW, Self::RmsProp];

    fn build(self, vs: &nn::VarStore) -> nn::Optimizer {
        // Not so small that rounding errors of gradients which should be zero count.
        let eps = 1e-4;
        let sgd = nn::Sgd { momentum: 0.9, wd: 1e-3, nesterov: true, ..Default::default() };
        let optimizer = match self {
            Self::Sgd | Self::ClippedSgd => sgd.build(vs, 0.05),
            Self::Adam => nn::Adam { amsgrad: true, eps, ..Default::default() }.build(vs, 0.01),
            Self::AdamW => nn::AdamW { eps, ..Default::default() }.build(vs, 0.01),
            Self::RmsProp => {
                let config =
                    nn::RmsProp { momentum: 0.9, centered: true, eps, ..Default::default() };
                config.build(vs, 0.01)
            }
        };
        optimizer.unwrap()
    }
}

/// The parameters after training, in the order of their names, and the losses on the way.
pub struct Trained {
    parameters: Vec<(String, Tensor)>,
    losses: Vec<f64>,
}

impl Training {
    pub fn mlp(optimizer: Optimizer) -> Self {
        Self {
            name: "MLP",
            network: networks::mlp,
            batch: || (numbers(&[10, 8], 1), numbers(&[10, 6], 2)),
            loss: |y, target| y.mse_loss(target, Reduction::Mean),
            optimizer,
            steps: 5,
            has_single_head: false,
            draws: false,
        }
    }

    pub fn uneven_mlp() -> Self {
        let batch = || (numbers(&[9, 7], 1), numbers(&[9, 5], 2));
        Self {
            name: "uneven MLP",
            network: networks::uneven_mlp,
            batch,
            ..Self::mlp(Optimizer::Adam)
        }
    }

    pub fn cnn() -> Self {
        Self {
            name: "CNN",
            network: networks::cnn,
            batch: || (numbers(&[9, 3, 8, 8], 1), labels(9, 10)),
            loss: |y, target| {
                y.cross_entropy_loss(target, None::<Tensor>, Reduction::Mean, -100, 0.0)
            },
            optimizer: Optimizer::AdamW,
            steps: 4,
            has_single_head: false,
            draws: false,
        }
    }

    pub fn cnn_with_dropout() -> Self {
        let network = networks::cnn_with_dropout;
        Self { name: "CNN with dropout", network, draws: true, ..Self::cnn() }
    }

    pub fn mobilenet() -> Self {
        Self {
            name: "MobileNetV2",
            network: networks::mobilenet,
            batch: || (numbers(&[6, 3, 32, 32], 1), labels(6, 10)),
            // Small steps: large ones magnify errors of single precision.
            optimizer: Optimizer::ClippedSgd,
            steps: 3,
            has_single_head: true,
            draws: true,
            ..Self::cnn()
        }
    }

    pub fn resnet() -> Self {
        Self {
            name: "ResNet-18",
            network: networks::resnet,
            has_single_head: false,
            draws: false,
            ..Self::mobilenet()
        }
    }

    pub fn gpt() -> Self {
        Self {
            name: "GPT",
            network: networks::gpt,
            batch: || {
                let (words, length) = (networks::WORDS, networks::LENGTH);
                (labels(5 * length, words).view([5, length]), labels(5 * length, words))
            },
            optimizer: Optimizer::Adam,
            ..Self::cnn()
        }
    }

    /// On plain tensors, or on one rank.
    pub fn reference(&self) -> Trained {
        if !self.draws {
            return self.train(|_| {}, |tensor| tensor.shallow_clone(), |_, _| {});
        }
        let group = ProcessGroup::in_process(1).unwrap().remove(0);
        let placement = Placement::new(&group, [0]).unwrap();
        let all = Layout { name: "one rank", data: vec![B], weight: Box::new(|_, _| vec![B]) };
        self.train_global(&placement, &all)
    }

    /// Trains in a layout, and compares.
    ///
    /// # Panics
    /// What differs.
    pub fn check(&self, placement: &Placement, layout: &Layout, reference: &Trained) {
        let found = self.train_global(placement, layout);
        let tolerance = if self.has_single_head { 1e-5 } else { 1e-9 };
        for (step, (found, expected)) in found.losses.iter().zip(&reference.losses).enumerate() {
            let error = (found - expected).abs() / (1.0 + expected.abs());
            assert!(error < tolerance, "loss {step} is {found}, not {expected}");
        }
        assert_eq!(found.parameters.len(), reference.parameters.len());
        for ((name, found), (_, expected)) in found.parameters.iter().zip(&reference.parameters) {
            let scale = 1.0 + expected.abs().max().double_value(&[]);
            let error = (found - expected).abs().max().double_value(&[]) / scale;
            assert!(error < tolerance, "{name} differs by {error:.1e}");
        }
    }

    fn train_global(&self, placement: &Placement, layout: &Layout) -> Trained {
        flow_global::manual_seed(placement, 5).unwrap();
        let sbp = |name: &str, tensor: &Tensor| (layout.weight)(name, tensor.dim());
        let distribute = |vs: &nn::VarStore| distribute(vs, placement, sbp).unwrap();
        let split = |tensor: &Tensor| distribute_tensor(tensor, placement, &layout.data).unwrap();
        self.train(distribute, split, |vs, optimizer| {
            // Training keeps the layout.
            let mut layouts = Vec::new();
            for (name, tensor) in sorted(vs) {
                let found = tensor.sbp().unwrap();
                assert_eq!(found, sbp(&name, &tensor), "{name} lies in another way");
                layouts.push((tensor.size(), found));
            }
            for (name, tensor) in optimizer.state().unwrap().tensors {
                if tensor.dim() > 0 {
                    let layout = (tensor.size(), tensor.sbp().unwrap());
                    assert!(layouts.contains(&layout), "{name} lies as {layout:?}");
                }
            }
        })
    }

    fn train(
        &self,
        distribute: impl Fn(&nn::VarStore),
        split: impl Fn(&Tensor) -> Tensor,
        check: impl Fn(&nn::VarStore, &nn::Optimizer),
    ) -> Trained {
        let vs = nn::VarStore::new(device());
        let network = (self.network)(&vs.root());
        initialize(&vs, self.has_single_head);
        distribute(&vs);
        let mut optimizer = self.optimizer.build(&vs);
        let (x, target) = (self.batch)();
        let (x, target) = (split(&x), split(&target));
        let step = |_| {
            let loss = (self.loss)(&network(&x), &target);
            match self.optimizer {
                Optimizer::ClippedSgd => optimizer.backward_step_clip_norm(&loss, 0.1),
                _ => optimizer.backward_step(&loss),
            }
            loss.double_value(&[])
        };
        let losses = (0..self.steps).map(step).collect();
        check(&vs, &optimizer);
        let full =
            |(name, tensor): (String, Tensor)| (name, tensor.full().unwrap().detach().copy());
        Trained { parameters: sorted(&vs).into_iter().map(full).collect(), losses }
    }
}

impl Clone for Trained {
    fn clone(&self) -> Self {
        let copy = |(name, tensor): &(String, Tensor)| (name.clone(), tensor.copy());
        Self { parameters: self.parameters.iter().map(copy).collect(), losses: self.losses.clone() }
    }
}

fn sorted(vs: &nn::VarStore) -> Vec<(String, Tensor)> {
    let mut variables: Vec<_> = vs.variables().into_iter().collect();
    variables.sort_by(|(one, _), (other, _)| one.cmp(other));
    variables
}

/// The same values in every thread and process, in double precision but for a head in single.
fn initialize(vs: &nn::VarStore, has_single_head: bool) {
    for (seed, (name, mut tensor)) in sorted(vs).into_iter().enumerate() {
        let value = match (tensor.dim(), name.rsplit('.').next()) {
            (_, Some("running_mean" | "running_var")) => tensor.shallow_clone(),
            // Scales of normalizations.
            (1, Some("weight")) => numbers(&tensor.size(), seed as i64) * 0.1 + 1.0,
            _ => {
                let inputs: i64 = tensor.size().iter().skip(1).product();
                numbers(&tensor.size(), seed as i64) / (inputs.max(4) as f64).sqrt()
            }
        };
        let is_single = has_single_head && name.starts_with("classifier");
        tensor.set_data(&value.to_kind(if is_single { Kind::Float } else { Kind::Double }));
    }
}

/// Numbers from -1 to 1 that look random.
fn numbers(sizes: &[i64], seed: i64) -> Tensor {
    let count = sizes.iter().product::<i64>();
    let at = Tensor::arange(count, (Kind::Double, device())) * 1.7 + (seed * seed) as f64 + 0.3;
    // The fraction of a large multiple of a sine.
    let sine = at.sin() * 43758.5453;
    ((&sine - sine.floor()) * 2.0 - 1.0).view(sizes)
}

fn labels(count: i64, classes: i64) -> Tensor {
    let values: Vec<i64> =
        (0..count).map(|index| (index * index + 3 * index + 1) % classes).collect();
    Tensor::from_slice(&values).to_device(device())
}

/// Where tensors are: on the CPU, if nobody sets it.
pub static DEVICE: OnceLock<Device> = OnceLock::new();

fn device() -> Device {
    *DEVICE.get().unwrap_or(&Device::Cpu)
}
