//! `FullyShard` in mixed precision, compared with modules that cast their parameters themselves.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use flow_autograd::recompute;
use flow_comm::ProcessGroup;
use flow_ddp::{
    Checkpoints, DistributedSampler, Error, FullyShard, FullySharded, GradScaler, MixedPrecision,
    ShardOptions, ShardedModule, ZeroRedundancyOptimizer,
};
use tch::nn::{self, Adam, ModuleT, Path, Sgd, VarStore};
use tch::{Kind, Tensor};

use crate::helpers::{Draws, close, error, random_models, says, values};
use crate::models::{device, store};

const WIDTH: i64 = 6;

/// What a layer has. `param`: the type that it computes in, if that is not Float. A layer that is not
/// sharded by itself is part of the module around it.
#[derive(Debug, Clone)]
struct Layer {
    param: Option<Kind>,
    is_sharded: bool,
    is_run_twice: bool,
    is_recomputed: bool,
    is_frozen: bool,
    length: i64,
    inner: Option<Box<Layer>>,
}

fn draw_kind(draws: &mut Draws) -> Option<Kind> {
    [None, Some(Kind::BFloat16), Some(Kind::Half)][draws.below(3) as usize]
}

fn draw_layer(draws: &mut Draws, outer: Option<Kind>, depth: u64) -> Layer {
    let is_sharded = draws.below(3) > 0;
    let param = if is_sharded { draw_kind(draws) } else { outer };
    let has_inner = depth < 2 && draws.below(2) == 0;
    Layer {
        param,
        is_sharded,
        is_run_twice: draws.below(3) == 0,
        is_recomputed: draws.below(3) == 0,
        is_frozen: draws.below(4) == 0,
        length: [0, 1, 5, 1000][draws.below(4) as usize],
        inner: has_inner.then(|| Box::new(draw_layer(draws, param, depth + 1))),
    }
}

/// How a model is sharded: its modules are in mixed precision, or cast their parameters themselves.
struct How<'a> {
    shard: &'a FullyShard,
    is_mixed: bool,
    reduce: Option<Kind>,
}

/// Returns the types of a module. One that casts its parameters sends gradients in the same type.
fn mixed_precision(is_mixed: bool, param: Option<Kind>, reduce: Option<Kind>) -> MixedPrecision {
    if is_mixed {
        return MixedPrecision { param, reduce, buffer: None };
    }
    MixedPrecision { param: None, reduce: reduce.or(param), buffer: None }
}

#[derive(Debug)]
struct Linear {
    weight: Tensor,
    scale: Tensor,
    inner: Option<Box<dyn ModuleT>>,
    param: Kind,
    casts: bool,
    is_run_twice: bool,
    /// Backward computes what it needs anew, where the parameters are not cast here.
    is_recomputed: bool,
}

impl Linear {
    fn new(path: &Path, layer: &Layer, how: &How) -> Self {
        let start = (Tensor::arange(WIDTH * WIDTH, (Kind::Float, device())) * 0.37).sin() / 2;
        let weight = path.add("weight", start.view([WIDTH, WIDTH]), true);
        let start = (Tensor::arange(layer.length, (Kind::Float, device())) * 0.71).cos();
        let scale = path.add("scale", start, true);
        let scale = if layer.is_frozen { scale.set_requires_grad(false) } else { scale };
        Self {
            weight,
            scale,
            inner: layer.inner.as_ref().map(|inner| module(&(path / "inner"), inner, how)),
            param: layer.param.unwrap_or(Kind::Float),
            casts: !how.is_mixed,
            is_run_twice: layer.is_run_twice,
            is_recomputed: layer.is_recomputed && how.is_mixed,
        }
    }

    fn cast(&self, tensor: &Tensor) -> Tensor {
        if self.casts { tensor.to_kind(self.param) } else { tensor.shallow_clone() }
    }
}

