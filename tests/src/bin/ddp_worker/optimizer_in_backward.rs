//! An optimizer that steps in backward, whole on each rank or sharded.

use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use flow_autograd::{OptimizerState, StateDict, map_gradient};
use flow_comm::ProcessGroup;
use flow_ddp::comm_hooks::{Bf16Compress, PowerSgd};
use flow_ddp::{Ddp, DdpBuilder, Error, OptimizerInBackward, ZeroRedundancyOptimizer};
use tch::nn::{self, Optimizer, OptimizerConfig, Sgd, VarStore};
use tch::{Kind, Tensor};

use crate::helpers::{Draws, error, failure, own_group, random_models, says};
use crate::models::{Vectors, device, on_gpu, store};
use crate::optimizers::{
    Config, LARGE, Parameters, configs, drop_gradients, same_bits, same_state,
};

fn no_gradients(store: &VarStore) -> Result<()> {
    for (name, tensor) in store.variables() {
        ensure!(!tensor.grad().defined(), "{name} has a gradient after the step");
    }
    Ok(())
}

/// Random models: the weights have the same bits as with an optimizer that steps after backward, with
/// unused parameters, `no_sync`, hooks, other learning rates and frozen parameters. So have those of
/// one rank alone.
pub fn random(group: &ProcessGroup) -> Result<()> {
    random_models(group, 12, |group, seed| trained(group, seed, false))
}

/// The same with a `ZeroRedundancyOptimizer`, whose state is that of the other one, too.
pub fn random_with_zero(group: &ProcessGroup) -> Result<()> {
    random_models(group, 12, |group, seed| trained(group, seed, true))
}

/// What steps in backward.
enum InBackward {
    Whole(OptimizerInBackward),
    Zero(ZeroRedundancyOptimizer),
}

impl InBackward {
    fn set_lr(&self, learning_rate: f64) -> Result<(), Error> {
        match self {
            Self::Whole(optimizer) => optimizer.set_lr(learning_rate),
            Self::Zero(optimizer) => optimizer.set_lr(learning_rate),
        }
    }

    fn set_lr_group(&self, group: usize, learning_rate: f64) -> Result<(), Error> {
        match self {
            Self::Whole(optimizer) => optimizer.set_lr_group(group, learning_rate),
            Self::Zero(optimizer) => optimizer.set_lr_group(group, learning_rate),
        }
    }

    /// Returns the whole state, on this rank at least.
    fn state(&self, group: &ProcessGroup, rank: usize) -> Result<Option<StateDict>> {
        match self {
            Self::Whole(optimizer) => Ok(Some(optimizer.state()?)),
            Self::Zero(optimizer) => {
                optimizer.consolidate_state_dict(rank)?;
                (group.rank() == rank).then(|| Ok(optimizer.state()?)).transpose()
            }
        }
    }
}

fn trained(group: &ProcessGroup, seed: u64, with_zero: bool) -> Result<()> {
    let mut draws = Draws(seed);
    let config = configs()[seed as usize % 6];
    let mut kinds = vec![Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half];
    if matches!(config, Config::Sgd(_)) {
        kinds.push(Kind::ComplexFloat);
    }
    let count = 1 + draws.below(6) as usize;
    let model: Vec<(i64, Kind)> = (0..count)
        .map(|_| {
            let length = [1, 0, 10, 2 * LARGE][draws.below(4) as usize];
            (length, kinds[draws.below(kinds.len() as u64) as usize])
        })
        .collect();
    let find_unused = draws.below(3) == 0;
    let static_graph = draws.below(3) == 0;
    let view = draws.below(2) == 0;
    let caps = [[0.00001, 0.1], [0.01, 25.0]][draws.below(2) as usize];
    let hook = draws.below(4);
    // Each rank uses all parameters, some several times, or those that are drawn for it.
    let mut graphs = Vec::new();
    for rank in 0..group.world_size() {
        let mut graph: Vec<(usize, f64)> = Vec::new();
        if !(find_unused || static_graph) {
            graph.extend((0..count).map(|index| (index, 0.25 + rank as f64)));
        }
        for _ in 0..draws.below(2 * count as u64) {
            graph.push((draws.below(count as u64) as usize, 0.5));
        }
        graph.push((count - 1, 1.0 + rank as f64));
        graphs.push(graph);
    }
    let uses = &graphs[group.rank()];
    let micro_batches = draws.below(3) as usize;
    let freezes = count > 1 && !static_graph && draws.below(2) == 0;

    let builder = || -> DdpBuilder {
        let builder = Ddp::builder(group)
            .bucket_cap_mb_list(&caps)
            .find_unused_parameters(find_unused)
            .static_graph(static_graph)
            .gradient_as_bucket_view(view);
        match hook {
            0 => builder.comm_hook(Bf16Compress),
            1 => builder.comm_hook(PowerSgd::new(1).start_iter(1)),
            _ => builder,
        }
    };
    let after_store = store();
    let within_store = store();
    let mut after = builder().wrap(Parameters::new(&after_store, &model), &after_store)?;
    let mut optimizer = config.build(&after_store, 0.1)?;
    let net = Parameters::new(&within_store, &model);
    let (mut within, in_backward) = if with_zero {
        let zero = ZeroRedundancyOptimizer::new(&within_store, group, config, 0.1)?;
        let within = builder().hook_with_zero_step(&zero).wrap(net, &within_store)?;
        (within, InBackward::Zero(zero))
    } else {
        let within = builder().optimizer_in_backward(config, 0.1).wrap(net, &within_store)?;
        let optimizer = within.optimizer_in_backward()?;
        (within, InBackward::Whole(optimizer))
    };
    for step in 0..6 {
        let learning_rate = 0.1 / f64::from(1 + step);
        optimizer.set_lr(learning_rate);
        in_backward.set_lr(learning_rate)?;
        if step == 1 && count > 1 {
            optimizer.set_lr_group(1, 0.03);
            in_backward.set_lr_group(1, 0.03)?;
        }
        if freezes && (step == 2 || step == 4) {
            for model in [&mut after, &mut within] {
                let _ = model.0[0].set_requires_grad(step == 4);
                model.refresh()?;
            }
        }
        // Not zero_grad: it refuses views, which gradients of complex parameters are.
        drop_gradients(&after_store)?;
        for _ in 0..micro_batches {
            after.without_sync(|model| anyhow::Ok(model.loss(uses)?.f_backward()?))?;
            within.without_sync(|model| anyhow::Ok(model.loss(uses)?.f_backward()?))?;
        }
        after.loss(uses)?.f_backward()?;
        optimizer.step();
        within.loss(uses)?.f_backward()?;
        let what = || format!("step {step}, {config:?}, {model:?}, {graphs:?}");
        same_bits(&within_store, &after_store).with_context(what)?;
        no_gradients(&within_store).with_context(what)?;
        let to = step as usize % group.world_size();
        if let Some(state) = in_backward.state(group, to)? {
            same_state(&state, &optimizer.state()?).with_context(what)?;
        }
    }
    ensure!(within.stats().backwards == 6, "{:?}", within.stats());
    Ok(())
}

