//! A model that is trained with parameters in common, and without.

use flow_global::nn::{column_linear, row_linear};
use flow_global::{
    B, GlobalTensor, Placement, S, ShardedOptimizer, distribute, distribute_tensor, no_sync,
};
use flow_tensor::ProcessGroup;
use tch::nn::{self, Module, OptimizerConfig, VarStore};
use tch::{Device, Kind, Reduction, Tensor};

pub const DP: usize = 0;
const TP: usize = 1;
pub const STEPS: usize = 4;

/// Numbers that are the same on all ranks.
fn numbers(sizes: &[i64], seed: usize, kind: Kind) -> Tensor {
    let index = Tensor::arange(sizes.iter().product::<i64>(), (Kind::Double, Device::Cpu));
    ((index * 12.9898 + seed as f64) * 78.233).sin().view(sizes).to_kind(kind)
}

/// In the same order on all ranks.
pub fn variables(vs: &VarStore) -> Vec<(String, Tensor)> {
    let mut variables: Vec<_> = vs.variables().into_iter().collect();
    variables.sort_by(|(one, _), (other, _)| one.cmp(other));
    variables
}

/// Layers that are split over the tensor parallel ranks, one that is not, and one that some steps do
/// without.
pub struct Model {
    pub vs: VarStore,
    placement: Placement,
    layers: Box<dyn Fn(&Tensor) -> Tensor>,
    sometimes: nn::Linear,
}

impl Model {
    pub fn new(placement: &Placement, kind: Kind) -> Self {
        let mut vs = VarStore::new(Device::Cpu);
        vs.set_kind(kind);
        let linear = nn::LinearConfig::default();
        let whole = nn::linear(vs.root() / "whole", 6, 6, linear);
        let sometimes = nn::linear(vs.root() / "sometimes", 6, 6, linear);
        distribute(&vs, placement, |_, _| [B, B]).unwrap();
        let a = column_linear(vs.root() / "a", 6, 7, placement, TP, linear).unwrap();
        let b = row_linear(vs.root() / "b", 7, 3, placement, TP, linear).unwrap();
        for (number, (_, mut variable)) in variables(&vs).into_iter().enumerate() {
            let values = numbers(&variable.size(), number, kind);
            tch::no_grad(|| variable.copy_(&values));
        }
        let layers =
            Box::new(move |x: &Tensor| b.forward(&a.forward(&whole.forward(x).tanh()).tanh()));
        Self { vs, placement: placement.clone(), layers, sometimes }
    }

    fn loss(&self, step: usize, part: usize) -> Tensor {
        let spread = |sizes: &[i64], seed| {
            let numbers = numbers(sizes, seed, self.vs.root().kind());
            distribute_tensor(&numbers, &self.placement, [S(0), B]).unwrap()
        };
        let number = 10 * step + part;
        let mut x = spread(&[8, 6], number);
        if step == 2 {
            x = self.sometimes.forward(&x);
        }
        (self.layers)(&x).mse_loss(&spread(&[8, 3], number + 5), Reduction::Mean)
    }

    /// One backward, or two whose gradients are reduced once.
    pub fn backward(&self, step: usize) {
        let once = no_sync(&self.placement).unwrap();
        for part in 0..1 + step % 2 {
            self.loss(step, part).backward();
        }
        once.finish().unwrap();
    }

    pub fn train(&self, optimizer: &mut ShardedOptimizer, steps: std::ops::Range<usize>) {
        for step in steps {
            optimizer.set_lr(0.1 / (1.0 + step as f64));
            self.backward(step);
            if step > 0 {
                optimizer.clip_grad_norm(0.3, true).unwrap();
            }
            optimizer.step().unwrap();
        }
    }

    /// All weights, whole.
    pub fn weights(&self) -> Vec<(String, Tensor)> {
        let mut weights = variables(&self.vs);
        weights.iter_mut().for_each(|(_, weight)| *weight = weight.detach().full().unwrap());
        weights
    }
}

/// Placements of dp x tp ranks.
fn layouts(group: &ProcessGroup) -> Vec<Placement> {
    let rows: [Vec<Vec<usize>>; 5] = [
        vec![vec![0, 1], vec![2, 3]],
        vec![vec![2], vec![0], vec![3], vec![1]],
        vec![vec![3, 1, 0, 2]],
        vec![vec![1, 0]],
        vec![vec![3], vec![0]],
    ];
    rows.into_iter().map(|rows| Placement::new(group, rows).unwrap()).collect()
}

/// Trains with parameters in common, and with those that each of the four ranks has.
pub fn same_bits(group: &ProcessGroup) {
    for placement in layouts(group) {
        for kind in [Kind::Double, Kind::Float, Kind::BFloat16] {
            compare(&placement, kind, nn::AdamW::default());
            compare(&placement, kind, nn::sgd(0.9, 0.0, 0.1, true));
        }
    }
}

fn compare(placement: &Placement, kind: Kind, config: impl OptimizerConfig + Copy) {
    let expected = Model::new(placement, kind);
    let mut own = ShardedOptimizer::new(&expected.vs, DP, config, 0.1).unwrap();
    let model = Model::new(placement, kind);
    let before = model.weights();
    let mut optimizer = ShardedOptimizer::fully_sharded(&model.vs, DP, config, 0.1).unwrap();
    assert_eq!(model.weights(), before);
    for step in 0..STEPS {
        expected.train(&mut own, step..step + 1);
        model.train(&mut optimizer, step..step + 1);
        let what = format!("{placement} {kind:?}, step {step}");
        assert_eq!(model.weights(), expected.weights(), "{what}");
    }
    assert_ne!(model.weights(), before);
}
