//! `ZeroRedundancyOptimizer`, compared with tch's optimizer beside the same `Ddp`.

use anyhow::{Context, Result, ensure};
use flow_autograd::OptimizerState;
use flow_comm::ProcessGroup;
use flow_ddp::{Ddp, DdpBuilder, JoinOptions, TryBackwardStep, ZeroRedundancyOptimizer, join};
use tch::nn::{self, Adam, OptimizerConfig, VarStore};
use tch::{Kind, Tensor};

use crate::helpers::{Draws, random_models};
use crate::models::{device, store};
use crate::optimizers::{
    Config, LARGE, Parameters, configs, drop_gradients, same_bits, same_state,
};
use crate::sharded_pair::{self, Pair, draw_uses};

fn new_pair(
    group: &ProcessGroup,
    kinds: &[(i64, Kind)],
    config: Config,
    builder: impl Fn() -> DdpBuilder,
) -> Result<Pair<Ddp<Parameters>>> {
    let plain_store = store();
    let zero_store = store();
    let plain = builder().wrap(Parameters::new(&plain_store, kinds), &plain_store)?;
    let sharded = builder().wrap(Parameters::new(&zero_store, kinds), &zero_store)?;
    let optimizer = config.build(&plain_store, 0.1)?;
    let zero = ZeroRedundancyOptimizer::new(&zero_store, group, config, 0.1)?;
    Ok(Pair { plain, optimizer, plain_store, sharded, zero, zero_store })
}

/// Random models: the weights have the same bits as with tch's optimizer, and so has the state, with
/// unused, frozen and tied parameters, groups, gradients that add up or are clipped, and no elements.
pub fn random(group: &ProcessGroup) -> Result<()> {
    random_models(group, 12, trained)
}

