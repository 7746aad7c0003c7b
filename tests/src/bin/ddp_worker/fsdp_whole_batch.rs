//! Random models that an `Fsdp` trains as one process does that has the whole batch.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use flow_comm::ProcessGroup;
use flow_ddp::{Fsdp, GradScaler, ZeroRedundancyOptimizer};
use tch::nn::{Init, Optimizer, OptimizerConfig, VarStore};
use tch::{Device, Kind, Tensor};

use crate::helpers::{Draws, close, same_everywhere, values};
use crate::optimizers::{Config, configs, drop_gradients};

/// Of each job: six jobs have 300 together.
const MODELS: u64 = 50;
const STEPS: usize = 20;
const TOLERANCE: f64 = 1e-9;
const LEARNING_RATE: f64 = 0.01;

/// A layer of a network whose activations are `rows x width`.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Layer {
    Linear,
    /// Has no bias.
    Weight,
    /// Has the first weight, transposed, if there is one before it.
    Tied,
    /// One factor for all.
    Factor,
    /// Has a buffer, which rank 0 changes.
    Buffer,
    /// Has a parameter without elements.
    Empty,
    /// Has complex parameters.
    Complex,
}

/// What is drawn for a training, alike on all ranks.
#[derive(Debug)]
struct Options {
    config: Config,
    layers: Vec<Layer>,
    width: i64,
    /// Of a rank and a micro-batch.
    rows: i64,
    micro_batches: usize,
    /// Whether ranks leave layers out, each others.
    finds_unused: bool,
    /// Gradients are added to those of the step before.
    keeps: bool,
    freezes: bool,
    max_norm: Option<f64>,
    /// The loss is scaled, and overflows now and then.
    is_scaled: bool,
    bucket_mb: f64,
}

impl Options {
    fn draw(draws: &mut Draws) -> Self {
        let config = configs()[draws.below(6) as usize];
        let max_norm = (draws.below(3) == 0).then_some(0.1);
        let is_scaled = draws.below(4) == 0;
        let mut kinds = vec![
            Layer::Linear,
            Layer::Linear,
            Layer::Weight,
            Layer::Tied,
            Layer::Factor,
            Layer::Buffer,
            Layer::Empty,
        ];
        // Only this optimizer of tch's knows them, and only without clipping.
        if matches!(config, Config::Sgd(_)) && max_norm.is_none() {
            kinds.push(Layer::Complex);
        }
        let mut layers = vec![Layer::Linear];
        for _ in 0..draws.below(5) {
            layers.push(kinds[draws.below(kinds.len() as u64) as usize]);
        }
        Self {
            config,
            layers,
            width: [1, 2, 3, 5, 8][draws.below(5) as usize],
            rows: 1 + draws.below(3) as i64,
            micro_batches: 1 + draws.below(3) as usize,
            finds_unused: draws.below(2) == 0,
            keeps: !is_scaled && draws.below(6) == 0,
            freezes: draws.below(3) == 0,
            max_norm,
            is_scaled,
            bucket_mb: [1e-5, 1e-4, 25.0][draws.below(3) as usize],
        }
    }

    /// Returns whether parameters are in two groups: those of every other layer.
    fn has_groups(&self) -> bool {
        let second = self.layers.iter().skip(1).step_by(2);
        second.into_iter().any(|layer| !matches!(layer, Layer::Tied | Layer::Buffer))
    }

    /// Returns which layers the ranks leave out of a micro-batch: for each of them, by layer. All have
    /// the first one.
    fn draw_left_out(&self, draws: &mut Draws, ranks: usize) -> Vec<Vec<bool>> {
        let mut left_out = vec![vec![false; self.layers.len()]; ranks];
        for flag in left_out.iter_mut().flat_map(|layers| &mut layers[1..]) {
            *flag = self.finds_unused && draws.below(2) == 0;
        }
        left_out
    }
}

/// Numbers from -1 to 1 that are the same on all ranks.
fn numbers(shape: &[i64], seed: u64) -> Tensor {
    let count: i64 = shape.iter().product();
    let index = Tensor::arange(count, (Kind::Double, Device::Cpu));
    ((index * 12.9898 + seed as f64 * 0.731) * 78.233).sin().view(shape)
}

struct Network {
    layers: Vec<(Layer, Vec<Tensor>)>,
}

