//! Random trainings in joins, whose ranks have any numbers of batches, beside one process that
//! computes the same by hand.

use anyhow::{Context, Result, ensure};
use flow_comm::ProcessGroup;
use flow_ddp::comm_hooks::{PowerSgd, TopK};
use flow_ddp::{Ddp, Error, JoinOptions};
use tch::nn::Module;
use tch::{Kind, Tensor};

use crate::helpers::{Draws, OwnMean};
use crate::models::{device, store};

const LEARNING_RATE: f64 = 0.1;

/// Weights `w` with a gradient of `w - average - number - input`, and a running average of inputs.
#[derive(Debug)]
struct Net {
    weights: Vec<Tensor>,
    average: Tensor,
}

/// The loss of an input, which is a number, and for each weight whether it is used.
impl Module for Net {
    fn forward(&self, input: &Tensor) -> Tensor {
        let input = Vec::<f64>::try_from(input).expect("numbers");
        next(&self.average, input[0]);
        let mut loss = Tensor::zeros([], (Kind::Double, device()));
        for (number, weight) in self.weights.iter().enumerate() {
            if input[number + 1] != 0.0 {
                let offset = self.average.copy() + (number as f64 + input[0]);
                loss += (weight - offset).square().sum(Kind::Double) / 2;
            }
        }
        loss
    }
}

fn next(average: &Tensor, input: f64) {
    tch::no_grad(|| average.shallow_clone().copy_(&(average * 0.5 + input)));
}

/// A training, as all ranks draw it.
#[derive(Debug)]
struct Training {
    seed: u64,
    shapes: Vec<&'static [i64]>,
    find_unused: bool,
    bucket_view: bool,
    cap: f64,
    broadcast_buffers: bool,
    forward_sync_buffers: bool,
    hook: u64,
    /// Gradients are zeroed rather than removed.
    zeroes: bool,
    epochs: Vec<Epoch>,
}

#[derive(Debug)]
struct Epoch {
    /// None: without a join.
    join: Option<JoinOptions>,
    /// The batches of each rank.
    batches: Vec<usize>,
    /// The batches whose gradients are reduced together.
    accumulated: usize,
    /// The forwards of a backward.
    forwards: usize,
    /// Before each backward that reduces there is a forward that none follows.
    drops: bool,
}

impl Training {
    fn drawn(seed: u64, ranks: usize) -> Self {
        const SHAPES: [&[i64]; 4] = [&[1], &[10], &[4, 6], &[9000]];
        let mut draws = Draws(seed);
        let mut flip = |odds| draws.below(odds) == 0;
        let (find_unused, bucket_view, zeroes) = (flip(2), flip(2), flip(2));
        let (broadcast_buffers, forward_sync_buffers) = (!flip(5), !flip(5));
        let shapes = (0..1 + draws.below(4)).map(|_| SHAPES[draws.below(4) as usize]).collect();
        let cap = [0.00001, 0.01, 25.0][draws.below(3) as usize];
        let hook = draws.below(6);
        let mut epochs = Vec::new();
        for _ in 0..1 + draws.below(3) {
            let is_even = draws.below(4) == 0;
            let most = 1 + draws.below(7);
            let mut batches: Vec<usize> = (0..ranks).map(|_| draws.below(most) as usize).collect();
            if is_even {
                batches = vec![batches[0]; ranks];
            }
            let join = JoinOptions {
                divide_by_initial_world_size: draws.below(2) == 0,
                throw_on_early_termination: is_even && draws.below(2) == 0,
            };
            epochs.push(Epoch {
                join: (!is_even || draws.below(2) == 0).then_some(join),
                batches,
                accumulated: 1 + draws.below(3) as usize,
                forwards: 1 + draws.below(2) as usize,
                drops: draws.below(3) == 0,
            });
        }
        Self {
            seed,
            shapes,
            find_unused,
            bucket_view,
            cap,
            broadcast_buffers,
            forward_sync_buffers,
            hook,
            zeroes,
            epochs,
        }
    }

