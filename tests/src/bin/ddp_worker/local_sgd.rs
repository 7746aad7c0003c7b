//! Ranks that train alone for some steps, beside one process that trains a model of each.

use anyhow::{Context, Result, ensure};
use flow_autograd::GradHook;
use flow_comm::ProcessGroup;
use flow_ddp::comm_hooks::PostLocalSgd;
use flow_ddp::{
    Ddp, DdpBuilder, DiLoCo, DiLoCoOptions, Error, JoinOptions, MixedPrecision, ModelAverager,
    OptimizerState, ZeroRedundancyOptimizer,
};
use tch::nn::{self, ModuleT, Optimizer, OptimizerConfig, VarStore};
use tch::{Kind, Tensor};

use crate::helpers::{Draws, close, error, same_everywhere, says, values};
use crate::models::{self, device};

const SIZES: [&[i64]; 5] = [&[3, 4], &[0], &[], &[7], &[2, 1, 2]];

/// Parameters in double precision, each as a variable, with an optimizer.
struct Model {
    store: VarStore,
    weights: Vec<Tensor>,
    optimizer: Optimizer,
}

impl Model {
    fn new() -> Result<Self> {
        let mut store = models::store();
        let mut weights = Vec::new();
        for (index, size) in SIZES.iter().enumerate() {
            weights.push(store.root().ones(&format!("w{index}"), size));
        }
        store.set_kind(Kind::Double);
        let optimizer = nn::sgd(0.5, 0.0, 0.0, false).build(&store, 0.1)?;
        Ok(Self { store, weights, optimizer })
    }

    /// This rank's loss in a step.
    fn loss(&self, rank: usize, step: usize) -> Tensor {
        tch::manual_seed((1000 * rank + step) as i64);
        let mut loss = Tensor::zeros([], (Kind::Double, device()));
        for weight in &self.weights {
            let target = Tensor::randn(weight.size(), (Kind::Double, device()));
            loss += (weight - target).square().sum(Kind::Double);
        }
        loss
    }

    fn step(&mut self, rank: usize, step: usize) {
        let loss = self.loss(rank, step);
        self.optimizer.backward_step(&loss);
    }
}

/// A model of each rank.
fn twins(ranks: usize) -> Result<Vec<Model>> {
    (0..ranks).map(|_| Model::new()).collect()
}

/// The mean of what `of` gives of these models.
fn mean(models: &[Model], of: impl Fn(&Model) -> Tensor) -> Tensor {
    let all: Vec<Tensor> = models.iter().map(of).collect();
    Tensor::stack(&all, 0).mean_dim(0, false, Kind::Double)
}

fn average_weights(models: &mut [Model]) {
    for index in 0..SIZES.len() {
        let mean = mean(models, |model| model.weights[index].detach());
        for model in models.iter_mut() {
            tch::no_grad(|| model.weights[index].copy_(&mean));
        }
    }
}

/// Steps all models: with the mean of their gradients, or each with its own.
fn step_all(models: &mut [Model], step: usize, averaged: bool) -> Result<()> {
    for (rank, model) in models.iter_mut().enumerate() {
        model.optimizer.zero_grad();
        model.loss(rank, step).f_backward()?;
    }
    if averaged {
        for index in 0..SIZES.len() {
            let mean = mean(models, |model| model.weights[index].grad());
            for model in models.iter() {
                flow_autograd::set_grad(&model.weights[index], Some(&mean.copy()))?;
            }
        }
    }
    models.iter_mut().for_each(|model| model.optimizer.step());
    Ok(())
}

/// Gradients are averaged in the first steps, over all ranks; then parameters are, every other step.
pub fn post_local(group: &ProcessGroup) -> Result<()> {
    let alone = crate::helpers::own_group(group)?;
    for reduces in [true, false] {
        let mut model = Model::new()?;
        let hook = PostLocalSgd::new(&alone)?.start_iter(3).gradient_all_reduce(reduces);
        let weights = model.weights.iter().map(Tensor::shallow_clone).collect::<Vec<_>>();
        let wrapped =
            Ddp::builder(group).bucket_cap_mb(1e-4).comm_hook(hook).wrap(weights, &model.store)?;
        let mut averager = ModelAverager::periodic(group, 2, 3)?;
        let mut twins = twins(group.world_size())?;
        for step in 0..8 {
            model.step(group.rank(), step);
            let was_averaged = averager.average_parameters(&model.store)?;
            step_all(&mut twins, step, step < 3)?;
            if step >= 3 && step % 2 == 1 {
                average_weights(&mut twins);
            }
            ensure!(was_averaged == (step >= 3 && step % 2 == 1), "step {step}: {was_averaged}");
            close(&values(&model.store), &values(&twins[group.rank()].store), 1e-12)
                .with_context(|| format!("step {step}"))?;
        }
        ensure!(averager.step() == 8, "{}", averager.step());
        drop(wrapped);
    }
    Ok(())
}