impl ModuleT for Linear {
    fn forward_t(&self, x: &Tensor, train: bool) -> Tensor {
        let weight = self.cast(&self.weight);
        let scale = self.cast(&self.scale);
        let x = x.to_kind(self.param);
        let runs = 1 + usize::from(self.is_run_twice);
        let x = if self.is_recomputed {
            let run = move |inputs: &[Tensor]| Ok(vec![compute(&inputs[0], &weight, &scale, runs)]);
            recompute(&[&x], run).expect("nothing changes the input").swap_remove(0)
        } else {
            compute(&x, &weight, &scale, runs)
        };
        match &self.inner {
            Some(inner) => &x + inner.forward_t(&x, train).to_kind(self.param),
            None => x,
        }
    }
}

fn compute(x: &Tensor, weight: &Tensor, scale: &Tensor, runs: usize) -> Tensor {
    let mut x = x.shallow_clone();
    for _ in 0..runs {
        x = (x.matmul(weight) + scale.square().sum(x.kind()) / 1000).tanh();
    }
    x
}

fn module(path: &Path, layer: &Layer, how: &How) -> Box<dyn ModuleT> {
    if !layer.is_sharded {
        return Box::new(Linear::new(path, layer, how));
    }
    let mixed_precision = mixed_precision(how.is_mixed, layer.param, how.reduce);
    let options = ShardOptions { mixed_precision, ..how.shard.options() };
    let module = how.shard.module_with(options, || Linear::new(path, layer, how));
    Box::new(module.expect("ranks make the same modules"))
}

/// Layers one after the other, and the type of the input.
#[derive(Debug)]
struct Net(Vec<Box<dyn ModuleT>>, Kind);

impl ModuleT for Net {
    fn forward_t(&self, input: &Tensor, train: bool) -> Tensor {
        self.0.iter().fold(input.to_kind(self.1), |x, layer| layer.forward_t(&x, train))
    }
}

struct Trained {
    store: VarStore,
    model: FullySharded<Net>,
    optimizer: ZeroRedundancyOptimizer,
}

/// A model, and how it is sharded.
#[derive(Debug)]
struct Model {
    outer: Option<Kind>,
    reduce: Option<Kind>,
    layers: Vec<Layer>,
    reshard_after_forward: bool,
    replicas: usize,
}

impl Trained {
    fn new(group: &ProcessGroup, model: &Model, is_mixed: bool) -> Result<Self> {
        let store = store();
        let shard = FullyShard::builder(group)
            .reshard_after_forward(model.reshard_after_forward)
            .replicas(model.replicas)
            .mixed_precision(mixed_precision(is_mixed, model.outer, model.reduce))
            .begin(&store)?;
        let how = How { shard: &shard, is_mixed, reduce: model.reduce };
        let mut layers = Vec::new();
        for (number, layer) in model.layers.iter().enumerate() {
            layers.push(module(&(store.root() / number), layer, &how));
        }
        // Parameters of no module make the model itself one.
        let has_others = model.layers.iter().any(|layer| !layer.is_sharded);
        let input = model.outer.filter(|_| has_others).unwrap_or(Kind::Float);
        let model = shard.wrap(Net(layers, input))?;
        let optimizer = model.optimizer(Sgd { momentum: 0.9, ..Default::default() }, 0.05)?;
        Ok(Self { store, model, optimizer })
    }
}

/// Random models and options: outputs, gradients of inputs and weights have the same bits as where the
/// modules themselves cast their parameters, and gradients are sent in the same type.
pub fn random(group: &ProcessGroup) -> Result<()> {
    random_models(group, 16, trained)
}