const LAYERS: usize = 8;
const WIDTH: i64 = 256;
const LAYER: usize = (WIDTH * WIDTH) as usize * 4;

/// In a backward that has come to the first of eight layers there are gradients of one or two, where
/// without an optimizer in backward there are those of all.
pub fn memory(group: &ProcessGroup) -> Result<()> {
    for config in configs() {
        let at_once = peak(group, |builder| builder.optimizer_in_backward(config, 1e-3))?;
        ensure!(at_once < 5 * LAYER / 2, "{config:?}: {at_once} bytes of gradients at a time");
    }
    let all = peak(group, |builder| builder)?;
    ensure!(all > 6 * LAYER, "{all} bytes are not the gradients of all layers but the first");
    Ok(())
}

/// Returns the most bytes of shared memory that a backward adds, in steps after the first two.
fn peak(group: &ProcessGroup, with: impl Fn(DdpBuilder) -> DdpBuilder) -> Result<usize> {
    let store = store();
    let mut layers = Vec::new();
    for layer in 0..LAYERS {
        let path = store.root() / format!("fc{layer}");
        layers.push(nn::linear(path, WIDTH, WIDTH, Default::default()));
    }
    let model = with(Ddp::builder(group).bucket_cap_mb(0.25)).wrap(layers, &store)?;
    let most = Arc::new(Mutex::new(0));
    for step in 0..4 {
        drop_gradients(&store)?;
        let mut x = Tensor::ones([2, WIDTH], (Kind::Float, device()));
        let arena = Arc::clone(group.arena());
        let before = arena.usage().0;
        for layer in model.iter() {
            x = x.apply(layer).tanh();
            let arena = Arc::clone(&arena);
            let most = Arc::clone(&most);
            map_gradient(&x, move |_| {
                let now = arena.usage().0.saturating_sub(before);
                let mut most = most.lock().unwrap_or_else(PoisonError::into_inner);
                *most = now.max(*most);
                Ok(None)
            })?;
        }
        if step == 2 {
            *most.lock().unwrap_or_else(PoisonError::into_inner) = 0;
        }
        x.sum(Kind::Float).f_backward()?;
    }
    let most = *most.lock().unwrap_or_else(PoisonError::into_inner);
    Ok(most)
}

