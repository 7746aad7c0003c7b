//! `FullyShard`, compared with a `Ddp` and tch's optimizer.

use anyhow::{Context, Result, ensure};
use flow_autograd::{OptimizerState, recompute};
use flow_comm::ProcessGroup;
use flow_ddp::{
    Checkpoints, Ddp, DistributedSampler, Error, FullyShard, FullySharded, GradScaler,
    ZeroRedundancyOptimizer,
};
use tch::nn::{self, Adam, ModuleT, OptimizerConfig, Path, Sgd, VarStore};
use tch::{Kind, Tensor};

use crate::helpers::{Draws, close, error, own_group, random_models, says, values};
use crate::models::{device, store};
use crate::optimizers::{Config, configs, drop_gradients};

/// What a layer has.
#[derive(Debug, Clone)]
struct Layer {
    input: i64,
    output: i64,
    has_bias: bool,
    has_frozen: bool,
    has_unused: bool,
    is_sharded: bool,
    is_run_twice: bool,
    is_recomputed: bool,
    inner: Option<Box<Layer>>,
}

fn draw_layer(draws: &mut Draws, input: i64, output: i64, depth: u64) -> Layer {
    let has_inner = depth < 2 && draws.below(3) == 0;
    Layer {
        input,
        output,
        has_bias: draws.below(2) == 0,
        has_frozen: draws.below(4) == 0,
        has_unused: draws.below(4) == 0,
        is_sharded: draws.below(4) > 0,
        is_run_twice: input == output && draws.below(2) == 0,
        is_recomputed: draws.below(3) == 0,
        inner: has_inner.then(|| Box::new(draw_layer(draws, output, output, depth + 1))),
    }
}

#[derive(Debug)]
struct Linear {
    affine: Affine,
    inner: Option<Box<dyn ModuleT>>,
    is_run_twice: bool,
    /// Backward computes what it needs anew, in the sharded model only: a `Ddp` would not find the parameters.
    is_recomputed: bool,
}

#[derive(Debug)]
struct Affine {
    weight: Tensor,
    bias: Option<Tensor>,
    frozen: Option<Tensor>,
}

impl Affine {
    fn run(&self, x: &Tensor) -> Tensor {
        let mut y = x.matmul(&self.weight);
        if let Some(bias) = &self.bias {
            y += bias;
        }
        if let Some(frozen) = &self.frozen {
            y *= frozen;
        }
        y.tanh()
    }

    fn recomputed(&self, x: &Tensor) -> Tensor {
        let own = Self {
            weight: self.weight.shallow_clone(),
            bias: self.bias.as_ref().map(Tensor::shallow_clone),
            frozen: self.frozen.as_ref().map(Tensor::shallow_clone),
        };
        let outputs = recompute(&[x], move |inputs| Ok(vec![own.run(&inputs[0])]));
        outputs.expect("nothing changes the input").swap_remove(0)
    }
}

impl Linear {
    fn new(path: &Path, layer: &Layer, kind: Kind, shard: Option<&FullyShard>) -> Self {
        // Other values on each rank: rank 0's are taken.
        let new = |name: &str, size: &[i64]| {
            let scale = 0.5 / (layer.input.max(1) as f64).sqrt();
            path.add(name, Tensor::randn(size, (kind, device())) * scale, true)
        };
        let weight = new("weight", &[layer.input, layer.output]);
        let bias = layer.has_bias.then(|| new("bias", &[layer.output]));
        let frozen = layer.has_frozen.then(|| new("frozen", &[layer.output]));
        let frozen = frozen.map(|frozen| frozen.set_requires_grad(false));
        if layer.has_unused {
            let _ = new("unused", &[3]);
        }
        let inner = layer.inner.as_ref().map(|inner| module(&(path / "inner"), inner, kind, shard));
        Self {
            affine: Affine { weight, bias, frozen },
            inner,
            is_run_twice: layer.is_run_twice,
            is_recomputed: layer.is_recomputed && shard.is_some(),
        }
    }