fn trained(group: &ProcessGroup, seed: u64) -> Result<()> {
    let mut draws = Draws(seed);
    let outer = draw_kind(&mut draws);
    let ranks = group.world_size();
    let divisors: Vec<usize> = (1..=ranks).filter(|&one| ranks.is_multiple_of(one)).collect();
    let model = Model {
        outer,
        reduce: [Some(Kind::Float), Some(Kind::Float), Some(Kind::BFloat16), None]
            [draws.below(4) as usize],
        layers: (0..1 + draws.below(3)).map(|_| draw_layer(&mut draws, outer, 0)).collect(),
        reshard_after_forward: draws.below(3) > 0,
        replicas: divisors[draws.below(divisors.len() as u64) as usize],
    };
    let micro_batches = draws.below(3);
    let mut models = [Trained::new(group, &model, true)?, Trained::new(group, &model, false)?];
    let shift = group.rank() as f64;
    for step in 0..4 {
        let mut found = Vec::new();
        for Trained { store, model, optimizer } in &mut models {
            optimizer.zero_grad()?;
            let mut values_of_step = Vec::new();
            for micro_batch in 0..=micro_batches {
                let numbers = Tensor::arange(3 * WIDTH, (Kind::Float, device()));
                let numbers = (numbers * 0.3 + step as f64 + micro_batch as f64 + shift).sin();
                let input = numbers.view([3, WIDTH]).set_requires_grad(true);
                let output = model.try_forward_t(&input, true)?;
                let _unsynchronized = (micro_batch < micro_batches).then(|| model.no_sync());
                let loss = output.to_kind(Kind::Float).square().sum(Kind::Float);
                loss.f_backward().map_err(Error::from_backward)?;
                values_of_step.push((format!("output {micro_batch}"), output.detach()));
                values_of_step.push((format!("gradient {micro_batch}"), input.grad()));
            }
            optimizer.step()?;
            let whole = model.with_full_parameters(|| {
                let values = values(store).into_iter();
                values.map(|(name, value)| (name, value.copy())).collect::<Vec<_>>()
            })?;
            values_of_step.extend(whole);
            found.push(values_of_step.into_iter().collect());
        }
        close(&found[0], &found[1], 0.0).with_context(|| format!("step {step} of {model:?}"))?;
    }
    Ok(())
}

/// A `Linear` in half precision, whose gradients come as they are.
fn half(
    group: &ProcessGroup,
    kind: Kind,
) -> Result<(VarStore, FullySharded<ShardedModule<nn::Linear>>)> {
    let vs = store();
    let is_even = group.world_size().is_multiple_of(2);
    let mixed = MixedPrecision { param: Some(kind), ..Default::default() };
    let builder = FullyShard::builder(group).replicas(if is_even { 2 } else { 1 });
    let shard = builder.mixed_precision(mixed).begin(&vs)?;
    let module = shard.module(|| nn::linear(vs.root(), 40, 1, Default::default()))?;
    Ok((vs, shard.wrap(module)?))
}

fn weights(
    vs: &VarStore,
    model: &FullySharded<ShardedModule<nn::Linear>>,
) -> Result<BTreeMap<String, Tensor>> {
    Ok(model.with_full_parameters(|| {
        let values = values(vs).into_iter();
        values.map(|(name, value)| (name, value.copy())).collect()
    })?)
}

fn backward(output: &Tensor) -> flow_ddp::Result<()> {
    output.sum(Kind::Float).f_backward().map_err(Error::from_backward)
}

/// Gradients of many backwards are added up in single precision: in half precision 256 + 1 is 256.
pub fn accumulated(group: &ProcessGroup) -> Result<()> {
    let (vs, model) = half(group, Kind::BFloat16)?;
    let optimizer = model.optimizer(Sgd::default(), 0.001)?;
    let before = weights(&vs, &model)?;
    let input = Tensor::ones([1, 40], (Kind::Float, device()));
    for backwards in (0..1000).rev() {
        let _unsynchronized = (backwards > 0).then(|| model.no_sync());
        backward(&model.try_forward_t(&input, true)?)?;
    }
    optimizer.step()?;
    let expected = before.into_iter().map(|(name, value)| (name, value - 1.0)).collect();
    close(&weights(&vs, &model)?, &expected, 1e-5)
}

/// A module that uses a parameter of the module around it, as that has it.
#[derive(Debug)]
struct Inner {
    own: Tensor,
    of_outer: Tensor,
}

impl ModuleT for Inner {
    fn forward_t(&self, x: &Tensor, _train: bool) -> Tensor {
        x * &self.of_outer * &self.own
    }
}