/// Ranks with parameters of their own compute with these in half precision, too; what needs all ranks to
/// have the same gradients is an error of all.
pub fn post_local_combined(group: &ProcessGroup) -> Result<()> {
    let alone = crate::helpers::own_group(group)?;
    let builder = || -> Result<DdpBuilder> {
        Ok(Ddp::builder(group).comm_hook(PostLocalSgd::new(&alone)?.gradient_all_reduce(false)))
    };
    let store = models::store();
    let mixed = MixedPrecision { param: Some(Kind::BFloat16), ..Default::default() };
    let model = models::Vectors::new(&store, &[10]);
    let model = builder()?.mixed_precision(mixed).wrap(model, &store)?;
    let mut optimizer = nn::Sgd::default().build(&store, 0.5)?;
    let input = Tensor::full([1], group.rank() as f64, (Kind::Float, device()));
    for step in 0..4 {
        let sum = model.forward_t(&input, true).to_kind(Kind::Float);
        let own = 1.0 - 0.5 * f64::from(step * group.rank() as i32);
        let expected = 10.0 * own * group.rank() as f64;
        ensure!(sum.double_value(&[]) == expected, "step {step}: {sum}, not {expected}");
        optimizer.backward_step(&sum);
    }
    drop(model);

    let model = Model::new()?;
    let wrapped = builder()?.wrap(models::Vectors(Vec::new()), &model.store)?;
    let zero = ZeroRedundancyOptimizer::new(&model.store, group, nn::Sgd::default(), 0.1)?;
    let text = error(zero.backward_step(&model.loss(group.rank(), 0)))?;
    says(&text, &["ZeroRedundancyOptimizer: ", "as PostLocalSgd does: use tch's optimizer"])?;
    let options = JoinOptions { divide_by_initial_world_size: false, ..Default::default() };
    let text = error(wrapped.join_with(options, || Ok::<_, Error>(())))?;
    says(&text, &["join: set divide_by_initial_world_size, or build without PostLocalSgd"])?;
    drop(wrapped);
    let zero = ZeroRedundancyOptimizer::new(&model.store, group, nn::Sgd::default(), 0.1)?;
    let _wrapped = Ddp::new((), &model.store, group)?;
    Ok(zero.backward_step(&model.loss(group.rank(), 1))?)
}

/// Complex parameters are averaged as real ones are.
pub fn complex_averages(group: &ProcessGroup) -> Result<()> {
    let store = models::store();
    let like = (Kind::ComplexFloat, device());
    let weight = Tensor::full([3, 2], group.rank() as f64, like).tr();
    let weight = store.root().add("weight", weight, true);
    let mut averager = ModelAverager::periodic(group, 1, 0)?;
    averager.average_parameters(&store)?;
    let mean = crate::helpers::mean(group, |rank| rank as f64);
    let difference = (weight.detach() - mean).abs().max().double_value(&[]);
    ensure!(difference < 1e-6, "{weight} instead of {mean}");
    Ok(())
}

