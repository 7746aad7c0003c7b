//! Communication hooks that send less than gradients have.

use anyhow::{Context, Result, ensure};
use flow_comm::{ProcessGroup, ReduceOp};
use flow_ddp::comm_hooks::{PowerSgd, Quantize, TopK};
use flow_ddp::{CommHook, Ddp, TensorCollectives, convert_sync_batchnorm};
use tch::nn::{self, VarStore};
use tch::{Kind, Tensor};

use crate::models::{device, store};

/// Parameters of all kinds of sizes.
const SIZES: [&[i64]; 8] =
    [&[64, 48], &[7], &[], &[0], &[3, 0], &[12, 5, 3, 3], &[1, 90], &[200, 40]];

struct Model {
    wrapped: Ddp<Vec<Tensor>>,
    _store: VarStore,
}

impl Model {
    fn new(group: &ProcessGroup, kind: Kind, view: bool, hook: impl CommHook) -> Result<Self> {
        let mut store = store();
        let names = SIZES.iter().enumerate();
        let weights: Vec<Tensor> =
            names.map(|(index, size)| store.root().ones(&format!("w{index}"), size)).collect();
        store.set_kind(kind);
        let builder = Ddp::builder(group).gradient_as_bucket_view(view).bucket_cap_mb(0.01);
        Ok(Self { wrapped: builder.comm_hook(hook).wrap(weights, &store)?, _store: store })
    }

    /// Runs a backward that gives each parameter this gradient. Returns what is reduced.
    fn backward(&self, gradients: &[Tensor]) -> Result<Vec<Tensor>> {
        let weights: &Vec<Tensor> = &self.wrapped;
        weights.iter().try_for_each(|weight| flow_autograd::set_grad(weight, None))?;
        let mut loss = Tensor::zeros([], (Kind::Double, device()));
        for (weight, gradient) in weights.iter().zip(gradients) {
            loss += (weight * gradient).sum(Kind::Double);
        }
        loss.f_backward()?;
        Ok(weights.iter().map(|weight| weight.grad().copy()).collect())
    }
}

/// This rank's gradients in a step.
fn gradients(kind: Kind) -> Vec<Tensor> {
    SIZES.iter().map(|size| Tensor::randn(*size, (Kind::Double, device())).to_kind(kind)).collect()
}

/// The exact means over all ranks.
fn means(group: &ProcessGroup, gradients: &[Tensor]) -> Result<Vec<Tensor>> {
    let mut means = Vec::new();
    for gradient in gradients {
        let mut mean = gradient.to_kind(Kind::Double);
        group.all_reduce_tensor(&mut mean, ReduceOp::Avg)?;
        means.push(mean);
    }
    Ok(means)
}

/// The largest absolute value.
fn largest(tensor: &Tensor) -> f64 {
    tensor.abs().max().double_value(&[])
}

/// The largest difference of `actual` and `expected`, over the largest of `expected`.
fn distance(actual: &Tensor, expected: &Tensor) -> f64 {
    if actual.numel() == 0 {
        return 0.0;
    }
    largest(&(actual.to_kind(Kind::Double) - expected)) / largest(expected).max(1e-3)
}

fn same_on_all(group: &ProcessGroup, tensors: &[Tensor]) -> Result<()> {
    for tensor in tensors.iter().filter(|tensor| tensor.numel() > 0) {
        let all = group.all_gather_tensor(tensor)?;
        for rank in 0..group.world_size() as i64 {
            ensure!(all.get(rank) == *tensor, "rank {rank} has another gradient");
        }
    }
    Ok(())
}

/// Trains three steps; each gradient must be as near to the mean as `tolerance` says for its index,
/// as a share of what is averaged: terms may cancel each other, and their rounding stays.
fn near_the_mean<H: CommHook>(
    group: &ProcessGroup,
    hook: impl Fn() -> H,
    tolerance: impl Fn(Kind, usize) -> f64,
) -> Result<()> {
    let kinds = [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half];
    for (kind, view) in kinds.into_iter().zip([false, true, false, true]) {
        let model = Model::new(group, kind, view, hook())?;
        for step in 0..3 {
            let own = gradients(kind);
            let reduced = model.backward(&own)?;
            same_on_all(group, &reduced)?;
            let expected = means(group, &own)?;
            let terms: Vec<Tensor> = own.iter().map(Tensor::abs).collect();
            let magnitudes = means(group, &terms)?;
            for (index, (reduced, expected)) in reduced.iter().zip(&expected).enumerate() {
                ensure!(reduced.kind() == kind && reduced.size() == expected.size());
                if expected.numel() == 0 {
                    continue;
                }
                let error = largest(&(reduced.to_kind(Kind::Double) - expected));
                let magnitude = largest(&magnitudes[index]);
                ensure!(
                    error <= tolerance(kind, index) * magnitude,
                    "{kind:?}, step {step}, w{index}: wrong by {error} of {magnitude}"
                );
            }
        }
    }
    Ok(())
}