    /// The input of a forward. All ranks use the first weight.
    fn input(&self, epoch: usize, rank: usize, batch: usize, forward: usize) -> Vec<f64> {
        let place = ((epoch * 100 + rank) * 100 + batch) * 100 + forward;
        let mut draws = Draws(self.seed ^ place as u64);
        let mut input = vec![draws.below(1000) as f64 / 1000.0];
        for number in 0..self.shapes.len() {
            let is_used = number == 0 || !self.find_unused || draws.below(3) == 0;
            input.push(f64::from(u8::from(is_used)));
        }
        input
    }
}

/// All that the ranks have, in one process.
struct Expected<'a> {
    training: &'a Training,
    weights: Vec<Tensor>,
    averages: Vec<f64>,
    /// Each rank's gradients that are not reduced.
    gradients: Vec<Vec<Option<Tensor>>>,
}

impl Expected<'_> {
    fn forward(&mut self, rank: usize, input: &[f64], has_backward: bool) {
        self.averages[rank] = self.averages[rank] * 0.5 + input[0];
        for (number, weight) in self.weights.iter().enumerate().filter(|_| has_backward) {
            if input[number + 1] != 0.0 {
                let gradient = weight - (self.averages[rank] + number as f64 + input[0]);
                let sum = &mut self.gradients[rank][number];
                *sum = Some(match sum.take() {
                    Some(sum) => sum + gradient,
                    None => gradient,
                });
            }
        }
    }

    fn unreduced(&mut self, number: usize, rank: usize, batch: usize) {
        for forward in 0..self.training.epochs[number].forwards {
            let input = self.training.input(number, rank, batch, forward);
            self.forward(rank, &input, true);
        }
    }

    fn epoch(&mut self, number: usize) {
        let training = self.training;
        let Epoch { join, batches, accumulated, forwards, drops } = &training.epochs[number];
        let ranks = batches.len();
        let reductions: Vec<usize> = batches.iter().map(|batches| batches / accumulated).collect();
        let mut last_active: Vec<usize> = (0..ranks).collect();
        for reduction in 0.. {
            let first = reduction * accumulated;
            for rank in (0..ranks).filter(|&rank| reductions[rank] == reduction) {
                for batch in first..batches[rank] {
                    self.unreduced(number, rank, batch);
                }
            }
            let active: Vec<usize> =
                (0..ranks).filter(|&rank| reductions[rank] > reduction).collect();
            let Some(&last) = active.last() else { break };
            let root = if join.is_some() { last } else { 0 };
            let batch = first + accumulated - 1;
            for &rank in &active {
                for batch in first..batch {
                    self.unreduced(number, rank, batch);
                }
            }
            let dropped = drops.then_some(9);
            for forward in dropped.into_iter().chain(0..*forwards) {
                if training.broadcast_buffers && training.forward_sync_buffers {
                    self.averages = vec![self.averages[root]; ranks];
                }
                for &rank in &active {
                    let input = training.input(number, rank, batch, forward);
                    self.forward(rank, &input, forward != 9);
                }
            }
            let divides_by_active = join.is_some_and(|join| !join.divide_by_initial_world_size);
            self.step(&active, if divides_by_active { active.len() } else { ranks });
            last_active = active;
        }
        if join.is_some() && training.broadcast_buffers {
            let root = last_active[last_active.len() - 1];
            self.averages = vec![self.averages[root]; ranks];
        }
    }

    fn step(&mut self, active: &[usize], divisor: usize) {
        for (number, weight) in self.weights.iter_mut().enumerate() {
            for &rank in active {
                if let Some(gradient) = self.gradients[rank][number].take() {
                    *weight -= gradient * (LEARNING_RATE / divisor as f64);
                }
            }
        }
    }
}

pub fn trained(group: &ProcessGroup) -> Result<()> {
    let first = 1000 * group.world_size() as u64;
    for seed in first..first + 30 {
        let training = Training::drawn(seed, group.world_size());
        run(group, &training).with_context(|| format!("{training:?}"))?;
    }
    Ok(())
}