    fn run(&self, x: &Tensor, train: bool) -> Tensor {
        let y = if self.is_recomputed { self.affine.recomputed(x) } else { self.affine.run(x) };
        match &self.inner {
            Some(inner) => &y + inner.forward_t(&y, train),
            None => y,
        }
    }
}

impl ModuleT for Linear {
    fn forward_t(&self, x: &Tensor, train: bool) -> Tensor {
        let y = self.run(x, train);
        if self.is_run_twice { self.run(&y, train) } else { y }
    }
}

/// Makes a layer, which is sharded by `shard` if it is to be.
fn module(path: &Path, layer: &Layer, kind: Kind, shard: Option<&FullyShard>) -> Box<dyn ModuleT> {
    let make = || Linear::new(path, layer, kind, shard);
    match shard.filter(|_| layer.is_sharded) {
        Some(shard) => Box::new(shard.module(make).expect("ranks make the same modules")),
        None => Box::new(make()),
    }
}

/// Layers one after the other, some of which run twice, and a parameter of no layer.
#[derive(Debug)]
struct Net {
    scale: Option<Tensor>,
    layers: Vec<(Box<dyn ModuleT>, usize)>,
}

impl Net {
    fn new(vs: &VarStore, model: &Model, shard: Option<&FullyShard>) -> Self {
        let root = vs.root();
        let ones = Tensor::ones([model.input], (model.kind, device()));
        let scale = model.has_scale.then(|| root.add("scale", ones, true));
        let mut layers = Vec::new();
        for (number, (layer, runs)) in model.layers.iter().enumerate() {
            let path = root.set_group(number % 2) / format!("layer{number}");
            layers.push((module(&path, layer, model.kind, shard), *runs));
        }
        Self { scale, layers }
    }
}

impl ModuleT for Net {
    fn forward_t(&self, input: &Tensor, train: bool) -> Tensor {
        let mut x = match &self.scale {
            Some(scale) => input * scale,
            None => input.shallow_clone(),
        };
        for (layer, runs) in &self.layers {
            for _ in 0..*runs {
                x = layer.forward_t(&x, train);
            }
        }
        x
    }
}

#[derive(Debug)]
struct Model {
    kind: Kind,
    input: i64,
    has_scale: bool,
    layers: Vec<(Layer, usize)>,
}

fn draw_model(draws: &mut Draws, config: Config) -> Model {
    // Others divide by the gradient, which may be noise.
    let is_sgd = matches!(config, Config::Sgd(_));
    let kind = if is_sgd && draws.below(2) == 0 { Kind::Float } else { Kind::Double };
    let input = [1, 5, 64][draws.below(3) as usize];
    let mut width = input;
    let mut layers = Vec::new();
    for _ in 0..1 + draws.below(5) {
        let output = [1, 7, 64, 129, 0, width][draws.below(6) as usize];
        let layer = draw_layer(draws, width, output, 0);
        let runs = if output == width { 1 + draws.below(2) as usize } else { 1 };
        width = output;
        layers.push((layer, runs));
    }
    Model { kind, input, has_scale: draws.below(2) == 0, layers }
}

struct Pair {
    plain: Ddp<Net>,
    optimizer: tch::nn::Optimizer,
    plain_store: VarStore,
    sharded: FullySharded<Net>,
    zero: ZeroRedundancyOptimizer,
    sharded_store: VarStore,
}