fn rounding(kind: Kind) -> f64 {
    match kind {
        Kind::Double => 1e-12,
        Kind::Float => 1e-5,
        Kind::Half => 2e-3,
        _ => 2e-2,
    }
}

/// What is sent whole, or at full rank, is the mean. So is everything before the start.
pub fn exact(group: &ProcessGroup) -> Result<()> {
    near_the_mean(group, || PowerSgd::new(1), |kind, _| rounding(kind))?;
    let full = || PowerSgd::new(100).start_iter(1).min_compression_rate(0.0);
    near_the_mean(group, full, |kind, _| 20.0 * rounding(kind))?;
    let batched = || PowerSgd::new(200).start_iter(1).min_compression_rate(0.0).batched(true);
    near_the_mean(group, batched, |kind, _| 20.0 * rounding(kind))?;
    near_the_mean(group, || TopK::new(1.0), |kind, _| rounding(kind))?;
    // A small one is never compressed.
    let some = || PowerSgd::new(1).start_iter(0);
    let small =
        |kind, index| if [0, 5, 7].contains(&index) { f64::INFINITY } else { rounding(kind) };
    near_the_mean(group, some, small)
}

/// A byte is as near as half a step of the range. Ranges of one channel are at most those of all.
pub fn quantized(group: &ProcessGroup) -> Result<()> {
    // Normal numbers of all ranks lie within 12; the largest mean may be as small as 1e-3 of that.
    for hook in [Quantize::per_tensor(), Quantize::per_channel(1), Quantize::per_channel(100)] {
        for step in 0..3 {
            let model = Model::new(group, Kind::Double, step == 1, hook)?;
            let own = gradients(Kind::Double);
            let reduced = model.backward(&own)?;
            same_on_all(group, &reduced)?;
            for (reduced, expected) in reduced.iter().zip(means(group, &own)?) {
                if reduced.numel() > 0 {
                    let difference = (reduced - expected).abs().max().double_value(&[]);
                    ensure!(difference <= 12.0 / 255.0 / 2.0 + 1e-6, "wrong by {difference}");
                }
            }
        }
    }
    let constant = Model::new(group, Kind::Float, false, Quantize::per_channel(1))?;
    let own: Vec<Tensor> = gradients(Kind::Float).iter().map(|g| g.full_like(0.1)).collect();
    for reduced in constant.backward(&own)? {
        ensure!(distance(&reduced, &reduced.full_like(0.1).to_kind(Kind::Double)) < 1e-6);
    }
    Ok(())
}

/// What a step leaves out comes later: over many steps of one gradient, the sum of what is applied
/// falls short of the sum of means by no more than what is left out now, which stays bounded.
pub fn feedback(group: &ProcessGroup) -> Result<()> {
    feedback_of(group, "PowerSgd", || PowerSgd::new(1).start_iter(0))?;
    feedback_of(group, "PowerSgd, cold", || PowerSgd::new(1).start_iter(0).warm_start(false))?;
    feedback_of(group, "PowerSgd, batched", || PowerSgd::new(2).start_iter(0).batched(true))?;
    feedback_of(group, "TopK", || TopK::new(0.05))
}

fn feedback_of<H: CommHook>(group: &ProcessGroup, what: &str, hook: impl Fn() -> H) -> Result<()> {
    const STEPS: usize = 200;
    let model = Model::new(group, Kind::Double, false, hook())?;
    let own = gradients(Kind::Double);
    let means = means(group, &own)?;
    let mut sums: Vec<Tensor> = means.iter().map(Tensor::zeros_like).collect();
    for _ in 0..STEPS {
        for (sum, reduced) in sums.iter_mut().zip(model.backward(&own)?) {
            *sum += reduced;
        }
    }
    for (index, (sum, mean)) in sums.iter().zip(&means).enumerate() {
        let distance = distance(&(sum / STEPS as f64), mean);
        ensure!(distance < 0.3, "{what}: w{index} is wrong by {distance} after {STEPS} steps");
    }
    Ok(())
}