impl Network {
    fn new(vs: &VarStore, options: &Options) -> Self {
        let width = options.width;
        let mut layers: Vec<(Layer, Vec<Tensor>)> = Vec::new();
        for (number, &layer) in options.layers.iter().enumerate() {
            let path = (vs.root() / number).set_group(number % 2);
            let seed = 100 + 10 * number as u64;
            let weight =
                |name: &str, shape: &[i64]| path.add(name, numbers(shape, seed) * 0.5 + 0.1, true);
            let tensors = match layer {
                Layer::Linear => vec![weight("weight", &[width, width]), weight("bias", &[width])],
                Layer::Weight => vec![weight("weight", &[width, width])],
                Layer::Tied => {
                    let tied = layers[0].1[0].shallow_clone();
                    vec![path.add("weight", tied, false)]
                }
                Layer::Factor => vec![weight("factor", &[])],
                Layer::Buffer => vec![path.zeros_no_train("buffer", &[width])],
                Layer::Empty => vec![path.var("empty", &[width, 0], Init::Const(0.0))],
                Layer::Complex => {
                    let real = numbers(&[width], seed);
                    let complex = Tensor::complex(&(&real + 1.5), &real);
                    vec![path.add("complex", complex, true)]
                }
            };
            layers.push((layer, tensors));
        }
        Self { layers }
    }

    /// The mean over the rows, of the layers that are not left out.
    fn loss(&self, input: &Tensor, target: &Tensor, left_out: &[bool]) -> Tensor {
        let mut x = input.shallow_clone();
        let layers = self.layers.iter().zip(left_out);
        for ((layer, tensors), _) in layers.filter(|(_, is_left_out)| !**is_left_out) {
            let first = &tensors[0];
            x = match layer {
                Layer::Linear => x.linear(first, Some(&tensors[1])).tanh(),
                Layer::Weight => x.linear::<Tensor>(first, None).tanh(),
                Layer::Tied => x.matmul(first),
                Layer::Factor => x * first,
                Layer::Buffer => x + first,
                Layer::Empty => x + first.sum_dim_intlist(1, false, Kind::Double),
                Layer::Complex => x * first.abs(),
            };
        }
        (x - target).square().mean(Kind::Double)
    }

    fn change_buffers(&self, step: usize) {
        for (_, tensors) in self.layers.iter().filter(|(layer, _)| *layer == Layer::Buffer) {
            let _ = tch::no_grad(|| tensors[0].shallow_clone().fill_(0.1 * step as f64));
        }
    }
}

/// The samples of a micro-batch, of all ranks.
struct Batch {
    input: Tensor,
    target: Tensor,
}

impl Batch {
    fn new(options: &Options, ranks: usize, seed: u64) -> Self {
        let shape = [ranks as i64 * options.rows, options.width];
        Self { input: numbers(&shape, seed), target: numbers(&shape, seed + 1) }
    }

    fn part(&self, rank: usize, options: &Options) -> Self {
        let part = |all: &Tensor| all.narrow(0, rank as i64 * options.rows, options.rows);
        Self { input: part(&self.input), target: part(&self.target) }
    }
}

/// One process, which has the whole batch.
struct Whole {
    vs: VarStore,
    network: Network,
    optimizer: Optimizer,
}

impl Whole {
    fn new(options: &Options) -> Result<Self> {
        let vs = VarStore::new(Device::Cpu);
        let network = Network::new(&vs, options);
        let optimizer = options.config.build(&vs, LEARNING_RATE)?;
        Ok(Self { vs, network, optimizer })
    }

    /// Adds the gradients of a micro-batch. Ranks that have different layers come one after the other.
    fn backward(&self, batch: &Batch, left_out: &[Vec<bool>], options: &Options) -> Result<()> {
        let parts = options.micro_batches as f64;
        if !options.finds_unused {
            let loss = self.network.loss(&batch.input, &batch.target, &left_out[0]);
            return Ok((loss / parts).f_backward()?);
        }
        for (rank, layers) in left_out.iter().enumerate() {
            let part = batch.part(rank, options);
            let loss = self.network.loss(&part.input, &part.target, layers);
            (loss / parts / left_out.len() as f64).f_backward()?;
        }
        Ok(())
    }

    fn step(&mut self, options: &Options) {
        if let Some(max) = options.max_norm {
            self.optimizer.clip_grad_norm(max);
        }
        self.optimizer.step();
    }
}

/// The ranks of a group, each with its part of the batch.
struct Parts {
    vs: VarStore,
    model: Fsdp<Network>,
    optimizer: ZeroRedundancyOptimizer,
    scaler: GradScaler,
}

impl Parts {
    fn new(group: &ProcessGroup, options: &Options) -> Result<Self> {
        let vs = VarStore::new(Device::Cpu);
        let model = Fsdp::builder(group)
            .find_unused_parameters(options.finds_unused)
            .bucket_cap_mb(options.bucket_mb)
            .wrap(Network::new(&vs, options), &vs)?;
        let optimizer = model.optimizer(options.config, LEARNING_RATE)?;
        let scaler = GradScaler::new(1024.0, 2.0, 0.5, 3);
        Ok(Self { vs, model, optimizer, scaler })
    }

