//! `FullyShard` in mixed precision, compared with modules that cast their parameters themselves.

use anyhow::{Context, Result, ensure};
use flow_comm::ProcessGroup;
use flow_ddp::{
    Error, FullyShard, FullySharded, MixedPrecision, ShardOptions, ZeroRedundancyOptimizer,
};
use tch::nn::{self, ModuleT, Path, Sgd, VarStore};
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
        is_frozen: draws.below(4) == 0,
        length: [0, 1, 5, 1000][draws.below(4) as usize],
        inner: has_inner.then(|| Box::new(draw_layer(draws, param, depth + 1))),
    }
}

/// How a model is sharded: its modules are in mixed precision, or cast their parameters themselves.
struct How<'a> {
    shard: &'a FullyShard,
    is_mixed: bool,
    reduce: Kind,
}

impl How<'_> {
    fn mixed_precision(&self, param: Option<Kind>) -> MixedPrecision {
        if !self.is_mixed {
            return MixedPrecision::default();
        }
        MixedPrecision { param, reduce: Some(self.reduce), buffer: None }
    }
}

#[derive(Debug)]
struct Linear {
    weight: Tensor,
    scale: Tensor,
    inner: Option<Box<dyn ModuleT>>,
    param: Kind,
    casts: bool,
    is_run_twice: bool,
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
        let mut x = x.to_kind(self.param);
        for _ in 0..1 + usize::from(self.is_run_twice) {
            x = (x.matmul(&weight) + scale.square().sum(self.param) / 1000).tanh();
        }
        match &self.inner {
            Some(inner) => &x + inner.forward_t(&x, train).to_kind(self.param),
            None => x,
        }
    }
}

fn module(path: &Path, layer: &Layer, how: &How) -> Box<dyn ModuleT> {
    if !layer.is_sharded {
        return Box::new(Linear::new(path, layer, how));
    }
    let mixed_precision = how.mixed_precision(layer.param);
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
    reduce: Kind,
    layers: Vec<Layer>,
    reshard_after_forward: bool,
    replicas: usize,
}

impl Trained {
    fn new(group: &ProcessGroup, model: &Model, is_mixed: bool) -> Result<Self> {
        let store = store();
        let mut builder = FullyShard::builder(group)
            .reshard_after_forward(model.reshard_after_forward)
            .replicas(model.replicas);
        if is_mixed {
            builder = builder.mixed_precision(MixedPrecision {
                param: model.outer,
                reduce: Some(model.reduce),
                buffer: None,
            });
        }
        let shard = builder.begin(&store)?;
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
/// modules themselves cast their parameters, if gradients are sent in single precision. If not, they are
/// close.
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
        reduce: [Kind::Float, Kind::Float, Kind::BFloat16][draws.below(3) as usize],
        layers: (0..1 + draws.below(3)).map(|_| draw_layer(&mut draws, outer, 0)).collect(),
        reshard_after_forward: draws.below(3) > 0,
        replicas: divisors[draws.below(divisors.len() as u64) as usize],
    };
    let micro_batches = draws.below(3);
    let mut models = [Trained::new(group, &model, true)?, Trained::new(group, &model, false)?];
    let is_exact = model.reduce == Kind::Float;
    let shift = group.rank() as f64;
    for step in 0..4 {
        let context = || format!("step {step} of {model:?}");
        let mut found = Vec::new();
        let mut values_of_weights = Vec::new();
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
                if is_exact || step == 0 {
                    values_of_step.push((format!("output {micro_batch}"), output.detach()));
                    values_of_step.push((format!("gradient {micro_batch}"), input.grad()));
                }
            }
            optimizer.step()?;
            let whole = model.with_full_parameters(|| {
                let values = values(store).into_iter();
                values.map(|(name, value)| (name, value.copy())).collect::<Vec<_>>()
            })?;
            values_of_weights.push(whole.into_iter().collect());
            found.push(values_of_step.into_iter().collect());
        }
        close(&found[0], &found[1], 0.0).with_context(context)?;
        let tolerance = if is_exact { 0.0 } else { 0.02 };
        close(&values_of_weights[0], &values_of_weights[1], tolerance).with_context(context)?;
    }
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
    let double = || vs.root().add("double", Tensor::ones([2], (Kind::Double, device())), true);
    says(&error(shard.module(double))?, &["double is Double", "leave param out"])?;
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
    let text = error(stale.sum(Kind::Float).f_backward().map_err(Error::from_backward))?;
    says(&text, &["modified by an inplace operation"])
}
