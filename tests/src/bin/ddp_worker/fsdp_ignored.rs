//! Parameters that an `Fsdp` ignores, compared with a `Ddp` that does not have them.

use anyhow::{Context, Result, ensure};
use flow_autograd::OptimizerState;
use flow_comm::ProcessGroup;
use flow_ddp::{
    Checkpoints, Ddp, DistributedSampler, Fsdp, MixedPrecision, ZeroRedundancyOptimizer,
};
use tch::nn::{Adam, ModuleT, OptimizerConfig, Sgd, VarStore};
use tch::{COptimizer, Kind, Tensor};

use crate::helpers::{Draws, error, own_group, random_models, says};
use crate::models::{Vectors, device, store};
use crate::optimizers::{Config, LARGE, Parameters, configs, same_bits, same_elements, same_state};
use crate::sharded_pair::draw_uses;

/// What is drawn for a training, alike on all ranks.
#[derive(Debug)]
struct Options {
    model: Vec<(i64, Kind)>,
    /// Of each parameter. All ranks use the last one, which is in common.
    are_ignored: Vec<bool>,
    /// The first parameter is frozen from the start.
    freezes: bool,
    find_unused: bool,
    micro_batches: u64,
    config: Config,
}

impl Options {
    fn draw(draws: &mut Draws) -> Self {
        let kinds = [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half];
        let count = 2 + draws.below(7) as usize;
        let mut model = Vec::new();
        let mut are_ignored = Vec::new();
        for index in 0..count {
            let mut length = [1, 0, 10, 2 * LARGE][draws.below(4) as usize];
            // A few have several chunks of an optimizer.
            if draws.below(20) == 0 {
                length = 20 * LARGE + 7;
            }
            model.push((length, kinds[draws.below(4) as usize]));
            are_ignored.push(draws.below(2) == 0 && index + 1 < count);
        }
        Self {
            model,
            are_ignored,
            freezes: draws.below(3) == 0,
            find_unused: draws.below(2) == 0,
            micro_batches: 1 + draws.below(3),
            config: configs()[draws.below(6) as usize],
        }
    }

    /// Returns the parameters of `store`, of which each rank has its own values, and those that are not
    /// ignored.
    fn parameters(
        &self,
        store: &VarStore,
        rank: usize,
    ) -> Result<(Parameters, Vec<(String, Tensor)>)> {
        let all = Parameters::new(store, &self.model);
        let mut common = Vec::new();
        for (index, tensor) in all.0.iter().enumerate() {
            let mut tensor = tensor.shallow_clone();
            let _ = tch::no_grad(|| tensor.f_add_scalar_(0.1 * rank as f64))?;
            if index == 0 && self.freezes {
                let _ = tensor.set_requires_grad(false);
            }
            if !self.are_ignored[index] {
                common.push((format!("w{index}"), tensor));
            }
        }
        Ok((all, common))
    }

    /// Returns the names of the ignored parameters; of the first its other one.
    fn ignored(&self) -> Vec<String> {
        let ignored = (0..self.model.len()).filter(|&index| self.are_ignored[index]);
        ignored.map(|index| if index == 0 { "tied".into() } else { format!("w{index}") }).collect()
    }

    /// Returns an optimizer of the ignored parameters, or of the others.
    fn optimizer(&self, parameters: &Parameters, is_of_ignored: bool) -> Result<COptimizer> {
        let mut optimizer = self.config.build_copt(0.1)?;
        for (index, tensor) in parameters.0.iter().enumerate() {
            if self.are_ignored[index] == is_of_ignored {
                optimizer.add_parameters(tensor, index % 2)?;
            }
        }
        Ok(optimizer)
    }
}

/// A loss by which the gradient of each parameter that is used depends on all of them.
fn loss(parameters: &Parameters, uses: &[(usize, f64)]) -> Result<Tensor> {
    let mut product = Tensor::ones([], (Kind::Double, device()));
    for &(index, factor) in uses {
        let sum = parameters.0[index].sum(Kind::Double);
        product *= sum * (1e-6 * factor) + 1.0;
    }
    Ok(parameters.loss(uses)? + product)
}

/// Random models and random subsets of their parameters: all have the same bits as where a `Ddp` trains
/// the others, and each rank the ignored ones. So has the optimizer's state.
pub fn random(group: &ProcessGroup) -> Result<()> {
    random_models(group, 24, |group, seed| {
        let mut draws = Draws(seed);
        let options = Options::draw(&mut draws);
        trained(group, &mut draws, &options).with_context(|| format!("{options:?}"))
    })
}

