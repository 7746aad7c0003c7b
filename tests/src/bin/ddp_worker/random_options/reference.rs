//! What all ranks have, computed in one process without `Ddp`.

use anyhow::{Context, Result, ensure};
use flow_autograd::{OptimizerState, set_grad};
use flow_ddp::BufferCommHookLocation;
use tch::nn::{Optimizer, OptimizerConfig, VarStore};
use tch::{Kind, Tensor};

use super::common::{self, AVERAGED_EVERY, LEARNING_RATE, MAX_NORM, batch, sgd, subgroup};
use super::model::{Net, Operation, forward};
use super::training::{Averages, Before, Hook, Phase, Steps, Training, rounding};
use crate::models::store;

/// A rank's model and optimizer.
struct Rank {
    _store: VarStore,
    net: Net,
    optimizer: Optimizer,
}

pub struct Reference<'a> {
    training: &'a Training,
    ranks: Vec<Rank>,
    in_diloco: Vec<bool>,
    /// The reductions so far.
    reductions: u64,
    /// The largest element of a rank's gradients in this phase.
    largest: f64,
}

impl<'a> Reference<'a> {
    pub fn new(training: &'a Training, count: usize) -> Result<Self> {
        let mut ranks = Vec::new();
        for rank in 0..count {
            let store = store();
            let mut layers = training.layers.clone();
            for layer in &mut layers {
                // libtorch cannot cast sparse gradients.
                if let Operation::Embedding { sparse } = &mut layer.operation {
                    *sparse = false;
                }
            }
            let mut net = Net::new(&store, &layers, training.wide, rank);
            net.cast = training.mixed.param;
            let optimizer = sgd(training).build(&store, LEARNING_RATE)?;
            ranks.push(Rank { _store: store, net, optimizer });
        }
        let in_diloco = ranks[0].net.parameters().iter().map(Tensor::requires_grad).collect();
        let mut reference = Self { training, ranks, in_diloco, reductions: 0, largest: 0.0 };
        reference.copy_parameters(0);
        if training.broadcast_buffers {
            reference.copy_buffers(0);
        }
        if let Some(kind) = training.mixed.buffer {
            for mut buffer in reference.ranks.iter().flat_map(|rank| rank.net.buffers()) {
                if buffer.is_floating_point() {
                    let cast = buffer.to_kind(kind);
                    buffer.set_data(&cast);
                }
            }
        }
        Ok(reference)
    }

    /// Gives all ranks the parameters of one.
    fn copy_parameters(&mut self, from: usize) {
        let source = self.ranks[from].net.parameters();
        for rank in &self.ranks {
            copy_all(&rank.net.parameters(), &source);
        }
    }

    fn copy_buffers(&mut self, from: usize) {
        let source = self.ranks[from].net.buffers();
        for rank in &self.ranks {
            copy_all(&rank.net.buffers(), &source);
        }
    }

    pub fn prepare(&mut self, before: Before) -> Result<()> {
        match before {
            Before::Nothing | Before::CastParameters => {}
            Before::SyncBuffers => {
                if self.training.buffer_hook.is_some() {
                    self.average_buffers();
                } else if self.training.broadcast_buffers {
                    self.copy_buffers(0);
                }
            }
            Before::Refresh { layer, trains } => {
                for index in 0..self.ranks[0].net.parameters_of(layer).len() {
                    let source = self.ranks[0].net.parameters_of(layer)[index].detach();
                    for rank in &self.ranks {
                        let parameter = &rank.net.parameters_of(layer)[index];
                        // Parameters that are trained again are rank 0's.
                        if trains && !parameter.requires_grad() {
                            copy_all(&[parameter.shallow_clone()], &[source.shallow_clone()]);
                        }
                        set_grad(parameter, None)?;
                        let _ = parameter.set_requires_grad(trains);
                    }
                }
            }
            Before::Resume => {
                self.copy_parameters(0);
                self.copy_buffers(0);
                let state = self.ranks[0].optimizer.state()?;
                for rank in &mut self.ranks[1..] {
                    rank.optimizer.load_state(&state)?;
                }
            }
        }
        Ok(())
    }

    /// Trains all ranks through a phase.
    pub fn run(&mut self, number: usize) -> Result<()> {
        let phase = &self.training.phases[number];
        self.largest = 0.0;
        let mut last = (0..self.ranks.len()).collect();
        for step in 0.. {
            let active: Vec<usize> =
                (0..self.ranks.len()).filter(|&rank| phase.steps[rank] > step).collect();
            if active.is_empty() {
                break;
            }
            self.step(number, step, &active)?;
            last = active;
        }
        if phase.join.is_some() {
            let root = last[last.len() - 1];
            self.copy_parameters(root);
            if self.training.broadcast_buffers {
                self.copy_buffers(root);
            }
        }
        Ok(())
    }