impl Pair {
    fn new(group: &ProcessGroup, model: &Model, config: Config, draws: &mut Draws) -> Result<Self> {
        let sharded_store = store();
        let ranks = group.world_size();
        let divisors: Vec<usize> = (1..=ranks).filter(|&one| ranks.is_multiple_of(one)).collect();
        let shard = FullyShard::builder(group)
            .replicas(divisors[draws.below(divisors.len() as u64) as usize])
            .reshard_after_forward(draws.below(3) > 0)
            .prefetch(draws.below(3) as usize)
            .begin(&sharded_store)?;
        let net = Net::new(&sharded_store, model, Some(&shard));
        let sharded = shard.wrap(net)?;
        let plain_store = store();
        let net = Net::new(&plain_store, model, None);
        sharded.with_full_parameters(|| {
            let plain = plain_store.variables();
            for (name, value) in sharded_store.variables() {
                plain[&name].shallow_clone().copy_(&value);
            }
        })?;
        let plain = Ddp::builder(group).find_unused_parameters(true).wrap(net, &plain_store)?;
        let optimizer = config.build(&plain_store, 0.05)?;
        let zero = sharded.optimizer(config, 0.05)?;
        Ok(Self { plain, optimizer, plain_store, sharded, zero, sharded_store })
    }

    /// Trains both with the same input, and compares the weights.
    fn step(&mut self, input: &Tensor, tolerance: f64) -> Result<()> {
        self.optimizer.backward_step(&self.plain.forward_t(input, true).square().sum(input.kind()));
        let output = self.sharded.forward_t(input, true);
        self.zero.backward_step(&output.square().sum(input.kind()))?;
        self.compare(tolerance)
    }

    /// The weights of both are close.
    fn compare(&self, tolerance: f64) -> Result<()> {
        let actual = self.sharded.with_full_parameters(|| {
            let values = values(&self.sharded_store).into_iter();
            values.map(|(name, value)| (name, value.copy())).collect()
        })?;
        close(&actual, &values(&self.plain_store), tolerance)
    }
}

/// Random models and options: the weights are those of a `Ddp`, and so is the optimizer's state.
pub fn random(group: &ProcessGroup) -> Result<()> {
    random_models(group, 24, trained)
}

fn trained(group: &ProcessGroup, seed: u64) -> Result<()> {
    let mut draws = Draws(seed);
    tch::manual_seed((seed * 100) as i64 + group.rank() as i64);
    let config = configs()[draws.below(6) as usize];
    let model = draw_model(&mut draws, config);
    let is_double = model.kind == Kind::Double;
    let tolerance = if is_double { 1e-9 } else { 1e-4 };
    let micro_batches = draws.below(3);
    let max_norm = (draws.below(3) == 0).then_some(0.1);
    let mut pair = Pair::new(group, &model, config, &mut draws)?;
    let context = |step| format!("step {step} of {config:?}, {model:?}");
    for step in 0..6 {
        drop_gradients(&pair.plain_store)?;
        pair.zero.zero_grad()?;
        for micro_batch in 0..=micro_batches {
            let rows = [4, 1][draws.below(2) as usize];
            let input = Tensor::randn([rows, model.input], (model.kind, device()));
            let input = input.set_requires_grad(draws.below(2) == 0);
            let losses = [&pair.plain as &dyn ModuleT, &pair.sharded].map(|net| {
                let loss = net.forward_t(&input, true).square().sum(model.kind);
                loss + input.sum(model.kind)
            });
            ensure!(
                close_values(&losses[1], &losses[0], tolerance),
                "{} {losses:?}",
                context(step)
            );
            let mut of_input = Vec::new();
            for (loss, is_sharded) in losses.iter().zip([false, true]) {
                if micro_batch < micro_batches {
                    let _plain = pair.plain.no_sync();
                    let _sharded = pair.sharded.no_sync();
                    loss.f_backward().map_err(Error::from_backward)?;
                } else {
                    loss.f_backward()
                        .map_err(Error::from_backward)
                        .with_context(|| format!("{is_sharded} {}", context(step)))?;
                }
                if input.requires_grad() {
                    of_input.push(input.grad().copy());
                    flow_autograd::set_grad(&input, None)?;
                }
            }
            if let [plain, sharded] = &of_input[..] {
                let is_close = close_values(sharded, plain, tolerance);
                ensure!(is_close, "of the input, {}: {sharded} and {plain}", context(step));
            }
        }
        if let Some(max) = max_norm {
            pair.optimizer.clip_grad_norm(max);
            pair.zero.clip_grad_norm(max)?;
        }
        let learning_rate = 0.05 / f64::from(1 + step);
        pair.optimizer.set_lr(learning_rate);
        pair.zero.set_lr(learning_rate)?;
        pair.optimizer.step();
        pair.zero.step()?;
        pair.compare(tolerance).with_context(|| context(step))?;
    }
    let input = Tensor::randn([2, model.input], (model.kind, device()));
    let outputs = [&pair.plain as &dyn ModuleT, &pair.sharded]
        .map(|net| tch::no_grad(|| net.forward_t(&input, false)));
    ensure!(close_values(&outputs[1], &outputs[0], tolerance), "{outputs:?}");
    let to = (seed as usize) % group.world_size();
    pair.zero.consolidate_state_dict(to)?;
    if group.rank() == to {
        let state = |state: flow_autograd::StateDict| state.tensors.into_iter().collect();
        let expected = state(pair.optimizer.state()?);
        close(&state(pair.zero.state()?), &expected, 10.0 * tolerance)
            .with_context(|| format!("state of {config:?}, {model:?}"))?;
    }
    Ok(())
}