fn trained(group: &ProcessGroup, draws: &mut Draws, options: &Options) -> Result<()> {
    let [plain_store, own_store] = [store(), store()];
    let (plain, common) = options.parameters(&plain_store, group.rank())?;
    let builder = Ddp::builder(group).find_unused_parameters(options.find_unused);
    let plain = builder.wrap_tensors(plain, common, Vec::new())?;
    let mut plain_common = options.optimizer(&plain, false)?;
    let mut plain_ignored = options.optimizer(&plain, true)?;

    let (sharded, common) = options.parameters(&own_store, group.rank())?;
    let names = options.ignored();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let sharded = Fsdp::builder(group)
        .find_unused_parameters(options.find_unused)
        .bucket_cap_mb(0.1)
        .ignored_parameters(&names)
        .wrap(sharded, &own_store)?;
    let optimizer = sharded.optimizer(options.config, 0.1)?;
    let mut own_ignored = options.optimizer(&sharded, true)?;
    same_bits(&own_store, &plain_store).context("before the first step")?;

    let count = options.model.len();
    for step in 0..5u32 {
        let learning_rate = 0.1 / f64::from(1 + step);
        for optimizer in [&mut plain_common, &mut plain_ignored, &mut own_ignored] {
            optimizer.set_learning_rate(learning_rate)?;
            optimizer.zero_grad()?;
        }
        optimizer.set_lr(learning_rate)?;
        optimizer.zero_grad()?;
        for number in 1..=options.micro_batches {
            let uses = draw_uses(draws, group, count, options.find_unused);
            for model in [&plain, &*sharded] {
                let backward =
                    |model: &Ddp<Parameters>| anyhow::Ok(loss(model, &uses)?.f_backward()?);
                if number == options.micro_batches {
                    backward(model)?;
                } else {
                    model.without_sync(backward)?;
                }
            }
        }
        for (name, tensor) in common.iter().filter(|_| group.world_size() > 1) {
            ensure!(!tensor.grad().defined(), "step {step}: the gradient of {name} is left");
        }
        for (index, (own, plain)) in sharded.0.iter().zip(&plain.0).enumerate() {
            if options.are_ignored[index] && plain.grad().defined() {
                same_elements(&format!("the gradient of w{index}"), &own.grad(), &plain.grad())?;
            }
        }
        for optimizer in [&mut plain_common, &mut plain_ignored, &mut own_ignored] {
            optimizer.step()?;
        }
        optimizer.step()?;
        same_bits(&own_store, &plain_store).with_context(|| format!("step {step}"))?;
        let to = step as usize % group.world_size();
        optimizer.consolidate_state_dict(to)?;
        if group.rank() == to {
            same_state(&optimizer.state()?, &plain_common.state()?)?;
        }
    }
    Ok(())
}

/// A model of which the last parameter is each rank's own, which begins with `value`.
fn one_ignored(
    group: &ProcessGroup,
    store: &VarStore,
    value: f64,
) -> Result<(Fsdp<Vectors>, ZeroRedundancyOptimizer)> {
    let model = Vectors::new(store, &[100_000, 10, 30]);
    let _ = tch::no_grad(|| model.0[2].shallow_clone().f_fill_(value))?;
    let model = Fsdp::builder(group).ignored_parameters(&["w2"]).wrap(model, store)?;
    let optimizer = model.optimizer(Adam::default(), 0.1)?;
    Ok((model, optimizer))
}

fn backward(model: &Fsdp<Vectors>) -> Result<()> {
    Ok(model.weighted_sum(&[(0, 1.0), (1, 2.0), (2, 3.0)]).f_backward()?)
}

/// Ignored parameters that are equal are in a checkpoint, from which any number of ranks goes on. Others are
/// an error of all ranks.
pub fn saved(group: &ProcessGroup) -> Result<()> {
    let mut pid = [i64::from(std::process::id())];
    group.broadcast(&mut pid, 0)?;
    let folder = std::env::temp_dir().join(format!("flow-fsdp-ignored-{}", pid[0]));
    let sampler = DistributedSampler::new(10, group);
    let own = store();
    let (model, optimizer) = one_ignored(group, &own, 5.0)?;
    backward(&model)?;
    optimizer.step()?;
    let mut checkpoints = Checkpoints::open(&folder, group)?;
    checkpoints.save(1, &model, &own, &optimizer, &sampler, &())?;
    let last = group.world_size() - 1;
    if group.rank() == last {
        let _ = tch::no_grad(|| model.0[2].get(7).f_add_scalar_(1.0))?;
    }
    let of_ddp: &Ddp<Vectors> = &model;
    for text in [
        error(checkpoints.save(2, &model, &own, &optimizer, &sampler, &()))?,
        error(checkpoints.save(2, of_ddp, &own, &optimizer, &sampler, &()))?,
    ] {
        let words = ["the ignored parameters", "rank 0 has w2 [30] Float", &format!("rank {last}")];
        says(&text, &words)?;
    }
    drop(checkpoints);
    let alone = own_group(group)?;
    for part in [Some(group), Some(&alone).filter(|_| group.rank() == 0)].into_iter().flatten() {
        let resumed = store();
        let (model, mut optimizer) = one_ignored(part, &resumed, part.rank() as f64)?;
        let mut checkpoints = Checkpoints::open(&folder, part)?;
        let checkpoint = checkpoints.latest::<()>()?.context("it was saved")?;
        let mut sampler = DistributedSampler::new(10, part);
        checkpoint.resume(&resumed, &mut optimizer, &mut sampler)?;
        let expected = Tensor::full([30], 5.0, (Kind::Float, device()));
        same_elements("w2", &model.0[2], &expected)?;
        for index in [0, 1] {
            same_elements("a common one", &model.0[index], &of_ddp.0[index])?;
        }
        backward(&model)?;
        optimizer.step()?;
    }
    group.barrier()?;
    if group.rank() == 0 {
        std::fs::remove_dir_all(&folder)?;
    }
    Ok(())
}