/// A backward that fails on one rank fails on those that wait for it in the subgroup.
pub fn post_local_failing(group: &ProcessGroup) -> Result<()> {
    let model = Model::new()?;
    let hook = PostLocalSgd::new(group)?;
    let builder = Ddp::builder(group).bucket_cap_mb(1e-5).comm_hook(hook);
    let weights = model.weights.iter().map(Tensor::shallow_clone).collect::<Vec<_>>();
    let wrapped = builder.wrap(weights, &model.store)?;
    let gate = Tensor::ones([], (Kind::Double, device())).set_requires_grad(true);
    let _hook = GradHook::install(&gate, |_| Err("the hook has had enough".into()))?;
    // The gate's gradient comes before those of the first weights.
    let mut loss = Tensor::ones([], (Kind::Double, device()));
    for (index, weight) in model.weights.iter().enumerate() {
        if index == 3 && group.rank() == 1 {
            loss = &loss * &gate;
        }
        loss = &loss * weight.sum(Kind::Double);
    }
    let backward = loss.f_backward().map_err(Error::from_backward);
    let expected = if group.rank() == 1 { "has had enough" } else { "its backward failed" };
    says(&error(backward)?, &[expected])?;
    drop(wrapped);
    // A rank that lacks a gradient names it on all.
    let builder = Ddp::builder(group).bucket_cap_mb(1e-5).comm_hook(PostLocalSgd::new(group)?);
    let weights = model.weights.iter().map(Tensor::shallow_clone).collect::<Vec<_>>();
    let wrapped = builder.wrap(weights, &model.store)?;
    let used = if group.rank() == 1 { &model.weights[1..] } else { &model.weights[..] };
    let sums = used.iter().map(|weight| weight.sum(Kind::Double)).collect::<Vec<_>>();
    let backward = Tensor::stack(&sums, 0).sum(Kind::Double).f_backward();
    says(&error(backward.map_err(Error::from_backward))?, &["rank 1", "w0"])?;
    drop(wrapped);
    Ok(())
}

/// Parts of the group average more often than all of it.
pub fn hierarchical(group: &ProcessGroup) -> Result<()> {
    let ranks = group.world_size();
    let part = if ranks.is_multiple_of(2) { 2 } else { 1 };
    let mut model = Model::new()?;
    let mut averager = ModelAverager::hierarchical(group, &[(2, part), (6, ranks)], 1)?;
    let mut twins = twins(ranks)?;
    for step in 0..8 {
        model.step(group.rank(), step);
        averager.average_parameters(&model.store)?;
        step_all(&mut twins, step, false)?;
        match step {
            6 => average_weights(&mut twins),
            2 | 4 => twins.chunks_mut(part).for_each(average_weights),
            _ => {}
        }
        close(&values(&model.store), &values(&twins[group.rank()].store), 1e-12)
            .with_context(|| format!("step {step}"))?;
    }
    Ok(())
}

/// DiLoCo, written down again for the models of all ranks.
struct Reference {
    twins: Vec<Model>,
    shared: Vec<Tensor>,
    momenta: Vec<Tensor>,
    /// The mean change of each parameter that is under way, and the step that takes it.
    under_way: Vec<Option<(u64, Tensor)>>,
}

impl Reference {
    fn new(ranks: usize) -> Result<Self> {
        let twins = twins(ranks)?;
        let shared: Vec<Tensor> = twins[0].weights.iter().map(|w| w.detach().copy()).collect();
        let momenta = shared.iter().map(Tensor::zeros_like).collect();
        Ok(Self { twins, shared, momenta, under_way: SIZES.iter().map(|_| None).collect() })
    }

    fn begin(&mut self, index: usize, due: u64) {
        let mean = mean(&self.twins, |model| &self.shared[index] - model.weights[index].detach());
        self.under_way[index] = Some((due, mean));
    }

    /// Nesterov's momentum, as PyTorch's SGD has it.
    fn finish(&mut self, index: usize, alpha: f64) {
        let Some((_, mean)) = self.under_way[index].take() else { return };
        if mean.count_nonzero(None).int64_value(&[]) > 0 {
            self.momenta[index] = &self.momenta[index] * 0.9 + &mean;
            self.shared[index] = &self.shared[index] - 0.7 * (mean + 0.9 * &self.momenta[index]);
        }
        for twin in &mut self.twins {
            let weight = &mut twin.weights[index];
            let mixed = &weight.detach() * alpha + (1.0 - alpha) * &self.shared[index];
            tch::no_grad(|| weight.copy_(&mixed));
        }
    }
}