/// A parameter is used in its module and in one within: operations of both take it in half precision.
pub fn shared(group: &ProcessGroup) -> Result<()> {
    for param in [None, Some(Kind::BFloat16)] {
        let vs = store();
        let mixed = MixedPrecision { param, ..Default::default() };
        let shard = FullyShard::builder(group).mixed_precision(mixed).begin(&vs)?;
        let root = vs.root();
        let module = shard.module(|| {
            let weight = root.var("weight", &[1], nn::Init::Const(2.0));
            let of_outer = weight.shallow_clone();
            let inner = shard
                .module(|| Inner { own: root.var("own", &[1], nn::Init::Const(3.0)), of_outer });
            let inner = inner.expect("ranks make the same modules");
            nn::func_t(move |x, train| {
                let product = x * &weight;
                inner.forward_t(&product, train)
            })
        })?;
        let model = shard.wrap(module)?;
        let optimizer = model.optimizer(Sgd::default(), 1.0)?;
        let input = Tensor::ones([1], (Kind::Float, device()));
        let output = model.forward_t(&input, true);
        let kind = param.unwrap_or(Kind::Float);
        ensure!(output.kind() == kind && output.double_value(&[0]) == 12.0, "{param:?}: {output}");
        optimizer.backward_step(&output.sum(Kind::Float))?;
        let weights = model.with_full_parameters(|| {
            ["weight", "own"].map(|name| vs.variables()[name].double_value(&[0]))
        })?;
        ensure!(weights == [2.0 - 12.0, 3.0 - 4.0], "{param:?}: {weights:?}");
    }
    Ok(())
}

/// Checkpoints, `write`, frozen parameters and a scaler: the parameters in half precision are always those
/// in single precision.
pub fn changed(group: &ProcessGroup) -> Result<()> {
    let (vs, model) = half(group, Kind::Half)?;
    let mut optimizer = model.optimizer(Adam::default(), 0.01)?;
    let input = Tensor::ones([1, 40], (Kind::Float, device()));
    let mut pid = [i64::from(std::process::id())];
    group.broadcast(&mut pid, 0)?;
    let folder = std::env::temp_dir().join(format!("flow-fully-shard-mixed-{}", pid[0]));
    let mut checkpoints = Checkpoints::open(&folder, group)?;
    let mut sampler = DistributedSampler::new(1, group);
    optimizer.backward_step(&model.forward_t(&input, true).sum(Kind::Float))?;
    checkpoints.async_save(1, &model, &vs, &optimizer, &sampler, &())?;
    optimizer.backward_step(&model.forward_t(&input, true).sum(Kind::Float))?;
    let expected = weights(&vs, &model)?;
    let checkpoint = checkpoints.latest::<()>()?.context("it was saved")?;
    checkpoint.resume(&vs, &mut optimizer, &mut sampler)?;
    optimizer.backward_step(&model.forward_t(&input, true).sum(Kind::Float))?;
    close(&weights(&vs, &model)?, &expected, 0.0)?;
    // A graph from before a checkpoint was loaded.
    let (other_vs, other) = half(group, Kind::Half)?;
    let mut other_optimizer = other.optimizer(Adam::default(), 0.01)?;
    let stale = other.forward_t(&input.shallow_clone().set_requires_grad(true), true);
    checkpoint.resume(&other_vs, &mut other_optimizer, &mut sampler)?;
    group.barrier()?;
    says(&error(backward(&stale))?, &["modified by an inplace operation"])?;
    drop(checkpoints);
    group.barrier()?;
    if group.rank() == 0 {
        std::fs::remove_dir_all(&folder)?;
    }

    // An overflow of half precision leaves the step out.
    let mut scaler = GradScaler::new(1024.0, 2.0, 0.5, 3);
    for (factor, is_finite) in [(1e30, false), (1.0, true)] {
        optimizer.zero_grad()?;
        let loss = model.forward_t(&input, true).to_kind(Kind::Float).sum(Kind::Float) * factor;
        backward(&scaler.scale(&loss))?;
        ensure!(scaler.step(&mut optimizer)? == is_finite, "of the factor {factor}");
        scaler.update()?;
    }

    // Frozen after it was made.
    let mut weight = vs.variables()["weight"].shallow_clone();
    let _ = weight.set_requires_grad(false);
    let before = weights(&vs, &model)?;
    optimizer.backward_step(&model.forward_t(&input, true).sum(Kind::Float))?;
    let after = weights(&vs, &model)?;
    ensure!(before["weight"] == after["weight"] && before["bias"] != after["bias"]);
    let _ = weight.set_requires_grad(true);

    model.write(|| weight.f_fill_(0.5).map(drop))?;
    let bias = weights(&vs, &model)?["bias"].double_value(&[0]);
    let output = tch::no_grad(|| model.forward_t(&input, false)).double_value(&[0, 0]);
    ensure!((output - 20.0 - bias).abs() < 0.05, "{output} with the bias {bias}");
    Ok(())
}