/// A gradient that overflows once is gone in the next step but one.
pub fn overflow(group: &ProcessGroup) -> Result<()> {
    let full = || PowerSgd::new(100).start_iter(0).min_compression_rate(0.0);
    overflow_of(group, full()).context("PowerSgd")?;
    overflow_of(group, full().batched(true)).context("PowerSgd, batched")?;
    overflow_of(group, TopK::new(0.5)).context("TopK")?;
    overflow_of(group, Quantize::per_tensor()).context("Quantize")
}

fn overflow_of(group: &ProcessGroup, hook: impl CommHook) -> Result<()> {
    let model = Model::new(group, Kind::Double, false, hook)?;
    let ones: Vec<Tensor> = gradients(Kind::Double).iter().map(Tensor::ones_like).collect();
    model.backward(&ones)?;
    let endless: Vec<Tensor> = ones.iter().map(|g| g.full_like(f64::INFINITY)).collect();
    let reduced = model.backward(&endless)?;
    let is_finite = |tensor: &Tensor| bool::try_from(tensor.isfinite().all());
    for tensor in reduced.iter().filter(|tensor| tensor.numel() > 0) {
        ensure!(!is_finite(tensor)?, "an overflow is lost");
    }
    for _ in 0..2 {
        for tensor in model.backward(&ones)? {
            ensure!(is_finite(&tensor)?, "an overflow comes again");
        }
    }
    Ok(())
}

/// What a step leaves out is not lost in steps in which no rank uses the parameter.
pub fn unused(group: &ProcessGroup) -> Result<()> {
    unused_of(group, TopK::new(0.06)).context("TopK")?;
    unused_of(group, PowerSgd::new(1).start_iter(0).min_compression_rate(0.0)).context("PowerSgd")
}

fn unused_of(group: &ProcessGroup, hook: impl CommHook) -> Result<()> {
    const USES: i32 = 4;
    let store = store();
    let weight = store.root().ones("weight", &[4, 4]);
    let other = store.root().ones("other", &[2]);
    let builder = Ddp::builder(group).find_unused_parameters(true).comm_hook(hook);
    let _model = builder.wrap((), &store)?;
    let gradient = Tensor::arange(16, (Kind::Float, device())).view([4, 4]) + 1.0;
    let mut sum = gradient.zeros_like();
    for step in 0..60 {
        flow_autograd::set_grad(&weight, None)?;
        let mut loss = other.sum(Kind::Float);
        if step >= 2 * USES {
            // What is left over comes now.
            loss += (&weight * 0.0).sum(Kind::Float);
        } else if step % 2 == 0 {
            loss += (&weight * &gradient).sum(Kind::Float);
        }
        loss.f_backward()?;
        if weight.grad().defined() {
            sum += weight.grad();
        }
    }
    let expected = &gradient * f64::from(USES);
    let distance = distance(&sum, &expected.to_kind(Kind::Double));
    ensure!(distance < 1e-3, "the sum is wrong by {distance}");
    Ok(())
}

/// Ranks use different parameters, and wait for each other in a layer's collective in the middle of
/// backward.
pub fn beside_batch_norm(group: &ProcessGroup) -> Result<()> {
    for is_static in [false, true] {
        beside_batch_norm_with(group, is_static, Quantize::per_tensor())?;
        beside_batch_norm_with(group, is_static, TopK::new(0.1))?;
        for batched in [false, true] {
            let power_sgd = PowerSgd::new(1).start_iter(0).batched(batched);
            beside_batch_norm_with(group, is_static, power_sgd)?;
        }
    }
    Ok(())
}

fn beside_batch_norm_with(
    group: &ProcessGroup,
    is_static: bool,
    hook: impl CommHook,
) -> Result<()> {
    let store = store();
    let norm = nn::batch_norm1d(store.root() / "norm", 3, Default::default());
    let own = store.root().ones("own", &[100, 300]);
    let first = store.root().ones("first", &[3]);
    convert_sync_batchnorm(&store, group)?;
    let builder = Ddp::builder(group).find_unused_parameters(!is_static).static_graph(is_static);
    let model = builder.bucket_cap_mb(0.01).comm_hook(hook).wrap(norm, &store)?;
    for _ in 0..3 {
        let x = Tensor::randn([4, 3], (Kind::Float, device())) * &first;
        let mut loss = model.try_forward_t(&x, true)?.square().sum(Kind::Float);
        if group.rank() == 0 {
            loss += own.sum(Kind::Float);
        }
        loss.f_backward()?;
    }
    Ok(())
}
