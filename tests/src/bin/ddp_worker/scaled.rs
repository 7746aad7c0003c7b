//! Scaled losses, of which all ranks skip the same steps, and those that nothing can unscale.

use anyhow::{Result, ensure};
use flow_comm::ProcessGroup;
use flow_ddp::{
    Ddp, GradScaler, JoinOptions, MixedPrecision, ScaledOptimizer, ZeroRedundancyOptimizer, join,
};
use tch::nn::{self, ModuleT, Optimizer, OptimizerConfig, Sgd, VarStore};
use tch::{Kind, Tensor};

use crate::helpers::{error, same_everywhere, says};
use crate::mixed_precision::{LARGE, Net, WIDTH};
use crate::models::{Vectors, device, store};
use crate::optimizers::{Config, configs, same_bits};

const HALF: MixedPrecision = MixedPrecision { param: Some(Kind::Half), reduce: None, buffer: None };

/// With a scaler, gradients that half precision does not have train, and all ranks leave out the step
/// that overflows on one.
pub fn trained(group: &ProcessGroup) -> Result<()> {
    let store = store();
    let net = Net::new(&store, &[WIDTH], &[0], None);
    let model = Ddp::builder(group).mixed_precision(HALF).wrap(net, &store)?;
    let mut optimizer = nn::Sgd::default().build(&store, 0.3)?;
    let input = Tensor::ones([2, WIDTH], (Kind::Float, device()));
    scaled_sum(&model, &input, 1e-9).f_backward()?;
    let lost = store.trainable_variables()[0].grad().abs().max().double_value(&[]);
    ensure!(lost == 0.0, "half precision has a gradient of {lost}");

    // The scales are torch's.
    let mut scaler = GradScaler::new(65536.0, 2.0, 0.5, 2);
    let scales = [65536.0, 131072.0, 65536.0, 65536.0, 131072.0];
    for (step, scale) in scales.into_iter().enumerate() {
        optimizer.zero_grad();
        let overflows = step == 2;
        let factor = if overflows && group.rank() == 0 { f64::INFINITY } else { 1e-3 };
        scaler.scale(&scaled_sum(&model, &input, factor)).f_backward()?;
        let is_taken = scaler.step(&mut optimizer)?;
        scaler.update()?;
        ensure!(is_taken != overflows, "step {step}: {is_taken}");
        ensure!(scaler.get_scale() == scale, "step {step}: {}", scaler.get_scale());
        let gradient = store.trainable_variables()[0].grad().abs().max().double_value(&[]);
        ensure!(overflows || gradient > 0.0, "step {step}: a gradient of {gradient}");
    }
    same_everywhere(group, &store)
}

fn scaled_sum(model: &Ddp<Net>, input: &Tensor, factor: f64) -> Tensor {
    (model.forward_t(input, true).to_kind(Kind::Float) * factor).sum(Kind::Float)
}

/// A model with tch's optimizer, and the same one with ZeRO.
struct Pair {
    plain: Ddp<Net>,
    optimizer: Optimizer,
    plain_store: VarStore,
    sharded: Ddp<Net>,
    zero: ZeroRedundancyOptimizer,
    zero_store: VarStore,
}

impl Pair {
    fn new(group: &ProcessGroup, lengths: &[i64], config: Config) -> Result<Self> {
        let [plain_store, zero_store] = [store(), store()];
        Ok(Self {
            plain: wrapped(group, &plain_store, lengths)?,
            optimizer: config.build(&plain_store, 0.1)?,
            sharded: wrapped(group, &zero_store, lengths)?,
            zero: ZeroRedundancyOptimizer::new(&zero_store, group, config, 0.1)?,
            plain_store,
            zero_store,
        })
    }
}

fn wrapped(group: &ProcessGroup, store: &VarStore, lengths: &[i64]) -> Result<Ddp<Net>> {
    let uses: Vec<usize> = (0..lengths.len()).collect();
    let net = Net::new(store, lengths, &uses, None);
    Ok(Ddp::builder(group).mixed_precision(HALF).wrap(net, store)?)
}

/// The loss of this rank in a step, times a factor.
fn loss(group: &ProcessGroup, model: &Ddp<Net>, step: u32, factor: f64) -> Result<Tensor> {
    let salt = f64::from(step) + 100.0 * group.rank() as f64;
    let input = (Tensor::arange(2 * WIDTH, (Kind::Float, device())) + salt).sin();
    let output = model.try_forward_t(&input.view([2, WIDTH]), true)?.to_kind(Kind::Float);
    Ok((output.square() * factor).sum(Kind::Float))
}

