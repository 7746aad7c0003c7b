//! An optimizer whose state is split makes the weights that it makes alone.

use crate::common::ranks::{assert_close, ranks};
use flow_global::checkpoint::ShardedCheckpoints;
use flow_global::nn::{column_linear, row_linear};
use flow_global::{
    B, GlobalTensor, Placement, S, ShardedOptimizer, clip_grad_norm, distribute, distribute_tensor,
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

    fn train_sharded(&self, optimizer: &mut ShardedOptimizer, steps: std::ops::Range<usize>) {
        for step in steps {
            self.backward(step);
            optimizer.clip_grad_norm(MAX_NORM, true).unwrap();
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
        let mut optimizer = ShardedOptimizer::new(&model.vs, 0, config, 0.05).unwrap();
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
        let mut optimizer = ShardedOptimizer::new(&model.vs, 0, nn::Adam::default(), 0.05).unwrap();
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
        let mut optimizer = ShardedOptimizer::new(&model.vs, 0, config, 0.05).unwrap();
        model.train_sharded(&mut optimizer, 0..STEPS - 1);
        let mut checkpoints = ShardedCheckpoints::open(folder, &group).unwrap();
        optimizer.save(&mut checkpoints, STEPS - 1, &()).unwrap();
    });
    ranks(2, |group| {
        let expected = Model::plain().train(config);
        let model = Model::on(&Placement::new(&group, [[1], [0]]).unwrap(), Kind::Double);
        let mut optimizer = ShardedOptimizer::new(&model.vs, 0, config, 0.05).unwrap();
        let mut checkpoints = ShardedCheckpoints::open(folder, &group).unwrap();
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
        let mut checkpoints = ShardedCheckpoints::open(folder, &group).unwrap();
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
            ShardedOptimizer::new(&model.vs, 0, nn::sgd(0.0, 0.0, 0.0, false), 0.05).unwrap();
        let before = full(optimizer.shards());
        optimizer.set_lr(1e-4);
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

fn sgd(vs: &VarStore) -> ShardedOptimizer {
    ShardedOptimizer::new(vs, 0, nn::sgd(0.0, 0.0, 0.0, false), 0.05).unwrap()
}

/// As when weights are loaded after the optimizer is made.
#[test]
fn changes_of_parameters_stay() {
    ranks(2, |group| {
        for kind in [Kind::Double, Kind::BFloat16] {
            let model = Model::on(&Placement::new(&group, [[0], [1]]).unwrap(), kind);
            let mut optimizer = sgd(&model.vs);
            for (_, mut variable) in variables(&model.vs) {
                tch::no_grad(|| variable.copy_(&(&variable * 0.5 + 1.0)));
            }
            let expected = full(&model.vs);
            optimizer.set_lr(0.0);
            model.backward(0);
            optimizer.step().unwrap();
            assert_eq!(full(&model.vs), expected);
        }
    });
}

#[test]
fn gradients_that_are_not_finite_are_dropped() {
    ranks(2, |group| {
        let model = Model::on(&Placement::new(&group, [[0], [1]]).unwrap(), Kind::Double);
        let mut optimizer = sgd(&model.vs);
        let before = full(&model.vs);
        (model.loss(0, 0) * f64::INFINITY).backward();
        assert!(optimizer.clip_grad_norm(1.0, true).is_err());
        optimizer.step().unwrap();
        assert_eq!(full(&model.vs), before);
        model.backward(0);
        optimizer.zero_grad().unwrap();
        optimizer.step().unwrap();
        assert_eq!(full(&model.vs), before);
        model.backward(0);
        optimizer.clip_grad_norm(1.0, true).unwrap();
        optimizer.step().unwrap();
        assert_ne!(full(&model.vs), before);
    });
}

/// Also when the old one goes after the new one is made.
#[test]
fn an_optimizer_made_anew_defers_gradients() {
    ranks(2, |group| {
        let model = Model::on(&Placement::new(&group, [[0], [1]]).unwrap(), Kind::Double);
        let mut optimizer = sgd(&model.vs);
        let is_partial = || {
            let variables = variables(&model.vs);
            variables.iter().all(|(_, one)| one.grad().sbp().unwrap()[0].is_partial())
        };
        model.backward(0);
        assert!(is_partial());
        optimizer.zero_grad().unwrap();
        optimizer = sgd(&model.vs);
        model.backward(0);
        assert!(is_partial());
        drop(optimizer);
        model.vs.trainable_variables().iter_mut().for_each(Tensor::zero_grad);
    });
}

#[test]
fn a_parameter_of_two_names_is_trained() {
    ranks(2, |group| {
        let vs = store(Kind::Double);
        let placement = Placement::all(&group).unwrap();
        let ws = distribute_tensor(&numbers(&[4, 2], 1), &placement, [B]).unwrap();
        let ws = (vs.root() / "b").add("weight", ws, true);
        let _ = (vs.root() / "a").add("weight", ws.shallow_clone(), true);
        let mut optimizer = sgd(&vs);
        assert_eq!(optimizer.shards().trainable_variables().len(), 1);
        assert_eq!(variables(optimizer.shards())[0].1.sbp().unwrap(), [S(0)]);
        ws.sum(Kind::Double).backward();
        optimizer.step().unwrap();
        assert_close(&ws.detach().full().unwrap(), &(numbers(&[4, 2], 1) - 0.05), 1e-12);
    });
}

/// The dimension is the largest one, if all ranks have a part of that.
#[test]
fn no_rank_is_without_a_part_of_a_shard() {
    ranks(2, |group| {
        let vs = store(Kind::Double);
        let placement = Placement::all(&group).unwrap();
        for (name, sizes) in [("a", &[1, 4][..]), ("b", &[1]), ("c", &[2, 3]), ("d", &[3, 3])] {
            let ws = distribute_tensor(&numbers(sizes, 1), &placement, [B]).unwrap();
            let _ = vs.root().add(name, ws, true);
        }
        let sbps: Vec<_> = variables(sgd(&vs).shards())
            .into_iter()
            .map(|(_, shard)| shard.sbp().unwrap())
            .collect();
        assert_eq!(sbps, [[S(1)], [B], [S(1)], [S(0)]]);
    });
}

/// One is unused, one is frozen, on a placement without all ranks.
#[test]
fn what_is_not_trained_has_no_state_on_any_rank() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    ranks(2, |group| {
        let stages = [0, 1].map(|rank| Placement::new(&group, [rank]).unwrap());
        let vs = store(Kind::Double);
        let add = |name: &str, stage: usize| {
            let ws = distribute_tensor(&numbers(&[4], stage), &stages[stage], [B]).unwrap();
            vs.root().add(name, ws, true)
        };
        let used = [add("used0", 0), add("used1", 1)];
        let _unused = add("unused", 1);
        let _ = add("frozen", 0).set_requires_grad(false);
        let make = || ShardedOptimizer::new(&vs, 0, nn::Adam::default(), 0.1).unwrap();
        let step = |optimizer: &mut ShardedOptimizer| {
            used[group.rank()].square().sum(Kind::Double).backward();
            optimizer.clip_grad_norm(1.0, true).unwrap();
            optimizer.step().unwrap();
        };
        let mut optimizer = make();
        step(&mut optimizer);
        let mut checkpoints = ShardedCheckpoints::open(folder, &group).unwrap();
        optimizer.save(&mut checkpoints, 1, &()).unwrap();
        step(&mut optimizer);
        let expected = full(&vs);
        let mut optimizer = make();
        optimizer.resume(&checkpoints.latest::<()>().unwrap().unwrap()).unwrap();
        step(&mut optimizer);
        assert_eq!(full(&vs), expected);
    });
}

#[test]
fn what_does_not_fit_is_an_error() {
    ranks(1, |group| {
        let vs = store(Kind::Float);
        let _layer = nn::linear(vs.root(), 2, 2, Default::default());
        let new = |axis| ShardedOptimizer::new(&vs, axis, nn::Adam::default(), 0.1);
        assert!(new(0).is_err());
        distribute(&vs, &Placement::all(&group).unwrap(), |_, _| [B]).unwrap();
        let error = new(1).err().unwrap().to_string();
        assert!(error.contains("the placement [0] of a variable has no axis 1"), "{error}");
        assert!(new(0).is_ok());
    });
}
