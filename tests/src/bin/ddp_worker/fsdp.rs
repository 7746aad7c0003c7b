//! `Fsdp`, compared with tch's optimizer beside a `Ddp`.

use anyhow::{Context, Result, ensure};
use flow_autograd::OptimizerState;
use flow_comm::ProcessGroup;
use flow_ddp::{Ddp, Fsdp, FsdpBuilder, GradScaler, MixedPrecision, ReduceOp};
use tch::nn::{self, Adam, ModuleT, OptimizerConfig, VarStore};
use tch::{Kind, Tensor};

use crate::helpers::{Draws, close, part, random_models, values};
use crate::models::{batchnorm, device, store};
use crate::optimizers::{
    Config, LARGE, Parameters, configs, drop_gradients, same_bits, same_elements, same_state,
};
use crate::sharded_pair::{self, Pair, draw_uses};

fn new_pair(
    group: &ProcessGroup,
    kinds: &[(i64, Kind)],
    config: Config,
    find_unused: bool,
) -> Result<Pair<Fsdp<Parameters>>> {
    let plain_store = store();
    let zero_store = store();
    let plain = Ddp::builder(group)
        .find_unused_parameters(find_unused)
        .wrap(Parameters::new(&plain_store, kinds), &plain_store)?;
    let sharded = Fsdp::builder(group)
        .find_unused_parameters(find_unused)
        .bucket_cap_mb(0.1)
        .wrap(Parameters::new(&zero_store, kinds), &zero_store)?;
    let optimizer = config.build(&plain_store, 0.1)?;
    let zero = sharded.optimizer(config, 0.1)?;
    Ok(Pair { plain, optimizer, plain_store, sharded, zero, zero_store })
}

/// Random models: the weights have the same bits as with a `Ddp`, and so has the optimizer's state, with
/// unused, frozen and tied parameters, groups, gradients of several backwards, and no elements. Where
/// gradients are added to reduced ones, or clipped by a norm, they are close.
pub fn random(group: &ProcessGroup) -> Result<()> {
    random_models(group, 24, trained)
}

/// The same in groups of some of the ranks: one on each machine, and more on one than on the other.
pub fn in_parts(group: &ProcessGroup) -> Result<()> {
    for ranks in [&[0, 2][..], &[3, 1, 0], &[2, 3]] {
        if let Some(part) = group.new_group(ranks)? {
            for seed in 0..6 {
                trained(&part, seed).with_context(|| format!("seed {seed}, ranks {ranks:?}"))?;
            }
        }
        group.barrier()?;
    }
    Ok(())
}

fn trained(group: &ProcessGroup, seed: u64) -> Result<()> {
    let mut draws = Draws(seed);
    let config = configs()[seed as usize % 6];
    // Sums in another order.
    let keeps = draws.below(4) == 0;
    let max_norm = (draws.below(4) == 0).then_some(0.5);
    let has_bits = !keeps && max_norm.is_none();
    let mut kinds = vec![Kind::Float, Kind::Double];
    if has_bits {
        kinds.extend([Kind::BFloat16, Kind::Half]);
        if matches!(config, Config::Sgd(_)) && draws.below(2) == 0 {
            kinds.push(Kind::ComplexFloat);
        }
    }
    let count = 1 + draws.below(8) as usize;
    let model: Vec<(i64, Kind)> = (0..count)
        .map(|_| {
            let mut length = [1, 0, 10, 2 * LARGE][draws.below(4) as usize];
            // A few have several chunks of an optimizer.
            if draws.below(10) == 0 {
                length = 20 * LARGE + 7;
            }
            (length, kinds[draws.below(kinds.len() as u64) as usize])
        })
        .collect();
    let find_unused = draws.below(2) == 0;
    let micro_batches = draws.below(3);
    let freezes = count > 1 && draws.below(2) == 0;
    let mut pair = new_pair(group, &model, config, find_unused)?;
    for step in 0..6u32 {
        let uses = draw_uses(&mut draws, group, count, find_unused);
        let learning_rate = 0.1 / f64::from(1 + step);
        pair.optimizer.set_lr(learning_rate);
        pair.zero.set_lr(learning_rate)?;
        if step == 1 && count > 1 {
            pair.optimizer.set_weight_decay_group(1, 0.2);
            pair.zero.set_weight_decay_group(1, 0.2)?;
        }
        if freezes && (step == 2 || step == 4) {
            let _ = pair.plain.0[0].set_requires_grad(step == 4);
            pair.plain.refresh()?;
            let _ = pair.sharded.0[0].set_requires_grad(step == 4);
            pair.sharded.refresh()?;
        }
        if !keeps {
            // Not zero_grad: it refuses views, which gradients of complex parameters are.
            drop_gradients(&pair.plain_store)?;
            pair.zero.zero_grad()?;
        }
        for model in [&pair.plain, &*pair.sharded] {
            for _ in 0..micro_batches {
                model.without_sync(|model| anyhow::Ok(model.loss(&uses)?.f_backward()?))?;
            }
            model.loss(&uses)?.f_backward()?;
        }
        if let Some(max) = max_norm {
            pair.optimizer.clip_grad_norm(max);
            pair.zero.clip_grad_norm(max)?;
        }
        pair.optimizer.step();
        pair.zero.step()?;
        let what = || format!("step {step}, {config:?}, {model:?}, {uses:?}");
        if !has_bits {
            let expected = values(&pair.plain_store);
            close(&values(&pair.zero_store), &expected, 1e-4).with_context(what)?;
            continue;
        }
        same_bits(&pair.zero_store, &pair.plain_store).with_context(what)?;
        let to = step as usize % group.world_size();
        pair.zero.consolidate_state_dict(to)?;
        if group.rank() == to {
            same_state(&pair.zero.state()?, &pair.optimizer.state()?).with_context(what)?;
        }
    }
    // Left as a model of this rank alone.
    let before: Vec<Tensor> = pair.sharded.0.iter().map(|tensor| tensor.detach().copy()).collect();
    let inner = pair.sharded.into_inner();
    group.barrier()?;
    for tensor in &inner.0 {
        let _ = tch::no_grad(|| tensor.shallow_clone().g_add_scalar_(1.0 + group.rank() as f64));
    }
    group.barrier()?;
    for (index, tensor) in inner.0.iter().enumerate() {
        let expected = &before[index] + (1.0 + group.rank() as f64);
        same_elements(&format!("w{index}"), tensor, &expected)?;
    }
    Ok(())
}

