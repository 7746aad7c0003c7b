//! An optimizer whose state is split makes the weights that it makes alone.

#[path = "common/ranks.rs"]
mod common;

use common::{assert_close, ranks};
use flow_global::checkpoint::Checkpoints;
use flow_global::nn::{column_linear, row_linear};
use flow_global::{
    clip_grad_norm, distribute, distribute_tensor, GlobalTensor, Placement,
    ZeroRedundancyOptimizer, B, S,
};
use flow_tensor::ProcessGroup;
use tch::nn::{self, Module, OptimizerConfig, VarStore};
use tch::{Device, Kind, Reduction, Tensor};

const STEPS: usize = 3;
const MAX_NORM: f64 = 0.3;

/// Numbers that are the same on all ranks.
fn numbers(sizes: &[i64], seed: usize) -> Tensor {
    let index = Tensor::arange(sizes.iter().product::<i64>(), (Kind::Double, Device::Cpu));
    ((index * 12.9898 + seed as f64) * 78.233).sin().view(sizes)
}

fn store(kind: Kind) -> VarStore {
    let mut vs = VarStore::new(Device::Cpu);
    vs.set_kind(kind);
    vs
}

/// In the same order on all ranks.
fn variables(vs: &VarStore) -> Vec<(String, Tensor)> {
    let mut variables: Vec<_> = vs.variables().into_iter().collect();
    variables.sort_by(|(one, _), (other, _)| one.cmp(other));
    variables
}

/// Gives the variables values that all layouts share, and returns them by name, whole.
fn start(vs: &VarStore) {
    for (number, (_, mut variable)) in variables(vs).into_iter().enumerate() {
        let values = numbers(&variable.size(), number).to_kind(variable.kind());
        tch::no_grad(|| variable.copy_(&values));
    }
}

fn full(vs: &VarStore) -> Vec<Tensor> {
    let of = |(_, tensor): (String, Tensor)| tensor.detach().full().unwrap();
    variables(vs).into_iter().map(of).collect()
}

/// Two layers, and their loss for one half of a step's samples.
struct Model {
    vs: VarStore,
    layers: Box<dyn Fn(&Tensor) -> Tensor>,
    placement: Option<Placement>,
}

impl Model {
    fn plain() -> Self {
        let vs = store(Kind::Double);
        let (a, b) = (vs.root() / "a", vs.root() / "b");
        let (a, b) =
            (nn::linear(a, 6, 7, Default::default()), nn::linear(b, 7, 3, Default::default()));
        start(&vs);
        Self { vs, layers: Box::new(move |x| b.forward(&a.forward(x).tanh())), placement: None }
    }

    /// Data parallel on the first axis of the mesh, tensor parallel on the second.
    fn on(placement: &Placement, kind: Kind) -> Self {
        let vs = store(kind);
        let (a, b) = (vs.root() / "a", vs.root() / "b");
        let a = column_linear(a, 6, 7, placement, 1, Default::default()).unwrap();
        let b = row_linear(b, 7, 3, placement, 1, Default::default()).unwrap();
        start(&vs);
        let layers = Box::new(move |x: &Tensor| b.forward(&a.forward(x).tanh()));
        Self { vs, layers, placement: Some(placement.clone()) }
    }

    fn loss(&self, step: usize, half: usize) -> Tensor {
        let spread = |tensor: Tensor| match &self.placement {
            None => tensor,
            Some(placement) => {
                let kind = self.vs.root().kind();
                distribute_tensor(&tensor.to_kind(kind), placement, [S(0), B]).unwrap()
            }
        };
        let number = 10 * step + half;
        let x = spread(numbers(&[5, 6], number));
        let y = spread(numbers(&[5, 3], number + 5));
        (self.layers)(&x).mse_loss(&y, Reduction::Mean) / 2.0
    }

    /// Both halves, one after the other.
    fn backward(&self, step: usize) {
        (0..2).for_each(|half| self.loss(step, half).backward());
    }

    /// The weights after some steps of an optimizer that has all of its state.
    fn train(&self, config: impl OptimizerConfig) -> Vec<Tensor> {
        let mut optimizer = config.build(&self.vs, 0.05).unwrap();
        for step in 0..STEPS {
            optimizer.zero_grad();
            self.backward(step);
            clip_grad_norm(&self.vs.trainable_variables(), MAX_NORM, 2.0, true).unwrap();
            optimizer.step();
        }
        full(&self.vs)
    }

    fn train_sharded(
        &self,
        optimizer: &mut ZeroRedundancyOptimizer,
        steps: std::ops::Range<usize>,
    ) {
        for step in steps {
            self.backward(step);
            optimizer.clip_grad_norm(MAX_NORM).unwrap();
            optimizer.step().unwrap();
        }
    }
}

fn mesh(group: &ProcessGroup) -> Placement {
    Placement::new(group, [[0, 1], [2, 3]]).unwrap()
}

fn check(config: impl OptimizerConfig + Copy + Sync) {
    ranks(4, |group| {
        let expected = Model::plain().train(config);
        let placement = mesh(&group);
        let model = Model::on(&placement, Kind::Double);
        let mut optimizer = ZeroRedundancyOptimizer::new(&model.vs, 0, config, 0.05).unwrap();
        // A weight that columns split is split by its rows as well, and the other way round.
        let sbps: Vec<_> = variables(optimizer.shards())
            .into_iter()
            .map(|(_, shard)| shard.sbp().unwrap())
            .collect();
        assert_eq!(sbps, [[B, S(0)], [S(1), S(0)], [S(0), B], [S(0), S(1)]]);
        model.train_sharded(&mut optimizer, 0..STEPS);
        for (weights, expected) in full(&model.vs).iter().zip(&expected) {
            assert_close(weights, expected, 1e-12);
        }
    });
}