    /// Runs this rank's forward and backward of a micro-batch, times a factor.
    fn backward(
        &self,
        part: &Batch,
        left_out: &[bool],
        factor: f64,
        options: &Options,
    ) -> Result<()> {
        let loss = self.model.loss(&part.input, &part.target, left_out) * factor;
        let mut loss = loss / options.micro_batches as f64;
        if options.is_scaled {
            loss = self.scaler.scale(&loss);
        }
        Ok(loss.f_backward()?)
    }

    /// Returns whether the step was taken: it is not after an overflow.
    fn step(&mut self, options: &Options) -> Result<bool> {
        if options.is_scaled {
            self.scaler.unscale(&self.optimizer)?;
        }
        if let Some(max) = options.max_norm {
            self.optimizer.clip_grad_norm(max)?;
        }
        if !options.is_scaled {
            self.optimizer.step()?;
            return Ok(true);
        }
        let is_taken = self.scaler.step(&mut self.optimizer)?;
        self.scaler.update()?;
        Ok(is_taken)
    }
}

/// Random models of this job. Jobs with ranks on other machines have seeds of their own.
pub fn random(group: &ProcessGroup) -> Result<()> {
    let on_first_machine = group.ranks_on_machine_of(0).len() as u64;
    let first = 10_000 * group.world_size() as u64 + 1_000 * on_first_machine;
    for seed in first..first + MODELS {
        let options = Options::draw(&mut Draws(seed));
        trained(group, seed, &options).with_context(|| format!("seed {seed}, {options:?}"))?;
    }
    Ok(())
}

fn trained(group: &ProcessGroup, seed: u64, options: &Options) -> Result<()> {
    let mut draws = Draws(!seed);
    let rank = group.rank();
    let ranks = group.world_size();
    let mut parts = Parts::new(group, options)?;
    // On one rank, which the others wait for.
    let is_judge = seed as usize % ranks == rank;
    let mut whole = is_judge.then(|| Whole::new(options)).transpose()?;
    for step in 0..STEPS {
        let learning_rate = LEARNING_RATE / (1.0 + step as f64 / 8.0);
        parts.optimizer.set_lr(learning_rate)?;
        if options.has_groups() {
            parts.optimizer.set_weight_decay_group(1, 0.2)?;
        }
        if options.freezes && (step == 5 || step == 12) {
            let _ = parts.model.layers[0].1[0].set_requires_grad(step == 12);
            parts.model.refresh()?;
        }
        if !options.keeps {
            parts.optimizer.zero_grad()?;
        }
        if let Some(whole) = &mut whole {
            whole.optimizer.set_lr(learning_rate);
            if options.has_groups() {
                whole.optimizer.set_weight_decay_group(1, 0.2);
            }
            if options.freezes && (step == 5 || step == 12) {
                let _ = whole.network.layers[0].1[0].set_requires_grad(step == 12);
            }
            if !options.keeps {
                drop_gradients(&whole.vs)?;
            }
            whole.network.change_buffers(step);
        }
        if rank == 0 {
            parts.model.change_buffers(step);
        }
        parts.model.sync_buffers()?;
        let overflows = options.is_scaled && draws.below(4) == 0;
        for number in 0..options.micro_batches {
            let left_out = options.draw_left_out(&mut draws, ranks);
            let batch = Batch::new(options, ranks, draws.below(1 << 20));
            let own = batch.part(rank, options);
            let is_last = number + 1 == options.micro_batches;
            let is_culprit = overflows && is_last && step % ranks == rank;
            let factor = if is_culprit { f64::INFINITY } else { 1.0 };
            let backward = || parts.backward(&own, &left_out[rank], factor, options);
            if is_last {
                backward()?;
            } else {
                parts.model.without_sync(|_| backward())?;
            }
            if let Some(whole) = &whole {
                whole.backward(&batch, &left_out, options)?;
            }
        }
        ensure!(parts.step(options)? != overflows, "step {step}: overflow {overflows}");
        if let Some(whole) = whole.as_mut().filter(|_| !overflows) {
            whole.step(options);
        }
    }
    if let Some(whole) = &whole {
        close(&real_values(&parts.vs), &real_values(&whole.vs), TOLERANCE)?;
    }
    same_everywhere(group, &parts.vs)
}

/// All variables by name, complex ones as pairs of numbers.
fn real_values(vs: &VarStore) -> BTreeMap<String, Tensor> {
    let mut values = values(vs);
    for tensor in values.values_mut().filter(|tensor| tensor.is_complex()) {
        *tensor = tensor.view_as_real();
    }
    values
}
