//! `GradScaler` on one process. `global/tests/it/grad_scaler.rs` has PyTorch's numbers.

use flow_ddp::GradScaler;
use tch::nn::{self, OptimizerConfig};
use tch::{Device, Kind, Tensor};

fn parameter() -> (nn::VarStore, Tensor) {
    let vs = nn::VarStore::new(Device::Cpu);
    let parameter = vs.root().ones("p", &[3]);
    (vs, parameter)
}

fn assert_close(actual: &Tensor, expected: [f32; 3]) {
    let difference = (actual - Tensor::from_slice(&expected)).abs().max().double_value(&[]);
    assert!(difference < 1e-5, "{actual} instead of {expected:?}");
}

#[test]
fn clipping_comes_between_unscale_and_step() {
    let (vs, parameter) = parameter();
    let mut optimizer = nn::Sgd::default().build(&vs, 1.0).unwrap();
    let mut scaler = GradScaler::default();
    let loss = (&parameter * Tensor::from_slice(&[3f32, 0.0, 4.0])).sum(Kind::Float);
    scaler.scale(&loss).backward();
    scaler.unscale(&optimizer).unwrap();
    let error = scaler.unscale(&optimizer).unwrap_err().to_string();
    assert!(error.contains("unscaled already"), "{error}");
    assert_close(&parameter.grad(), [3.0, 0.0, 4.0]);
    optimizer.clip_grad_norm(1.0);
    assert!(scaler.step(&mut optimizer).unwrap());
    scaler.update().unwrap();
    assert_close(&parameter, [0.4, 1.0, 0.2]);
    // A checkpoint goes on with the same scale.
    let mut resumed = GradScaler::default();
    resumed.load_state(scaler.state());
    assert_eq!(resumed, scaler);
}

#[test]
fn gradients_in_f16_are_an_error() {
    let (mut vs, parameter) = parameter();
    vs.half();
    let optimizer = nn::Sgd::default().build(&vs, 1.0).unwrap();
    let scaled = GradScaler::new(2.0, 2.0, 0.5, 2);
    scaled.scale(&parameter.sum(Kind::Half)).backward();
    let error = scaled.clone().unscale(&optimizer).unwrap_err().to_string();
    assert!(error.contains("keep variables in f32"), "{error}");
}

/// Else a second optimizer, or the next iteration, would take a step with gradients that are too large.
#[test]
fn a_second_step_before_update_is_an_error() {
    let (vs, parameter) = parameter();
    let mut optimizer = nn::Sgd::default().build(&vs, 1.0).unwrap();
    let mut scaler = GradScaler::default();
    scaler.scale(&parameter.sum(Kind::Float)).backward();
    assert!(scaler.step(&mut optimizer).unwrap());
    let error = scaler.step(&mut optimizer).unwrap_err().to_string();
    assert!(error.contains("one GradScaler for each optimizer"), "{error}");
    assert_close(&parameter, [0.0; 3]);
    scaler.update().unwrap();
    optimizer.zero_grad();
    scaler.scale(&parameter.sum(Kind::Float)).backward();
    assert!(scaler.step(&mut optimizer).unwrap());
}

/// Whoever has applied the scaled gradients before leaves none, and nothing is stepped.
#[test]
fn a_step_without_gradients_is_an_error() {
    let (vs, parameter) = parameter();
    let mut optimizer = nn::Adam::default().build(&vs, 1.0).unwrap();
    let mut scaler = GradScaler::default();
    for result in [scaler.unscale(&optimizer), scaler.step(&mut optimizer).map(drop)] {
        let error = result.unwrap_err().to_string();
        assert!(error.starts_with("GradScaler: no variable of the optimizer has a gradient: "));
        assert!(error.contains("without optimizer_in_backward and hook_with_zero_step"), "{error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }
    let error = scaler.update().unwrap_err().to_string();
    assert!(error.contains("update() was called without a step"), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
    assert_eq!(scaler, GradScaler::default());
    // It goes on.
    scaler.scale(&parameter.sum(Kind::Float)).backward();
    assert!(scaler.step(&mut optimizer).unwrap());
    scaler.update().unwrap();
    assert_close(&parameter, [0.0; 3]);
}

#[test]
fn sparse_gradients_are_unscaled() {
    let vs = nn::VarStore::new(Device::Cpu);
    let config = nn::EmbeddingConfig { sparse: true, ..Default::default() };
    let table = nn::embedding(vs.root(), 4, 3, config);
    let mut optimizer = nn::Sgd::default().build(&vs, 1.0).unwrap();
    let mut scaler = GradScaler::default();
    let before = table.ws.get(2).detach().copy();
    for (factor, is_taken) in [(f64::INFINITY, false), (0.5, true)] {
        optimizer.zero_grad();
        let words = nn::Module::forward(&table, &Tensor::from_slice(&[2i64]));
        scaler.scale(&(words * factor).sum(Kind::Float)).backward();
        assert_eq!(scaler.step(&mut optimizer).unwrap(), is_taken);
        scaler.update().unwrap();
    }
    assert_close(&(table.ws.get(2) - before), [-0.5; 3]);
}