/// A model with buffers, in channels-last memory, and its losses.
pub fn batch_norm(group: &ProcessGroup) -> Result<()> {
    let [plain_store, own_store] = [store(), store()];
    let new = |store: &VarStore| {
        tch::manual_seed(7);
        let model = batchnorm(&store.root());
        for (name, mut tensor) in store.variables() {
            if name.starts_with("conv") {
                let memory = tensor.permute([0, 2, 3, 1]).contiguous().permute([0, 3, 1, 2]);
                tensor.set_data(&memory.detach());
            }
        }
        model
    };
    let plain = Ddp::new(new(&plain_store), &plain_store, group)?;
    let builder = Fsdp::builder(group).static_graph(true);
    let sharded = builder.wrap(new(&own_store), &own_store)?;
    let mut optimizer = Adam::default().build(&plain_store, 0.01)?;
    let own = sharded.optimizer(Adam::default(), 0.01)?;
    for step in 0..5 {
        tch::manual_seed(step);
        let ranks = group.world_size() as i64;
        let input = Tensor::randn([4 * ranks, 3, 8, 8], (Kind::Float, device()));
        let labels = Tensor::randint(10, [4 * ranks], (Kind::Int64, device()));
        let [input, labels] = [input, labels].map(|joined| part(&joined, group));
        let loss = plain.forward_t(&input, true).cross_entropy_for_logits(&labels);
        optimizer.backward_step(&loss);
        let loss = sharded.forward_t(&input, true).cross_entropy_for_logits(&labels);
        own.backward_step(&loss)?;
        same_bits(&own_store, &plain_store).with_context(|| format!("step {step}"))?;
    }
    Ok(())
}

/// Mixed precision with a scaler, whose overflow on one rank is one of all. Of the second model some ranks
/// have no part.
pub fn scaled(group: &ProcessGroup) -> Result<()> {
    for config in configs() {
        scaled_with(group, config, LARGE / 8, true)?;
        scaled_with(group, config, 1, false)?;
    }
    Ok(())
}