/// With random options, whichever fragments there are and however late exchanges come.
pub fn diloco(group: &ProcessGroup) -> Result<()> {
    let mut draws = Draws(11);
    for round in 0..12 {
        let sync_every = 1 + draws.below(5);
        let options = DiLoCoOptions {
            sync_every,
            // One fragment, or one for each parameter.
            fragments: if sync_every == 5 && draws.below(2) == 0 { 5 } else { 1 },
            fragment_sync_delay: draws.below(sync_every),
            fragment_update_alpha: [0.0, 0.5][draws.below(2) as usize],
            should_quantize: false,
        };
        let mut model = Model::new()?;
        if group.rank() > 0 {
            // All begin with rank 0's.
            tch::no_grad(|| model.weights.iter_mut().for_each(|w| drop(w.fill_(3.0))));
        }
        let outer = nn::sgd(0.9, 0.0, 0.0, true);
        let mut trained = DiLoCo::new(&model.store, group, outer, 0.7, options)?;
        let mut reference = Reference::new(group.world_size())?;
        for step in 1..=13u64 {
            model.step(group.rank(), step as usize);
            trained.step()?;
            step_all(&mut reference.twins, step as usize, false)?;
            for index in 0..SIZES.len() {
                let turn = if options.fragments == 5 { index as u64 + 1 } else { sync_every };
                if step % sync_every == turn % sync_every {
                    reference.begin(index, step + options.fragment_sync_delay);
                }
                if reference.under_way[index].as_ref().is_some_and(|(due, _)| *due == step) {
                    reference.finish(index, options.fragment_update_alpha);
                }
            }
            close(&values(&model.store), &values(&reference.twins[group.rank()].store), 1e-12)
                .with_context(|| format!("round {round}, {options:?}, step {step}"))?;
        }
        trained.synchronize()?;
        for index in 0..SIZES.len() {
            if reference.under_way[index].is_none() {
                reference.begin(index, 13);
            }
            reference.finish(index, 0.0);
        }
        close(&values(&model.store), &values(&reference.twins[0].store), 1e-12)
            .with_context(|| format!("round {round}, {options:?}, in the end"))?;
        same_everywhere(group, &model.store)?;
        ensure!(trained.steps() == 13, "{}", trained.steps());
    }
    Ok(())
}

/// In 8 bits a mean is wrong by half a 255th of the changes' range at most.
pub fn diloco_quantized(group: &ProcessGroup) -> Result<()> {
    let mut model = Model::new()?;
    let before = values(&model.store);
    let options = DiLoCoOptions { should_quantize: true, ..Default::default() };
    let outer = nn::sgd(0.0, 0.0, 0.0, false);
    let mut trained = DiLoCo::new(&model.store, group, outer, 1.0, options)?;
    let mut twins = twins(group.world_size())?;
    for step in 0..3 {
        model.step(group.rank(), step);
        step_all(&mut twins, step, false)?;
    }
    let mut changes = Vec::new();
    for twin in &twins {
        for (name, weight) in values(&twin.store) {
            changes.push((weight - &before[&name]).view([-1]));
        }
    }
    let changes = Tensor::cat(&changes, 0);
    let range = (changes.max() - changes.min()).double_value(&[]);
    trained.synchronize()?;
    average_weights(&mut twins);
    for (name, weight) in values(&model.store) {
        let difference = (weight - &values(&twins[0].store)[&name]).abs();
        if difference.numel() > 0 {
            let largest = difference.max().double_value(&[]);
            ensure!(largest <= range / 255.0 * 0.5001, "{name}: {largest} of a range of {range}");
        }
    }
    same_everywhere(group, &model.store)
}

/// Where nothing was learnt since the last exchange, parameters stay: the outer optimizer's momentum
/// would change them.
pub fn diloco_synchronized(group: &ProcessGroup) -> Result<()> {
    for kind in [Kind::Double, Kind::BFloat16] {
        let options = DiLoCoOptions { sync_every: 2, ..Default::default() };
        let mut model = Model::new()?;
        model.store.set_kind(kind);
        let outer = nn::sgd(0.9, 0.0, 0.0, true);
        let mut trained = DiLoCo::new(&model.store, group, outer, 0.7, options)?;
        for step in 0..3 {
            model.step(group.rank(), step);
            trained.step()?;
            if step == 0 {
                continue;
            }
            // The second step has exchanged everything, the third nothing.
            let before = model.weights[0].copy();
            trained.synchronize()?;
            ensure!((model.weights[0] == before) == (step == 1), "{kind:?}, step {step}");
            let before = model.weights[0].copy();
            trained.synchronize()?;
            ensure!(model.weights[0] == before, "{kind:?}, step {step}: synchronized twice");
            same_everywhere(group, &model.store)?;
        }
    }
    Ok(())
}

