//! `FullyShard`, compared with a `Ddp` and tch's optimizer.

use anyhow::{Context, Result, ensure};
use flow_autograd::OptimizerState;
use flow_comm::ProcessGroup;
use flow_ddp::{Ddp, Error, FullyShard, FullySharded, ZeroRedundancyOptimizer};
use tch::nn::{ModuleT, OptimizerConfig, Path, VarStore};
use tch::{Kind, Tensor};

use crate::helpers::{Draws, close, random_models, values};
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
        inner: has_inner.then(|| Box::new(draw_layer(draws, output, output, depth + 1))),
    }
}

#[derive(Debug)]
struct Linear {
    weight: Tensor,
    bias: Option<Tensor>,
    frozen: Option<Tensor>,
    inner: Option<Box<dyn ModuleT>>,
    is_run_twice: bool,
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
        Self { weight, bias, frozen, inner, is_run_twice: layer.is_run_twice }
    }

    fn run(&self, x: &Tensor, train: bool) -> Tensor {
        let mut y = x.matmul(&self.weight);
        if let Some(bias) = &self.bias {
            y += bias;
        }
        if let Some(frozen) = &self.frozen {
            y *= frozen;
        }
        let y = y.tanh();
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
        let shard = FullyShard::builder(group)
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