/// Compares two tensors to the largest element.
fn close_values(actual: &Tensor, expected: &Tensor, tolerance: f64) -> bool {
    if expected.numel() == 0 {
        return actual.size() == expected.size();
    }
    let difference = (actual - expected).abs().max().double_value(&[]);
    difference <= tolerance * expected.abs().max().double_value(&[]).max(1e-2)
}

/// A training goes on from a checkpoint, in a `FullySharded` of any number of ranks and in a `Ddp`, and the
/// other way round.
pub fn resumed(group: &ProcessGroup) -> Result<()> {
    let mut pid = [i64::from(std::process::id())];
    group.broadcast(&mut pid, 0)?;
    let folder = std::env::temp_dir().join(format!("flow-fully-shard-{}", pid[0]));
    let fewer = group.new_group(&(0..group.world_size() - 1).collect::<Vec<_>>())?;
    let alone = own_group(group)?;
    for (number, config) in configs().into_iter().enumerate() {
        tch::manual_seed(number as i64);
        let mut draws = Draws(number as u64);
        let model = draw_model(&mut draws, Config::Adam(Adam::default()));
        let inputs: Vec<Tensor> =
            (0..4).map(|_| Tensor::randn([3, model.input], (model.kind, device()))).collect();
        let mut pair = Pair::new(group, &model, config, &mut draws)?;
        for input in &inputs[..2] {
            pair.step(input, 1e-9)?;
        }
        let sampler = DistributedSampler::new(10, group);
        let folder = folder.join(number.to_string());
        let mut checkpoints = Checkpoints::open(&folder, group)?;
        if number % 2 == 0 {
            checkpoints.save(1, &pair.sharded, &pair.sharded_store, &pair.zero, &sampler, &())?;
        } else {
            checkpoints.save(1, &pair.plain, &pair.plain_store, &pair.optimizer, &sampler, &())?;
        }
        drop(checkpoints);
        group.barrier()?;
        for part in [Some(group), fewer.as_ref(), Some(&alone).filter(|_| group.rank() == 0)] {
            if let Some(part) = part {
                let mut resumed = Pair::new(part, &model, config, &mut Draws(draws.0))?;
                // What was gathered before is of no use.
                let before = resumed.sharded.forward_t(&inputs[0], true);
                let mut checkpoints = Checkpoints::open(&folder, part)?;
                let checkpoint = checkpoints.latest::<()>()?.context("it was saved")?;
                let mut sampler = DistributedSampler::new(10, part);
                checkpoint.resume(&resumed.sharded_store, &mut resumed.zero, &mut sampler)?;
                checkpoint.resume(&resumed.plain_store, &mut resumed.optimizer, &mut sampler)?;
                for input in &inputs[2..] {
                    resumed.step(input, 1e-9).with_context(|| format!("{config:?}, {model:?}"))?;
                }
                part.barrier()?;
                let stale = before.sum(model.kind).f_backward().map_err(Error::from_backward);
                says(&error(stale)?, &["modified by an inplace operation"])?;
            }
            group.barrier()?;
        }
    }
    group.barrier()?;
    if group.rank() == 0 {
        std::fs::remove_dir_all(&folder)?;
    }
    Ok(())
}