/// Runs backward and the step, if no gradient overflows. Returns whether it was taken.
fn step<O: ScaledOptimizer>(
    scaler: &mut GradScaler,
    optimizer: &mut O,
    loss: &Tensor,
) -> Result<bool>
where
    O::Error: Send + Sync + std::error::Error + 'static,
{
    scaler.scale(loss).f_backward()?;
    let is_taken = scaler.step(optimizer)?;
    scaler.update()?;
    Ok(is_taken)
}

/// The weights have the same bits as with tch's optimizer, where a loss of one rank alone overflows,
/// where gradients are clipped, and where ranks have no part of the parameters.
pub fn zero(group: &ProcessGroup) -> Result<()> {
    for lengths in [&[WIDTH][..], &[WIDTH, LARGE, 10, WIDTH]] {
        for config in configs() {
            let mut pair = Pair::new(group, lengths, config)?;
            let mut scalers = [0, 1].map(|_| GradScaler::new(1024.0, 2.0, 0.5, 3));
            for number in 0..8 {
                let overflows = number == 2 || number == 5;
                let is_culprit = number as usize % group.world_size() == group.rank();
                let factor = if overflows && is_culprit { f64::INFINITY } else { 1e-3 };
                let [plain, sharded] = &mut scalers;
                pair.optimizer.zero_grad();
                pair.zero.zero_grad()?;
                if number % 3 == 1 {
                    plain.scale(&loss(group, &pair.plain, number, factor)?).f_backward()?;
                    plain.unscale(&pair.optimizer)?;
                    pair.optimizer.clip_grad_norm(1e-4);
                    ensure!(plain.step(&mut pair.optimizer)?);
                    plain.update()?;
                    sharded.scale(&loss(group, &pair.sharded, number, factor)?).f_backward()?;
                    sharded.unscale(&pair.zero)?;
                    pair.zero.clip_grad_norm(1e-4)?;
                    ensure!(sharded.step(&mut pair.zero)?);
                    sharded.update()?;
                } else {
                    let own = loss(group, &pair.plain, number, factor)?;
                    let is_taken = step(plain, &mut pair.optimizer, &own)?;
                    ensure!(is_taken != overflows, "step {number}: {is_taken}");
                    let own = loss(group, &pair.sharded, number, factor)?;
                    let is_taken = step(sharded, &mut pair.zero, &own)?;
                    ensure!(is_taken != overflows, "step {number} of ZeRO: {is_taken}");
                }
                ensure!(plain == sharded, "{plain:?} is not {sharded:?}");
                same_bits(&pair.zero_store, &pair.plain_store)?;
            }
            same_everywhere(group, &pair.zero_store)?;
        }
    }
    Ok(())
}

/// Gradients of one rank alone overflow, without a `Ddp`: no rank takes the step.
pub fn zero_alone(group: &ProcessGroup) -> Result<()> {
    let own = store();
    let model = Vectors::new(&own, &[10, 10]);
    let mut zero = ZeroRedundancyOptimizer::new(&own, group, Sgd::default(), 0.5)?;
    let mut scaler = GradScaler::new(4.0, 2.0, 0.5, 2);
    for culprit in 0..group.world_size() {
        zero.zero_grad()?;
        let factor = if group.rank() == culprit { f64::NAN } else { 1.0 };
        let is_taken = step(&mut scaler, &mut zero, &model.weighted_sum(&[(0, factor), (1, 1.0)]))?;
        ensure!(!is_taken, "the step was taken, with an overflow on rank {culprit}");
    }
    zero.zero_grad()?;
    ensure!(step(&mut scaler, &mut zero, &model.weighted_sum(&[(0, 1.0), (1, 2.0)]))?);
    for (index, expected) in [(0, 0.5), (1, 0.0)] {
        let value = model.0[index].double_value(&[0]);
        ensure!(value == expected, "w{index} is {value}, not {expected}");
    }
    same_everywhere(group, &own)
}