fn trained(group: &ProcessGroup, seed: u64) -> Result<()> {
    let mut draws = Draws(seed);
    let config = configs()[seed as usize % 6];
    let mut kinds = vec![Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half];
    let is_complex = matches!(config, Config::Sgd(_)) && draws.below(2) == 0;
    if is_complex {
        kinds.push(Kind::ComplexFloat);
    }
    let count = 1 + draws.below(8) as usize;
    let model: Vec<(i64, Kind)> = (0..count)
        .map(|_| {
            let length = [1, 0, 10, 2 * LARGE, 3 * LARGE + 7][draws.below(5) as usize];
            (length, kinds[draws.below(kinds.len() as u64) as usize])
        })
        .collect();
    let find_unused = draws.below(2) == 0;
    let view = draws.below(2) == 0;
    // Gradients stay from step to step, and add up.
    let keeps = draws.below(3) == 0;
    let max_norm = (!is_complex && draws.below(2) == 0).then_some(0.5);
    let micro_batches = draws.below(3);
    let freezes = count > 1 && draws.below(2) == 0;
    let builder =
        || Ddp::builder(group).find_unused_parameters(find_unused).gradient_as_bucket_view(view);
    let mut pair = new_pair(group, &model, config, builder)?;
    for step in 0..6u32 {
        let uses = draw_uses(&mut draws, group, count, find_unused);
        let learning_rate = 0.1 / f64::from(1 + step);
        pair.optimizer.set_lr(learning_rate);
        pair.zero.set_lr(learning_rate)?;
        if step == 1 && count > 1 {
            pair.optimizer.set_lr_group(1, 0.03);
            pair.zero.set_lr_group(1, 0.03)?;
            pair.optimizer.set_weight_decay_group(1, 0.2);
            pair.zero.set_weight_decay_group(1, 0.2)?;
        }
        if freezes && (step == 2 || step == 4) {
            for model in [&mut pair.plain, &mut pair.sharded] {
                let _ = model.0[0].set_requires_grad(step == 4);
                model.refresh()?;
            }
        }
        if !keeps {
            // Not zero_grad: it refuses views, which gradients of complex parameters are.
            drop_gradients(&pair.plain_store)?;
            pair.zero.zero_grad()?;
        }
        for model in [&pair.plain, &pair.sharded] {
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
        same_bits(&pair.zero_store, &pair.plain_store).with_context(what)?;
        let to = step as usize % group.world_size();
        pair.zero.consolidate_state_dict(to)?;
        if group.rank() == to {
            same_state(&pair.zero.state()?, &pair.optimizer.state()?).with_context(what)?;
        }
    }
    Ok(())
}

/// Parameters of several dimensions, none of them, and elements in another order in memory; gradients
/// in an order that is not the parameter's.
pub fn layouts(group: &ProcessGroup) -> Result<()> {
    let new = |store: &VarStore| {
        let root = store.root();
        let like = (Kind::Float, device());
        let shapes = [
            Tensor::ones([], like),
            Tensor::ones([0, 3], like),
            Tensor::ones([300, 200], like).tr(),
            Tensor::ones([8, 64, 7, 7], like).permute([0, 3, 1, 2]),
            Tensor::ones([2, 3, 1, 1], like).permute([0, 2, 1, 3]),
        ];
        let named = shapes.into_iter().enumerate();
        named.map(|(i, tensor)| root.add(&format!("w{i}"), tensor, true)).collect::<Vec<_>>()
    };
    let plain_store = store();
    let zero_store = store();
    let plain = new(&plain_store);
    let sharded = new(&zero_store);
    let mut optimizer = Adam::default().build(&plain_store, 0.1)?;
    let mut zero = ZeroRedundancyOptimizer::new(&zero_store, group, Adam::default(), 0.1)?;
    for step in 0..4i64 {
        for model in [&plain, &sharded] {
            for (index, w) in model.iter().enumerate() {
                tch::manual_seed(10 * step + index as i64);
                // Not as the parameter lies in memory.
                let gradient = Tensor::randn(w.size(), (Kind::Float, device()));
                flow_autograd::set_grad(w, Some(&gradient))?;
            }
        }
        optimizer.step();
        zero.step()?;
        same_bits(&zero_store, &plain_store).with_context(|| format!("step {step}"))?;
    }
    zero.consolidate_state_dict(0)?;
    if group.rank() == 0 {
        same_state(&zero.state()?, &optimizer.state()?)?;
    }
    let loss = |model: &[Tensor]| (&model[0] * &model[2]).sum(Kind::Float);
    optimizer.backward_step(&loss(&plain));
    zero.try_backward_step(&loss(&sharded))?;
    same_bits(&zero_store, &plain_store)
}

const LAYERS: usize = 8;
const WIDTH: i64 = 256;

/// A rank keeps its share of the state, and no more for gathering than a chunk of each rank.
pub fn memory(group: &ProcessGroup) -> Result<()> {
    const CHUNK: usize = 256 << 10;
    let bytes = LAYERS * (WIDTH * WIDTH) as usize * 4;
    let ranks = group.world_size();
    let store = store();
    let mut layers = Vec::new();
    for layer in 0..LAYERS {
        let path = store.root() / format!("fc{layer}");
        layers.push(nn::linear(path, WIDTH, WIDTH, Default::default()));
    }
    let model = Ddp::new(layers, &store, group)?;
    let live = || group.arena().usage().0;
    let before = live();
    let zero = ZeroRedundancyOptimizer::new(&store, group, Adam::default(), 1e-3)?;
    let to_gather = live() - before;
    let mut x = Tensor::ones([2, WIDTH], (Kind::Float, device()));
    for layer in model.iter() {
        x = x.apply(layer).tanh();
    }
    x.sum(Kind::Float).f_backward()?;
    let before = live();
    zero.step()?;
    let kept = live() - before;
    let share = 2 * bytes / ranks;
    // Blocks are of whole pages; small tensors are not in shared memory.
    ensure!(kept <= share + share / 10 && kept > share / 2, "{kept} bytes of state, not {share}");
    // Rank 0 also has what a group needs.
    let fits = group.rank() == 0 || to_gather <= (1 + ranks) * CHUNK + rustix::param::page_size();
    ensure!(fits, "{to_gather} bytes to gather by");
    Ok(())
}

/// A training goes on from checkpoints: see [`sharded_pair::resumed`].
pub fn resumed(group: &ProcessGroup) -> Result<()> {
    sharded_pair::resumed(group, "zero", |group, model, config| {
        new_pair(group, model, config, || Ddp::builder(group))
    })
}

/// Ranks have other numbers of batches: the weights are those of a join with tch's optimizer. Learning
/// rates that are set, and gradients that are clipped, on the ranks that go on hold for all.
pub fn joined(group: &ProcessGroup) -> Result<()> {
    let ranks = group.world_size();
    let model = [(2 * LARGE, Kind::Float), (10, Kind::Double), (0, Kind::Float), (5, Kind::Float)];
    for seed in 0..8 {
        let mut draws = Draws(seed);
        let config = configs()[seed as usize % 6];
        let find_unused = draws.below(2) == 0;
        let batches: Vec<u64> = (0..ranks).map(|_| draws.below(5)).collect();
        let own = batches[group.rank()];
        let factor = 1.0 + group.rank() as f64;
        let mut uses = vec![(0, factor), (1, factor), (2, factor)];
        if !find_unused || draws.below(2) == 0 {
            uses.push((3, factor));
        }
        let builder = || Ddp::builder(group).find_unused_parameters(find_unused);
        let mut pair = new_pair(group, &model, config, builder)?;
        let Pair { plain, optimizer, sharded, zero, .. } = &mut pair;
        plain.join(|| -> Result<()> {
            for batch in 0..own {
                optimizer.set_lr(0.1 / (1 + batch) as f64);
                optimizer.set_weight_decay_group(1, 0.1 * batch as f64);
                optimizer.zero_grad();
                plain.loss(&uses)?.f_backward()?;
                optimizer.clip_grad_norm(0.5);
                optimizer.step();
            }
            Ok(())
        })?;
        let zero = &*zero;
        join(&[&*sharded, zero], JoinOptions::default(), || -> Result<()> {
            for batch in 0..own {
                zero.set_lr(0.1 / (1 + batch) as f64)?;
                zero.set_weight_decay_group(1, 0.1 * batch as f64)?;
                zero.zero_grad()?;
                sharded.loss(&uses)?.f_backward()?;
                zero.clip_grad_norm(0.5)?;
                zero.step()?;
            }
            Ok(())
        })?;
        let what = || format!("seed {seed}, {config:?}, batches {batches:?}");
        same_bits(&pair.zero_store, &pair.plain_store).with_context(what)?;
        // The state is that of the ranks with the most batches, which all ranks go on with.
        let last = (0..ranks).max_by_key(|&rank| (batches[rank], rank)).unwrap_or_default();
        pair.zero.consolidate_state_dict(last)?;
        if group.rank() == last {
            same_state(&pair.zero.state()?, &pair.optimizer.state()?).with_context(what)?;
        }
    }
    Ok(())
}