fn run(group: &ProcessGroup, training: &Training) -> Result<()> {
    let mut store = store();
    let named = training.shapes.iter().enumerate();
    let weights =
        named.map(|(number, shape)| store.root().ones(&format!("w{number}"), shape)).collect();
    let average = store.root().zeros_no_train("average", &[1]);
    store.double();
    let builder = Ddp::builder(group)
        .find_unused_parameters(training.find_unused)
        .gradient_as_bucket_view(training.bucket_view)
        .bucket_cap_mb(training.cap)
        .broadcast_buffers(training.broadcast_buffers)
        .forward_sync_buffers(training.forward_sync_buffers);
    let builder = match training.hook {
        0 => builder.comm_hook(OwnMean),
        // Exact, if not for rounding.
        1 => builder.comm_hook(PowerSgd::new(4).start_iter(1).min_compression_rate(0.0)),
        2 => builder.comm_hook(TopK::new(1.0)),
        _ => builder,
    };
    let model = builder.wrap(Net { weights, average }, &store)?;
    let mut expected = Expected {
        training,
        weights: model.weights.iter().map(|weight| weight.detach().copy()).collect(),
        averages: vec![0.0; group.world_size()],
        gradients: Vec::new(),
    };
    for _ in 0..group.world_size() {
        expected.gradients.push(training.shapes.iter().map(|_| None).collect());
    }
    for (number, epoch) in training.epochs.iter().enumerate() {
        let train = || train(&model, training, number, group.rank());
        match epoch.join {
            Some(options) => model.join_with(options, train)?,
            None => train()?,
        }
        expected.epoch(number);
        compare(&model, &expected, group.rank()).with_context(|| format!("epoch {number}"))?;
    }
    Ok(())
}

fn train(model: &Ddp<Net>, training: &Training, number: usize, rank: usize) -> Result<(), Error> {
    let epoch = &training.epochs[number];
    for batch in 0..epoch.batches[rank] {
        let reduces = (batch + 1) % epoch.accumulated == 0;
        let loss = |forward| {
            let input = training.input(number, rank, batch, forward);
            model.try_forward_t(&Tensor::from_slice(&input), true)
        };
        let _guard = (!reduces).then(|| model.no_sync());
        if reduces && epoch.drops {
            drop(loss(9)?);
        }
        let mut sum = loss(0)?;
        for forward in 1..epoch.forwards {
            sum += loss(forward)?;
        }
        sum.f_backward().map_err(Error::from_backward)?;
        if reduces {
            tch::no_grad(|| {
                for weight in &model.weights {
                    let mut gradient = weight.grad();
                    if gradient.defined() {
                        let _ = weight.shallow_clone().g_sub_(&(&gradient * LEARNING_RATE));
                    }
                    if gradient.defined() && training.zeroes {
                        let _ = gradient.zero_();
                    } else {
                        flow_autograd::set_grad(weight, None).expect("gradients can be removed");
                    }
                }
            });
        }
    }
    Ok(())
}

fn compare(model: &Ddp<Net>, expected: &Expected<'_>, rank: usize) -> Result<()> {
    let average = model.average.double_value(&[0]);
    let difference = average - expected.averages[rank];
    ensure!(difference.abs() < 1e-9, "{average} instead of {}", expected.averages[rank]);
    for (number, weight) in model.weights.iter().enumerate() {
        let is_close = weight.allclose(&expected.weights[number], 1e-9, 1e-9, false);
        ensure!(is_close, "w{number}: {weight} instead of {}", expected.weights[number]);
        let gradient = weight.grad();
        match &expected.gradients[rank][number] {
            Some(sum) => {
                ensure!(gradient.defined(), "w{number} has lost its gradient");
                let is_close = gradient.allclose(sum, 1e-9, 1e-9, false);
                ensure!(is_close, "gradient of w{number}: {gradient} instead of {sum}");
            }
            None => {
                let is_zero = !gradient.defined() || gradient.abs().max().double_value(&[]) == 0.0;
                ensure!(is_zero, "w{number} has the gradient {gradient}");
            }
        }
    }
    Ok(())
}
