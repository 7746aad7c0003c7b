//! `GradScaler` on global tensors, with the numbers of `torch.amp.GradScaler`.

use crate::common::ranks::{assert_close, ranks};
use flow_global::{
    B, GlobalTensor, GradScaler, P, Placement, S, Sbp, ScaledOptimizer, ShardedOptimizer,
    distribute, distribute_tensor,
};
use tch::nn::{self, OptimizerConfig};
use tch::{Device, Kind, Tensor};

/// The factor of the first element's gradient, step by step; and the scale and the parameter
/// after each step, as torch 2.11 has them with `init_scale=8.0, growth_interval=2`.
const FACTORS: [f32; 8] = [1.0, 1.0, f32::INFINITY, 1.0, 1.0, 1.0, f32::NAN, 1.0];
const SCALES: [f64; 8] = [8.0, 16.0, 8.0, 8.0, 16.0, 16.0, 8.0, 8.0];
const PARAMETERS: [[f64; 2]; 8] = [
    [0.9, 0.8],
    [0.8, 0.6],
    [0.8, 0.6],
    [0.7, 0.4],
    [0.6, 0.2],
    [0.5, 0.0],
    [0.5, 0.0],
    [0.4, -0.2],
];

fn parameter() -> (nn::VarStore, Tensor) {
    let vs = nn::VarStore::new(Device::Cpu);
    let parameter = vs.root().ones("p", &[3]);
    (vs, parameter)
}

fn sgd(vs: &nn::VarStore) -> nn::Optimizer {
    nn::Sgd::default().build(vs, 0.1).unwrap()
}

fn sharded(vs: &nn::VarStore, learning_rate: f64) -> ShardedOptimizer {
    ShardedOptimizer::new(vs, 0, nn::Sgd::default(), learning_rate).unwrap()
}

/// Trains; `place` makes a tensor what the parameter is multiplied by.
fn train(
    parameter: &Tensor,
    mut optimizer: impl ScaledOptimizer<Error: std::fmt::Debug>,
    place: impl Fn(&Tensor) -> Tensor,
    mut after_step: impl FnMut(usize),
) {
    let mut scaler = GradScaler::new(8.0, 2.0, 0.5, 2);
    for (step, factor) in FACTORS.into_iter().enumerate() {
        parameter.shallow_clone().zero_grad();
        let loss = (parameter * place(&Tensor::from_slice(&[factor, 1.0, 2.0]))).sum(Kind::Float);
        scaler.scale(&loss).backward();
        assert_eq!(scaler.step(&mut optimizer).unwrap(), factor.is_finite());
        scaler.update().unwrap();
        assert_eq!(scaler.get_scale(), SCALES[step]);
        after_step(step);
    }
    assert_eq!(scaler.state(), (8.0, 1));
}

#[test]
fn a_plain_model_trains_as_in_torch() {
    let (vs, parameter) = parameter();
    train(&parameter, sgd(&vs), Tensor::shallow_clone, |step| {
        let [first, last] = PARAMETERS[step];
        let expected = Tensor::from_slice(&[first, first, last]);
        assert_close(&parameter.to_kind(Kind::Double), &expected, 1e-6);
    });
}

fn check(parameter: &Tensor, step: usize, tolerance: f64) {
    let [first, last] = PARAMETERS[step];
    let expected = Tensor::from_slice(&[first, first, last]);
    let full = parameter.detach().full().unwrap().to_kind(Kind::Double);
    assert_close(&full, &expected, tolerance);
}

/// Only one rank has the element that overflows; no rank takes the step. Also on two of three ranks.
#[test]
fn all_ranks_skip_the_step_that_overflows_on_one() {
    let train_on = |placement: &Placement, sbp: Sbp, of_data: Sbp| {
        let (vs, parameter) = parameter();
        distribute(&vs, placement, |_, _| [sbp]).unwrap();
        let place = |factor: &Tensor| distribute_tensor(factor, placement, [of_data]).unwrap();
        train(&parameter, sgd(&vs), place, |step| check(&parameter, step, 1e-6));
    };
    for (size, ranks_of) in [(2, vec![0, 1]), (3, vec![0, 1, 2]), (3, vec![2, 0])] {
        for sbp in [S(0), B] {
            for of_data in [S(0), B, P] {
                ranks(size, |group| {
                    let placement = Placement::new(&group, ranks_of.clone()).unwrap();
                    train_on(&placement, sbp, of_data);
                });
            }
        }
    }
}

/// Each rank looks at its shards, and drops the gradients of a step that is left out. In half
/// precision the parameter is rounded from the shards, whose numbers are torch's.
#[test]
fn an_optimizer_with_shards_skips_the_same_steps() {
    for (kind, tolerance) in [(Kind::Float, 1e-6), (Kind::Half, 1e-3), (Kind::BFloat16, 1e-2)] {
        ranks(2, |group| {
            let placement = Placement::all(&group).unwrap();
            let (mut vs, parameter) = parameter();
            vs.set_kind(kind);
            distribute(&vs, &placement, |_, _| [B]).unwrap();
            let place = |factor: &Tensor| {
                distribute_tensor(&factor.to_kind(kind), &placement, [S(0)]).unwrap()
            };
            let optimizer = sharded(&vs, 0.1);
            let shard = optimizer.shards().trainable_variables().swap_remove(0);
            assert_eq!((shard.kind(), shard.sbp().unwrap()), (Kind::Float, vec![S(0)]));
            train(&parameter, optimizer, place, |step| {
                check(&shard, step, 1e-6);
                check(&parameter, step, tolerance);
            });
        });
    }
}

/// A gradient of 1e-8, which f16 does not have, trains; the first steps overflow.
#[test]
fn f16_trains_with_shards_and_a_scaler_only() {
    ranks(2, |group| {
        let placement = Placement::all(&group).unwrap();
        let train = |init_scale: f64| {
            let (mut vs, parameter) = parameter();
            vs.half();
            distribute(&vs, &placement, |_, _| [B]).unwrap();
            let mut optimizer = sharded(&vs, 1e7);
            let mut scaler = GradScaler::new(init_scale, 2.0, 0.5, 2000);
            let data = Tensor::from_slice(&[0.5f32, 1.0, 2.0]).to_kind(Kind::Half);
            let data = distribute_tensor(&data, &placement, [S(0)]).unwrap();
            let mut taken = Vec::new();
            for _ in 0..4 {
                let loss = (&parameter * &data).sum(Kind::Float) * 1e-8;
                scaler.scale(&loss).backward();
                scaler.unscale(&optimizer).unwrap();
                optimizer.clip_grad_norm(1.0, false).unwrap();
                taken.push(scaler.step(&mut optimizer).unwrap());
                scaler.update().unwrap();
            }
            (taken, parameter.detach().full().unwrap().to_kind(Kind::Double))
        };
        let ones = Tensor::ones([3], (Kind::Double, Device::Cpu));
        let (taken, unscaled) = train(1.0);
        assert_eq!((taken, unscaled), (vec![true; 4], ones.shallow_clone()));
        // 2e-8 times this is more than f16 has, and a quarter of that is not.
        let (taken, scaled) = train(2f64.powi(43));
        assert_eq!(taken, [false, false, true, true]);
        let two_steps = 2.0 * 1e7 * 1e-8 * Tensor::from_slice(&[0.5, 1.0, 2.0]);
        assert_close(&scaled, &(ones - two_steps), 2e-3);
    });
}