/// Ranks that have ended take part, in steps that are taken and in one that overflows on the last rank.
pub fn zero_joined(group: &ProcessGroup) -> Result<()> {
    let mut pair = Pair::new(group, &[WIDTH, LARGE], Config::Sgd(Sgd::default()))?;
    let last = group.world_size() - 1;
    let mut factors = vec![1e-3; 2 + last];
    factors[last] = f64::INFINITY;
    let steps = 2 + group.rank();
    let mut scaler = GradScaler::new(1024.0, 2.0, 0.5, 3);
    let Pair { plain, optimizer, sharded, zero, .. } = &mut pair;
    plain.join(|| -> Result<()> {
        for (number, &factor) in factors[..steps].iter().enumerate() {
            optimizer.zero_grad();
            step(&mut scaler, optimizer, &loss(group, plain, number as u32, factor)?)?;
        }
        Ok(())
    })?;
    let mut zeros = GradScaler::new(1024.0, 2.0, 0.5, 3);
    let mut zero = &*zero;
    join(&[&*sharded, zero], JoinOptions::default(), || -> Result<()> {
        for (number, &factor) in factors[..steps].iter().enumerate() {
            zero.zero_grad()?;
            let own = loss(group, sharded, number as u32, factor)?;
            let is_taken = step(&mut zeros, &mut zero, &own)?;
            ensure!(is_taken == (number != last), "step {number}: {is_taken}");
        }
        Ok(())
    })?;
    ensure!(scaler == zeros, "{scaler:?} is not {zeros:?}");
    same_bits(&pair.zero_store, &pair.plain_store)
}

fn says_in_a_line(text: String, words: &[&str]) -> Result<()> {
    ensure!(text.lines().count() == 1, "{text}");
    says(&text, words)
}

/// Gradients that are not there any more, or not on all ranks, are an error of all ranks, which says
/// what would be right, and steps nothing.
pub fn misused(group: &ProcessGroup) -> Result<()> {
    let last = group.world_size() - 1;
    let own = store();
    let builder = Ddp::builder(group).optimizer_in_backward(Sgd::default(), 0.5);
    let model = builder.wrap(Vectors::new(&own, &[10]), &own)?;
    let mut beside = nn::Sgd::default().build(&own, 0.5)?;
    let mut scaler = GradScaler::default();
    scaler.scale(&model.weighted_sum(&[(0, 1e-6)])).f_backward()?;
    let words = ["no variable of the optimizer has a gradient", "without optimizer_in_backward"];
    says_in_a_line(error(scaler.step(&mut beside))?, &words)?;
    says_in_a_line(error(scaler.update())?, &["without a step", "bf16 with it, without a scaler"])?;

    let own = store();
    let net = Vectors::new(&own, &[10]);
    let mut zero = ZeroRedundancyOptimizer::new(&own, group, Sgd::default(), 0.5)?;
    let model = Ddp::builder(group).hook_with_zero_step(&zero).wrap(net, &own)?;
    scaler.scale(&model.weighted_sum(&[(0, 1e-6)])).f_backward()?;
    let words = ["a Ddp steps it in backward", "scaled loss", "without hook_with_zero_step"];
    says_in_a_line(error(scaler.unscale(&zero))?, &words)?;
    says_in_a_line(error(scaler.step(&mut zero))?, &words)?;
    let net = model.into_inner();

    // It goes on after each error.
    let before = net.0[0].double_value(&[0]);
    says_in_a_line(error(scaler.step(&mut zero))?, &["has a gradient: call step(&mut optimizer)"])?;
    scaler.scale(&net.weighted_sum(&[(0, 1.0)])).f_backward()?;
    if group.rank() == last {
        zero.zero_grad()?;
    }
    let text = error(scaler.step(&mut zero))?;
    let words = [&format!("the ranks [{last}] have no gradients"), "run the same backward"];
    says_in_a_line(text, &words)?;
    ensure!(net.0[0].double_value(&[0]) == before, "a step was taken");
    zero.zero_grad()?;
    ensure!(step(&mut scaler, &mut zero, &net.weighted_sum(&[(0, 1.0)]))?);
    let after = net.0[0].double_value(&[0]);
    ensure!(after == before - 0.5, "{after} after {before}");

    // What one rank cannot divide is an error of all, at once.
    let kind = if group.rank() == last { Kind::Half } else { Kind::Float };
    let ones = Tensor::ones([10], (kind, device()));
    flow_autograd::set_grad(&net.0[0], None)?;
    net.0[0].shallow_clone().set_data(&ones);
    flow_autograd::set_grad(&net.0[0], Some(&ones))?;
    let words = ["a gradient is in f16", "keep variables in f32"];
    says_in_a_line(error(scaler.step(&mut zero))?, &words)?;
    says_in_a_line(error(scaler.step(&mut zero))?, &words)
}