/// Types that do not fit, ranks that choose others, and a graph whose parameters have changed since.
pub fn misused(group: &ProcessGroup) -> Result<()> {
    let kind = Some(Kind::BFloat16);
    let bfloat16 = MixedPrecision { param: kind, reduce: None, buffer: kind };
    let vs = store();
    let builder = FullyShard::builder(group).replicas(group.world_size() + 1);
    says(&error(builder.begin(&vs))?, &["replicas of the model", "choose a divisor"])?;
    if group.world_size() > 1 {
        let own = MixedPrecision { reduce: Some(Kind::Half), ..Default::default() };
        let mixed = if group.rank() == 0 { own } else { MixedPrecision::default() };
        let builder = FullyShard::builder(group).mixed_precision(mixed);
        says(&error(builder.begin(&vs))?, &["FullyShard differs between ranks", "Half"])?;
    }
    let shard = FullyShard::builder(group).mixed_precision(bfloat16).begin(&vs)?;
    let double = Tensor::ones([2], (Kind::Double, device()));
    says(
        &error(shard.module(|| vs.root().add("double", double, true)))?,
        &["double is Double", "leave param out"],
    )?;
    let vs = store();
    let shard = FullyShard::builder(group).mixed_precision(bfloat16).begin(&vs)?;
    let layer = shard.module(|| nn::linear(vs.root(), 2, 2, Default::default()))?;
    let buffer = vs.root().zeros_no_train("buffer", &[1]);
    let model = shard.wrap(layer)?;
    ensure!(buffer.kind() == Kind::BFloat16, "{buffer:?}");
    let optimizer = model.optimizer(Sgd::default(), 0.1)?;
    let input = Tensor::ones([1, 2], (Kind::Float, device())).set_requires_grad(true);
    let stale = model.forward_t(&input, true);
    ensure!(stale.kind() == Kind::BFloat16, "{stale:?}");
    optimizer.backward_step(&model.forward_t(&input, true).sum(Kind::Float))?;
    group.barrier()?;
    says(&error(backward(&stale))?, &["modified by an inplace operation"])?;

    let (vs, model) = half(group, Kind::BFloat16)?;
    let optimizer = model.optimizer(Sgd::default(), 0.1)?;
    model.with_full_parameters(|| {
        tch::with_grad(|| backward(&vs.variables()["weight"].square()))
    })??;
    says(&error(optimizer.step())?, &["outside of its module's backward"])?;
    let (_vs, model) = half(group, Kind::BFloat16)?;
    let inside = model.with_full_parameters(|| {
        group.barrier()?;
        let input = Tensor::ones([1, 40], (Kind::Float, device()));
        let module: &ShardedModule<nn::Linear> = &model;
        anyhow::Ok(module.try_forward_t(&input, false)?)
    });
    says(&error(inside?)?, &["cannot run in with_full_parameters"])?;

    let vs = store();
    let shard = FullyShard::builder(group).mixed_precision(bfloat16).begin(&vs)?;
    let module = shard.module(|| {
        let weight = vs.root().ones("weight", &[2]);
        nn::func(move |_| weight.shallow_clone())
    })?;
    says(&error(module.try_forward_t(&input, true))?, &["return a copy"])
}