    fn step(&mut self, number: usize, step: usize, active: &[usize]) -> Result<()> {
        let phase = &self.training.phases[number];
        for backward in 0..phase.backwards {
            self.backward(number, step, backward, active)?;
        }
        self.reduce(phase, active)?;
        for (number, rank) in self.ranks.iter_mut().enumerate() {
            // A rank that has ended takes no step, but with ZeRO.
            if active.contains(&number) || self.training.steps == Steps::Zero {
                if self.training.clips {
                    rank.optimizer.clip_grad_norm(MAX_NORM);
                }
                rank.optimizer.step();
            }
            for parameter in rank.net.parameters() {
                let mut gradient = parameter.grad();
                if gradient.defined() && self.training.zeroes {
                    let _ = gradient.zero_();
                } else {
                    set_grad(&parameter, None)?;
                }
            }
        }
        self.average_parameters();
        Ok(())
    }

    fn backward(
        &mut self,
        number: usize,
        step: usize,
        backward: usize,
        active: &[usize],
    ) -> Result<()> {
        let Training { penalty, broadcast_buffers, forward_sync_buffers, .. } = *self.training;
        let phase = &self.training.phases[number];
        let reduces = backward + 1 == phase.backwards;
        let shares = broadcast_buffers && forward_sync_buffers && reduces;
        let root = if phase.join.is_some() { active[active.len() - 1] } else { 0 };
        let drops = usize::from(phase.drops && reduces);
        let mut loss = Tensor::zeros([], (Kind::Double, crate::models::device()));
        for forward_number in 0..drops + phase.forwards {
            if shares && self.training.buffer_hook == Some(BufferCommHookLocation::PreForward) {
                self.average_buffers();
            } else if shares && self.training.buffer_hook.is_none() {
                self.copy_buffers(root);
            }
            let mut nets = Vec::new();
            let mut inputs = Vec::new();
            for &rank in active {
                let net = &self.ranks[rank].net;
                net.step.set(phase.number(step, backward));
                nets.push(net);
                let place = [number, step, backward, forward_number];
                inputs.push(batch(self.training, rank, place).set_requires_grad(penalty));
            }
            let outputs = forward(&nets, &inputs, self.training.sync_batch_norm, true);
            if forward_number >= drops {
                loss += common::loss(&outputs, &inputs, penalty)?;
            }
            if shares && self.training.buffer_hook == Some(BufferCommHookLocation::PostForward) {
                self.average_buffers();
            }
        }
        Ok(loss.f_backward()?)
    }

    fn average_buffers(&mut self) {
        let all: Vec<Vec<Tensor>> = self.ranks.iter().map(|rank| rank.net.buffers()).collect();
        for index in 0..all[0].len() {
            if all[0][index].is_floating_point() {
                let of_ranks: Vec<Tensor> = all.iter().map(|b| b[index].shallow_clone()).collect();
                let average = mean(&of_ranks, of_ranks.len());
                of_ranks.iter().for_each(|buffer| {
                    tch::no_grad(|| buffer.shallow_clone().data().copy_(&average));
                });
            }
        }
    }

    /// Reduces the gradients of the ranks that are active.
    fn reduce(&mut self, phase: &Phase, active: &[usize]) -> Result<()> {
        let ranks = self.ranks.len();
        let all: Vec<Vec<Tensor>> = self.ranks.iter().map(|rank| rank.net.parameters()).collect();
        let mut scale = 1.0;
        if phase.join.is_some_and(|join| !join.divide_by_initial_world_size) {
            scale = ranks as f64 / active.len() as f64;
        }
        let count = all[0].len();
        for index in 0..count {
            let mut gradients: Vec<Option<Tensor>> = (0..ranks).map(|_| None).collect();
            for &rank in active {
                let gradient = all[rank][index].grad();
                if gradient.defined() {
                    let gradient = if gradient.is_sparse() {
                        gradient.to_dense(None, false)
                    } else {
                        gradient
                    };
                    let amount = gradient.abs().to_kind(Kind::Double);
                    if amount.numel() > 0 {
                        self.largest = self.largest.max(amount.max().double_value(&[]));
                    }
                    gradients[rank] = Some(gradient.detach());
                }
            }
            let Some(like) = gradients.iter().flatten().next() else { continue };
            let like = like.zeros_like();
            let gradients: Vec<Tensor> = gradients
                .into_iter()
                .map(|gradient| gradient.unwrap_or_else(|| like.shallow_clone()))
                .collect();
            for (rank, parameters) in all.iter().enumerate() {
                let members = self.reduces_with(rank, index, ranks);
                let own: Vec<Tensor> =
                    members.iter().map(|&member| gradients[member].shallow_clone()).collect();
                let reduced = mean(&own, own.len()) * scale;
                let is_stepped = active.contains(&rank) || self.training.steps == Steps::Zero;
                let reduced = Some(reduced.to_kind(like.kind())).filter(|_| is_stepped);
                set_grad(&parameters[index], reduced.as_ref())?;
            }
        }
        self.reductions += 1;
        Ok(())
    }