/// Either kind of optimizer goes on from the other's state, and a state that does not fit leaves
/// the optimizer as it was.
pub fn resumed(group: &ProcessGroup) -> Result<()> {
    let model = [(LARGE, Kind::Float), (10, Kind::Double), (0, Kind::Float), (1, Kind::Float)];
    for config in configs() {
        let train = |wrapped: &Ddp<Parameters>, optimizer: Option<&mut Optimizer>| -> Result<()> {
            let factor = 1.0 + group.rank() as f64;
            let uses: Vec<(usize, f64)> = (0..model.len()).map(|index| (index, factor)).collect();
            let loss = wrapped.loss(&uses)?;
            match optimizer {
                None => Ok(loss.f_backward()?),
                Some(optimizer) => {
                    optimizer.zero_grad();
                    loss.f_backward()?;
                    optimizer.step();
                    Ok(())
                }
            }
        };
        let after_store = store();
        let within_store = store();
        let after = Ddp::new(Parameters::new(&after_store, &model), &after_store, group)?;
        let mut optimizer = config.build(&after_store, 0.1)?;
        let builder = || Ddp::builder(group).optimizer_in_backward(config, 0.1);
        let within = builder().wrap(Parameters::new(&within_store, &model), &within_store)?;
        let mut in_backward: OptimizerInBackward = within.optimizer_in_backward()?;
        for step in 0..3 {
            train(&after, Some(&mut optimizer))?;
            train(&within, None)?;
            let state = in_backward.state()?;
            let expected = optimizer.state()?;
            ensure!(state.parameters == expected.parameters, "{state:?} is not {expected:?}");
            ensure!(state.tensors == expected.tensors, "step {step}: {state:?}, not {expected:?}");
            // Each with the other's.
            in_backward.load_state(&expected)?;
            optimizer.load_state(&state)?;
        }
        same_bits(&within_store, &after_store)?;

        let mut unfit = in_backward.state()?;
        unfit.parameters[1] = "Adagrad of [10] Double".to_owned();
        says(
            &error(in_backward.load_state(&unfit))?,
            &["parameter 1 is Adagrad of [10] Double in the state"],
        )?;
        let mut unfit = in_backward.state()?;
        unfit.tensors.push(("4.step".to_owned(), Tensor::from(1i64)));
        says(
            &error(in_backward.load_state(&unfit))?,
            &["4.step, which the optimizer has no place"],
        )?;
        let mut unfit = in_backward.state()?;
        for (_, tensor) in &mut unfit.tensors {
            *tensor = tensor.zeros_like();
        }
        unfit.tensors.push(("3.nonsense".to_owned(), Tensor::from(1i64)));
        says(&error(in_backward.load_state(&unfit))?, &["nonsense"])?;
        train(&after, Some(&mut optimizer))?;
        train(&within, None)?;
        same_bits(&within_store, &after_store).context("after states that do not fit")?;
    }
    Ok(())
}

/// What cannot be is an error that says what to do.
pub fn misused(group: &ProcessGroup) -> Result<()> {
    let rank = group.rank();
    let plain = store();
    let model = Ddp::new(Vectors::new(&plain, &[10]), &plain, group)?;
    says(
        &error(model.optimizer_in_backward())?,
        &[&format!("rank {rank}: Ddp: no optimizer steps"), "build with optimizer_in_backward("],
    )?;
    drop(model);

    let wrap = |store: &VarStore, lengths: &[i64], learning_rate: f64| {
        let builder = Ddp::builder(group).bucket_cap_mb(0.00001);
        let builder = builder.optimizer_in_backward(Sgd::default(), learning_rate);
        builder.wrap(Vectors::new(store, lengths), store)
    };
    let text = error(wrap(&store(), &[10], -1.0).map(drop))?;
    says(&text, &["Ddp: optimizer_in_backward: ", "Invalid learning rate: -1"])?;
    ensure!(text.lines().count() == 1, "{text}");
    let text = error(wrap(&store(), &[10], 1.0 + rank as f64).map(drop))?;
    says(&text, &["rank 0 has", "SGD with learning rate 1,", "SGD with learning rate 2"])?;

    let own = store();
    let model = wrap(&own, &[10, 10], 0.5)?;
    let optimizer = model.optimizer_in_backward()?;
    let words = ["clipped to the norm 1 of all", "build without optimizer_in_backward"];
    says(&error(optimizer.clip_grad_norm(1.0))?, &words)?;
    says(&error(optimizer.set_lr_group(3, 0.1))?, &["no parameter is in group 3", "set_group"])?;
    let words = ["join: build without optimizer_in_backward"];
    says(&error(model.join(|| Ok::<_, Error>(())))?, &words)?;
    // It is as it was.
    model.weighted_sum(&[(0, 1.0), (1, 2.0)]).f_backward()?;
    for (index, expected) in [(0, 0.5), (1, 0.0)] {
        let value = model.0[index].double_value(&[0]);
        ensure!(value == expected, "w{index} is {value}, not {expected}");
    }
    let text = failure(&model, || model.weighted_sum(&[(1, 1.0)]).f_backward())?;
    says(&text, &["parameters got no gradient in this backward", "rank 0: w0"])?;
    drop(model);

    // The multiplication needs the value that a weight had before its gradient came.
    let alone = own_group(group)?;
    let own = store();
    let builder = Ddp::builder(&alone).bucket_cap_mb(0.00001);
    let builder = builder.optimizer_in_backward(Sgd::default(), 0.5);
    let model = builder.wrap(Vectors::new(&own, &[10, 10, 10]), &own)?;
    let later = &model.0[0] * model.0[2].detach();
    let loss = model.weighted_sum(&[(2, 1.0), (1, 1.0)]) + later.sum(Kind::Float);
    let result = loss.f_backward();
    if on_gpu() {
        result?; // all is applied at the end
    } else {
        says(&error(result)?, &["modified by an inplace operation"])?;
    }
    Ok(())
}