/// What rank 0 changes in `write` is changed on all ranks, and nothing else.
pub fn written(group: &ProcessGroup) -> Result<()> {
    let own = store();
    let root = own.root();
    let [common, first, mut second] =
        ["common", "first", "second"].map(|name| root.ones(name, &[9]));
    let rank = group.rank() as f64;
    let value = |tensor: &Tensor| tensor.double_value(&[8]);
    let _ = tch::no_grad(|| first.shallow_clone().f_fill_(rank))?;
    let _ = tch::no_grad(|| second.f_fill_(rank))?;
    let builder = Fsdp::builder(group).ignored_parameters(&["first", "second"]);
    let model = builder.wrap((), &own)?;
    model.write(|| common.shallow_clone().f_fill_(7.0).map(|_| ()))?;
    ensure!((value(&common), value(&first), value(&second)) == (7.0, rank, rank));
    model.write(|| second.shallow_clone().f_fill_(8.0).map(|_| ()))?;
    ensure!((value(&common), value(&first), value(&second)) == (7.0, rank, 8.0));
    Ok(())
}

/// Gradients of ignored parameters are not clipped with the others, nor rounded in mixed precision, and
/// `zero_grad` of the model drops them.
pub fn gradients(group: &ProcessGroup) -> Result<()> {
    let half = MixedPrecision { param: Some(Kind::BFloat16), ..Default::default() };
    let own = store();
    let model = Vectors::new(&own, &[1000, 10]);
    let builder = Fsdp::builder(group).ignored_parameters(&["w1"]).mixed_precision(half);
    let model = builder.wrap(model, &own)?;
    let optimizer = model.optimizer(Sgd::default(), 1.0)?;
    let exact = 1.0 + 1.0 / 1024.0;
    let input = Tensor::ones([1], (Kind::Float, device()));
    let _ = tch::no_grad(|| model.0[1].shallow_clone().fill_(exact));
    let output = model.forward_t(&input, true).to_kind(Kind::Float);
    let expected = 1000.0 + 10.0 * exact;
    ensure!(output.double_value(&[]) == expected, "{output}, not {expected}");
    (output + (&model.0[1] * exact).sum(Kind::Float)).f_backward()?;
    let gradient = || model.0[1].grad().double_value(&[3]);
    ensure!(gradient() == 1.0 + exact, "{}", gradient());
    optimizer.clip_grad_norm(1e-3)?;
    ensure!(gradient() == 1.0 + exact, "{} once clipped", gradient());
    model.zero_grad()?;
    ensure!(!model.0[1].grad().defined(), "the gradient is left");
    Ok(())
}

/// What cannot be ignored is an error of all ranks.
pub fn misused(group: &ProcessGroup) -> Result<()> {
    let wrapped = |names: &[&str]| {
        let own = store();
        let _ = own.root().add("mean", Tensor::zeros([3], (Kind::Float, device())), false);
        let model = Vectors::new(&own, &[10, 10]);
        Fsdp::builder(group).ignored_parameters(names).wrap(model, &own)
    };
    let text = error(wrapped(&["w0", "w7", "mean"]))?;
    says(&text, &["ignored_parameters names w7, mean"])?;
    says(&error(wrapped(&["w0", "w1"]))?, &["nothing to wrap"])?;
    let last = group.world_size() - 1;
    let is_last = group.rank() == last;
    let text = error(wrapped(if is_last { &["w1"] } else { &["w0"] }))?;
    let words = [
        r#"rank 0 has the ignored parameters ["w0 [10] Float"]"#,
        &format!(r#"rank {last} has the ignored parameters ["w1 [10] Float"]"#),
    ];
    says(&text, &words)?;
    let text = error(wrapped(if is_last { &["w7"] } else { &["w0"] }))?;
    says(&text, &[&format!("rank {last} has a model that cannot be wrapped"), "names w7"])?;

    let own = store();
    let mut model = Vectors::new(&own, &[10, 4]);
    let part = model.0[0].detach().narrow(0, 3, 4);
    model.0[1].set_data(&part);
    let builder = Fsdp::builder(group).ignored_parameters(&["w1"]);
    says(&error(builder.wrap(model, &own))?, &["the ignored w1 lies in the memory of w0"])?;

    let left = store();
    drop(Fsdp::new(Vectors::new(&left, &[10, 10]), &left, group)?);
    let again = Vectors(left.trainable_variables());
    let builder = Fsdp::builder(group).ignored_parameters(&["w1"]);
    says(&error(builder.wrap(again, &left))?, &["have w1 in common", "call into_inner"])
}