/// Gradients that were accumulated are reduced, also of a module that the last backward leaves out, and
/// where no other backward follows.
pub fn accumulated(group: &ProcessGroup) -> Result<()> {
    let model = Model {
        kind: Kind::Double,
        input: 5,
        has_scale: false,
        layers: (0..3).map(|_| (draw_layer(&mut Draws(1), 5, 5, 2), 1)).collect(),
    };
    let mut pair = Pair::new(group, &model, Config::Sgd(Sgd::default()), &mut Draws(0))?;
    let input = Tensor::randn([3, 5], (Kind::Double, device()));
    for follows in [true, false] {
        drop_gradients(&pair.plain_store)?;
        pair.zero.zero_grad()?;
        for (net, is_sharded) in [(&pair.plain as &dyn ModuleT, false), (&pair.sharded, true)] {
            let whole = net.forward_t(&input, true).square().sum(Kind::Double);
            if follows || is_sharded {
                let _plain = pair.plain.no_sync();
                let _sharded = pair.sharded.no_sync();
                whole.f_backward().map_err(Error::from_backward)?;
            } else {
                // A Ddp reduces in backward only.
                whole.f_backward().map_err(Error::from_backward)?;
            }
        }
        if follows {
            for net in [&*pair.plain, &*pair.sharded] {
                let part = net.layers[0].0.forward_t(&input, true).sum(Kind::Double);
                part.f_backward().map_err(Error::from_backward)?;
            }
        }
        pair.optimizer.step();
        pair.zero.step()?;
        pair.compare(1e-9).with_context(|| format!("follows: {follows}"))?;
    }
    let guard = pair.sharded.no_sync();
    pair.zero.zero_grad()?;
    pair.sharded
        .forward_t(&input, true)
        .sum(Kind::Double)
        .f_backward()
        .map_err(Error::from_backward)?;
    group.barrier()?;
    says(&error(pair.zero.step())?, &["under no_sync", "drop its guard"])?;
    drop(guard);
    Ok(())
}

/// A scaler steps where some ranks have no elements of the parameters.
pub fn scaled(group: &ProcessGroup) -> Result<()> {
    let vs = store();
    let shard = FullyShard::new(&vs, group)?;
    let layer = shard.module(|| nn::linear(vs.root(), 2, 1, Default::default()))?;
    let model = shard.wrap(layer)?;
    let mut optimizer = model.optimizer(Sgd::default(), 0.1)?;
    let mut scaler = GradScaler::new(1024.0, 2.0, 0.5, 3);
    let input = Tensor::ones([1, 2], (Kind::Float, device()));
    let bias = || model.with_full_parameters(|| vs.variables()["bias"].double_value(&[0]));
    let mut expected = bias()?;
    for step in 0..4usize {
        let overflows = step == 2;
        let is_culprit = group.rank() == step % group.world_size();
        let factor = if overflows && is_culprit { f64::INFINITY } else { 1.0 };
        optimizer.zero_grad()?;
        let loss = (model.forward_t(&input, true) * factor).sum(Kind::Float);
        scaler.scale(&loss).f_backward().map_err(Error::from_backward)?;
        let is_taken = scaler.step(&mut optimizer)?;
        scaler.update()?;
        ensure!(is_taken != overflows, "step {step}");
        if is_taken {
            expected -= 0.1;
        }
        let actual = bias()?;
        ensure!((actual - expected).abs() < 1e-5, "step {step}: {actual}, not {expected}");
    }
    Ok(())
}