/// A training that is resumed goes on as one that was not stopped.
pub fn diloco_resumed(group: &ProcessGroup) -> Result<()> {
    let options = DiLoCoOptions { sync_every: 3, ..Default::default() };
    let outer = || nn::sgd(0.9, 0.0, 0.0, true);
    let mut model = Model::new()?;
    let mut trained = DiLoCo::new(&model.store, group, outer(), 0.7, options)?;
    model.step(group.rank(), 0);
    trained.step()?;
    trained.synchronize()?;
    let mut other = Model::new()?;
    let mut resumed = DiLoCo::new(&other.store, group, outer(), 0.7, options)?;
    other.store.copy(&model.store)?;
    resumed.resume(trained.steps())?;
    resumed.outer().load_state(&trained.outer().state()?)?;
    other.optimizer = nn::sgd(0.0, 0.0, 0.0, false).build(&other.store, 0.1)?;
    model.optimizer = nn::sgd(0.0, 0.0, 0.0, false).build(&model.store, 0.1)?;
    for step in 1..5 {
        model.step(group.rank(), step);
        trained.step()?;
        other.step(group.rank(), step);
        resumed.step()?;
        close(&values(&other.store), &values(&model.store), 0.0)
            .with_context(|| format!("step {step}"))?;
    }
    Ok(())
}

/// What makes no sense is an error that says what would.
pub fn misused(group: &ProcessGroup) -> Result<()> {
    let ranks = group.world_size();
    let averager = ModelAverager::periodic(group, 0, 0).map(drop);
    says(&error(averager)?, &["model averager: the period 0 must be above 0"])?;
    let averager = ModelAverager::hierarchical(group, &[(2, ranks), (2, ranks)], 0).map(drop);
    says(&error(averager)?, &["the period 2 must be above 2"])?;
    let averager = ModelAverager::hierarchical(group, &[(2, ranks + 1)], 0).map(drop);
    says(&error(averager)?, &[&format!("{} ranks must divide the group's {ranks}", ranks + 1)])?;
    let averager = ModelAverager::hierarchical(group, &[(2, 1)], 0).map(drop);
    says(&error(averager)?, &[&format!("the last level must have all {ranks} ranks")])?;

    let period = 2 + group.rank() as u64;
    let averager = ModelAverager::hierarchical(group, &[(period, ranks)], 0).map(drop);
    says(
        &error(averager)?,
        &["ranks differ: rank 0 has averages [(2, ", "rank 1 has averages [(3"],
    )?;

    let model = Model::new()?;
    let wrong = |options| {
        let outer = nn::sgd(0.0, 0.0, 0.0, false);
        error(DiLoCo::new(&model.store, group, outer, 0.7, options).map(drop))
    };
    let default = DiLoCoOptions::default();
    let text = wrong(DiLoCoOptions { sync_every: 10 + group.rank() as u64, ..default })?;
    says(&text, &["DiLoCo: ranks differ: rank 0 has", "sync_every: 10,", "sync_every: 11,"])?;
    let text = wrong(DiLoCoOptions { fragments: 6, ..default })?;
    says(&text, &["DiLoCo: 6 fragments: there must be 1 to 5"])?;
    let text = wrong(DiLoCoOptions { sync_every: 0, ..default })?;
    says(&text, &["not more than sync_every, 0"])?;
    let text = wrong(DiLoCoOptions { fragment_sync_delay: 100, ..default })?;
    says(&text, &["fragment_sync_delay 100 must be below sync_every, 100"])?;
    let text = wrong(DiLoCoOptions { fragment_update_alpha: 1.0, ..default })?;
    says(&text, &["fragment_update_alpha 1 must be at least 0 and below 1"])
}

/// Ranks that are in different steps do not take each other's parameters.
pub fn out_of_step(group: &ProcessGroup) -> Result<()> {
    let model = Model::new()?;
    let mut averager = ModelAverager::periodic(&group.duplicate()?, 2, 0)?;
    let own = group.duplicate()?;
    let options = DiLoCoOptions { sync_every: 2, ..Default::default() };
    let outer = nn::sgd(0.0, 0.0, 0.0, false);
    let mut trained = DiLoCo::new(&model.store, &own, outer, 0.7, options)?;
    if group.rank() == 1 {
        averager.resume(1);
        trained.step()?;
    }
    let averaged = averager
        .average_parameters(&model.store)
        .and_then(|_| averager.average_parameters(&model.store));
    says(&error(averaged)?, &["ranks disagree"])?;
    let exchanged = trained.step().and_then(|()| trained.synchronize());
    says(&error(exchanged)?, &["ranks disagree"])
}