fn scaled_with(group: &ProcessGroup, config: Config, width: i64, bias: bool) -> Result<()> {
    let half = MixedPrecision { param: Some(Kind::Half), ..Default::default() };
    let layer = nn::LinearConfig { bias, ..Default::default() };
    let [plain_store, own_store] = [store(), store()];
    let new = |store: &VarStore| {
        tch::manual_seed(3);
        nn::seq_t()
            .add(nn::linear(store.root() / "in", 8, width, layer))
            .add_fn(|x| x.relu())
            .add(nn::linear(store.root() / "out", width, 3, layer))
    };
    let builder = Ddp::builder(group).mixed_precision(half);
    let plain = builder.wrap(new(&plain_store), &plain_store)?;
    let builder = Fsdp::builder(group).mixed_precision(half);
    let sharded = builder.wrap(new(&own_store), &own_store)?;
    let mut optimizer = config.build(&plain_store, 0.01)?;
    let mut own = sharded.optimizer(config, 0.01)?;
    let mut scalers = [0, 1].map(|_| GradScaler::new(1024.0, 2.0, 0.5, 3));
    for step in 0..6usize {
        let overflows = step == 2 || step == 4;
        let is_culprit = step % group.world_size() == group.rank();
        let factor = if overflows && is_culprit { f64::INFINITY } else { 1e-2 };
        let like = (Kind::Float, device());
        let input = (Tensor::arange(16, like) + step as f64 + group.rank() as f64).sin();
        let loss = |output: Tensor| (output.to_kind(Kind::Float) * factor).sum(Kind::Float);
        let [first, second] = &mut scalers;
        optimizer.zero_grad();
        let output = plain.forward_t(&input.view([2, 8]), true);
        first.scale(&loss(output)).f_backward()?;
        let is_taken = first.step(&mut optimizer)?;
        first.update()?;
        ensure!(is_taken != overflows, "step {step}");
        own.zero_grad()?;
        let output = sharded.try_forward_t(&input.view([2, 8]), true)?;
        second.scale(&loss(output)).f_backward()?;
        ensure!(second.step(&mut own)? == is_taken, "step {step} of Fsdp");
        second.update()?;
        ensure!(first == second, "{first:?} is not {second:?}");
        same_bits(&own_store, &plain_store).with_context(|| format!("step {step}"))?;
    }
    Ok(())
}

const MIB: usize = 1 << 20;

/// Parameters and the optimizer's state are there once for all ranks of a machine, and no rank has a gradient
/// as a whole.
pub fn memory(group: &ProcessGroup) -> Result<()> {
    let builder = Fsdp::builder(group).bucket_cap_mb(2.0);
    takes_at_most(group, builder, 32, 512, 10 * MIB)
}

/// Of layers of 16 MiB, a rank has the whole gradient of one at a time.
pub fn memory_of_large(group: &ProcessGroup) -> Result<()> {
    takes_at_most(group, Fsdp::builder(group), 6, 2048, 24 * MIB)
}

/// Checks the memory of a model of so many layers with Adam: that of parameters and state, and on each rank
/// `unreduced` bytes at most for the gradients of some buckets.
fn takes_at_most(
    group: &ProcessGroup,
    builder: FsdpBuilder,
    layers: usize,
    width: i64,
    unreduced: usize,
) -> Result<()> {
    let model_bytes = layers * (width * width) as usize * 4;
    let ranks = group.world_size();
    let store = store();
    let mut net = nn::seq_t();
    for layer in 0..layers {
        let path = store.root() / format!("fc{layer}");
        let config = nn::LinearConfig { bias: false, ..Default::default() };
        net = net.add(nn::linear(path, width, width, config)).add_fn(|x| x.tanh());
    }
    let before = shared_bytes(group)?;
    let model = builder.wrap(net, &store)?;
    let optimizer = model.optimizer(Adam::default(), 1e-3)?;
    let input = Tensor::ones([2, width], (Kind::Float, device()));
    for _ in 0..3 {
        optimizer.zero_grad()?;
        model.try_forward_t(&input, true)?.sum(Kind::Float).f_backward()?;
        for tensor in store.trainable_variables() {
            ensure!(!tensor.grad().defined(), "a gradient is left");
        }
        optimizer.step()?;
    }
    let bytes = shared_bytes(group)? - before;
    let machines = (0..ranks).filter(|&rank| group.ranks_on_machine_of(rank)[0] == rank).count();
    // Parameters and two parts of Adam's state: the gradients that a rank keeps lie in memory of its own.
    let expected = 3 * model_bytes * machines;
    ensure!(bytes >= expected, "{bytes} bytes, not {expected}");
    ensure!(bytes <= expected + ranks * unreduced, "{bytes} bytes, not {expected}");
    Ok(())
}

/// The bytes of memory that processes can share of all ranks: what is shared counts once.
pub fn shared_bytes(group: &ProcessGroup) -> Result<usize> {
    group.barrier()?;
    let rollup = std::fs::read_to_string("/proc/self/smaps_rollup")?;
    let line = rollup.lines().find_map(|line| line.strip_prefix("Pss_Shmem:"));
    let kib = line.and_then(|rest| rest.split_whitespace().next());
    let mut bytes = [kib.context("no Pss_Shmem in smaps_rollup")?.parse::<i64>()? << 10];
    group.all_reduce(&mut bytes, ReduceOp::Sum)?;
    Ok(bytes[0] as usize)
}

/// A training goes on from checkpoints: see [`sharded_pair::resumed`].
pub fn resumed(group: &ProcessGroup) -> Result<()> {
    sharded_pair::resumed(group, "fsdp", |group, model, config| {
        new_pair(group, model, config, false)
    })
}