    /// The ranks whose gradients of a parameter are averaged with those of `rank`.
    fn reduces_with(&self, rank: usize, parameter: usize, ranks: usize) -> Vec<usize> {
        let net = &self.ranks[0].net;
        let mut sparse = self.training.named_sparse().into_iter();
        // Those of all ranks are gathered, whatever the hook does.
        let is_sparse = sparse.any(|layer| {
            let owner = self.training.layers[layer].tied_to.unwrap_or(layer);
            net.place_of_weight(owner) == parameter
        });
        match self.training.hook {
            Hook::PostLocalSgd { start_iter, gradient_all_reduce }
                if !is_sparse && self.reductions >= start_iter =>
            {
                if gradient_all_reduce {
                    subgroup(rank, ranks)
                } else {
                    vec![rank]
                }
            }
            _ => (0..ranks).collect(),
        }
    }

    fn average_parameters(&mut self) {
        let steps = self.reductions;
        let is_due = match self.training.averages {
            Averages::None => false,
            Averages::ModelAverager => (steps - 1).is_multiple_of(AVERAGED_EVERY),
            Averages::DiLoCo => steps.is_multiple_of(AVERAGED_EVERY),
        };
        let all: Vec<Vec<Tensor>> = self.ranks.iter().map(|rank| rank.net.parameters()).collect();
        for index in (0..all[0].len()).filter(|_| is_due) {
            let of_ranks: Vec<Tensor> = all.iter().map(|p| p[index].shallow_clone()).collect();
            // DiLoCo has those that were trained in the beginning.
            let is_averaged = match self.training.averages {
                Averages::DiLoCo => self.in_diloco[index],
                _ => of_ranks[0].requires_grad(),
            };
            if is_averaged {
                let average = mean(&of_ranks, of_ranks.len());
                of_ranks.iter().for_each(|p| copy_all(&[p.shallow_clone()], &[average.copy()]));
            }
        }
    }

    /// Checks that the ranks' tensors are what is expected after so many steps, and goes on with them.
    pub fn compare(&mut self, gathered: &[Vec<Tensor>], steps: usize) -> Result<()> {
        let tolerance = self.training.tolerance();
        for (rank, actual) in gathered.iter().enumerate() {
            let net = &self.ranks[rank].net;
            let (parameters, buffers) = actual.split_at(net.parameters().len());
            for (index, (actual, own)) in parameters.iter().zip(net.parameters()).enumerate() {
                let limit = tolerance.map(|tolerance| {
                    let moved = self.largest * LEARNING_RATE * 4.0 * steps as f64;
                    tolerance * moved.max(0.01)
                });
                compare_one(actual, &own, limit, steps)
                    .with_context(|| format!("rank {rank}, parameter {index}"))?;
            }
            for (index, (actual, own)) in buffers.iter().zip(net.buffers()).enumerate() {
                // They are made of activations, of which half precision has few digits.
                let share = if own.is_floating_point() { 2.0 } else { 0.01 };
                let limit = tolerance.map(|tolerance| tolerance * share);
                compare_one(actual, &own, limit, steps)
                    .with_context(|| format!("rank {rank}, buffer {index}"))?;
            }
        }
        Ok(())
    }
}

/// Checks that a tensor is what is expected, but for `limit` and the rounding of its own type, and copies
/// it. None: it only is to be finite.
fn compare_one(actual: &Tensor, own: &Tensor, limit: Option<f64>, steps: usize) -> Result<()> {
    let expected = own.detach();
    ensure!(
        actual.kind() == expected.kind() && actual.size() == expected.size(),
        "{actual:?} instead of {expected:?}"
    );
    if actual.numel() > 0 {
        let largest = |tensor: &Tensor| tensor.abs().to_kind(Kind::Double).max().double_value(&[]);
        let difference = largest(&(actual - &expected));
        ensure!(difference.is_finite(), "{actual} instead of {expected}");
        let rounded = 2.0 * rounding(expected.kind()) * (largest(&expected) + 0.01) * steps as f64;
        let limit = limit.map_or(f64::INFINITY, |limit| limit + rounded);
        ensure!(
            difference <= limit,
            "it differs by {difference}, more than {limit}: {actual} instead of {expected}"
        );
    }
    copy_all(&[own.shallow_clone()], &[actual.shallow_clone()]);
    Ok(())
}

/// The sum of tensors, in many digits, divided by `divisor`.
fn mean(tensors: &[Tensor], divisor: usize) -> Tensor {
    let kind = tensors[0].kind();
    let wide = if tensors[0].is_complex() { Kind::ComplexDouble } else { Kind::Double };
    let sum: Tensor = tensors
        .iter()
        .map(|tensor| tensor.detach().to_kind(wide))
        .reduce(|sum, tensor| sum + tensor)
        .unwrap_or_default();
    (sum / divisor as f64).to_kind(kind)
}

/// Copies values, of which libtorch's graphs know nothing.
fn copy_all(targets: &[Tensor], sources: &[Tensor]) {
    for (target, source) in targets.iter().zip(sources) {
        tch::no_grad(|| target.data().copy_(&source.detach()));
    }
}