#[test]
fn weights_are_those_of_one_process() {
    check(nn::Adam::default());
    check(nn::AdamW::default());
    check(nn::sgd(0.9, 0.0, 0.1, true));
}

/// Two ranks add up two terms, once a step: there is one order only.
#[test]
fn weights_are_those_of_the_whole_state_bit_for_bit() {
    ranks(2, |group| {
        let placement = Placement::new(&group, [[0], [1]]).unwrap();
        let whole = Model::on(&placement, Kind::Double);
        let mut of_whole = nn::Adam::default().build(&whole.vs, 0.05).unwrap();
        let model = Model::on(&placement, Kind::Double);
        let mut optimizer =
            ZeroRedundancyOptimizer::new(&model.vs, 0, nn::Adam::default(), 0.05).unwrap();
        for step in 0..STEPS {
            of_whole.backward_step(&whole.loss(step, 0));
            model.loss(step, 0).backward();
            optimizer.step().unwrap();
        }
        for (weights, expected) in full(&model.vs).iter().zip(&full(&whole.vs)) {
            assert_eq!(weights, expected);
        }
    });
}

/// The state of four ranks goes on elsewhere, also with an optimizer that has all of it.
#[test]
fn a_checkpoint_fits_other_layouts() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let config = nn::Adam::default();
    ranks(4, |group| {
        let model = Model::on(&mesh(&group), Kind::Double);
        let mut optimizer = ZeroRedundancyOptimizer::new(&model.vs, 0, config, 0.05).unwrap();
        model.train_sharded(&mut optimizer, 0..STEPS - 1);
        let mut checkpoints = Checkpoints::open(folder, &group).unwrap();
        optimizer.save(&mut checkpoints, STEPS - 1, &()).unwrap();
    });
    ranks(2, |group| {
        let expected = Model::plain().train(config);
        let model = Model::on(&Placement::new(&group, [[1], [0]]).unwrap(), Kind::Double);
        let mut optimizer = ZeroRedundancyOptimizer::new(&model.vs, 0, config, 0.05).unwrap();
        let mut checkpoints = Checkpoints::open(folder, &group).unwrap();
        let checkpoint = checkpoints.latest::<()>().unwrap().unwrap();
        optimizer.resume(&checkpoint).unwrap();
        model.train_sharded(&mut optimizer, STEPS - 1..STEPS);
        for (weights, expected) in full(&model.vs).iter().zip(&expected) {
            assert_close(weights, expected, 1e-12);
        }
    });
    ranks(1, |group| {
        let expected = Model::plain().train(config);
        let model = Model::on(&Placement::new(&group, [[0]]).unwrap(), Kind::Double);
        let mut optimizer = config.build(&model.vs, 0.05).unwrap();
        let mut checkpoints = Checkpoints::open(folder, &group).unwrap();
        let checkpoint = checkpoints.latest::<()>().unwrap().unwrap();
        checkpoint.resume(&model.vs, Some(&mut optimizer)).unwrap();
        model.backward(STEPS - 1);
        clip_grad_norm(&model.vs.trainable_variables(), MAX_NORM, 2.0, true).unwrap();
        optimizer.step();
        for (weights, expected) in full(&model.vs).iter().zip(&expected) {
            assert_close(weights, expected, 1e-12);
        }
    });
}

/// Steps that are too small for bf16 add up in the shards.
#[test]
fn shards_of_half_precision_are_single() {
    ranks(2, |group| {
        let placement = Placement::new(&group, [[0], [1]]).unwrap();
        let model = Model::on(&placement, Kind::BFloat16);
        let mut optimizer =
            ZeroRedundancyOptimizer::new(&model.vs, 0, nn::sgd(0.0, 0.0, 0.0, false), 0.05)
                .unwrap();
        let before = full(optimizer.shards());
        optimizer.optimizer().set_lr(1e-4);
        model.train_sharded(&mut optimizer, 0..STEPS);
        for (name, shard) in variables(optimizer.shards()) {
            assert_eq!(shard.kind(), Kind::Float, "{name}");
        }
        for ((after, before), rounded) in
            full(optimizer.shards()).iter().zip(&before).zip(full(&model.vs))
        {
            assert_ne!(after, before);
            assert_eq!(after.to_kind(Kind::BFloat16), rounded);
        }
    });
}

#[test]
fn what_does_not_fit_is_an_error() {
    ranks(1, |group| {
        let vs = store(Kind::Float);
        let _layer = nn::linear(vs.root(), 2, 2, Default::default());
        let new = |axis| ZeroRedundancyOptimizer::new(&vs, axis, nn::Adam::default(), 0.1);
        assert!(new(0).is_err());
        distribute(&vs, &Placement::all(&group).unwrap(), |_, _| [B]).unwrap();
        let error = new(1).err().unwrap().to_string();
        assert!(error.contains("the placement [0] of a variable has no axis 1"), "{error}");
        assert!(new(0).is_ok());
    });
}
