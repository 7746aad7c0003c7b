//! Sizes of buckets that are tried in the first steps.

use anyhow::{Result, ensure};
use flow_comm::ProcessGroup;
use flow_ddp::comm_hooks::{Bf16Compress, TopK};
use flow_ddp::{Ddp, DdpBuilder, Error, TensorCollectives};
use tch::nn::VarStore;
use tch::{Kind, Tensor};

use crate::helpers::gradients;
use crate::models::{self, Vectors, device};

/// Steps of each size.
const STEPS: u32 = 3;
/// No more steps than a trial takes: one for the order of gradients, and those of seven sizes, with
/// one that is not counted.
const AT_MOST: usize = 1 + 7 * (STEPS as usize + 1);

/// Runs a backward that uses some of the parameters.
fn backward(model: &Ddp<Vectors>, used: &[(usize, f64)]) -> Result<()> {
    Ok(model.weighted_sum(used).f_backward().map_err(Error::from_backward)?)
}

/// Two models train side by side, one with a trial: gradients have the same bits all along, whatever
/// other options there are.
fn compare(
    group: &ProcessGroup,
    what: &str,
    used: &[(usize, f64)],
    options: impl Fn(DdpBuilder) -> DdpBuilder,
) -> Result<()> {
    const LENGTHS: [i64; 6] = [34_000, 10, 17_000, 0, 1, 4_000];
    let wrap = |tune: u32| -> Result<(VarStore, Ddp<Vectors>)> {
        let store = models::store();
        let builder = options(Ddp::builder(group).bucket_cap_mb(0.01).tune(tune));
        let model = builder.wrap(Vectors::new(&store, &LENGTHS), &store)?;
        Ok((store, model))
    };
    let (store, plain) = wrap(0)?;
    let (tuned_store, tuned) = wrap(STEPS)?;
    let mut sizes = Vec::new();
    for step in 0..AT_MOST + 3 {
        let scale = (group.rank() + 1) as f64 / (step + 3) as f64;
        let used: Vec<_> = used.iter().map(|&(index, factor)| (index, factor * scale)).collect();
        backward(&plain, &used)?;
        backward(&tuned, &used)?;
        for (weight, tuned) in plain.0.iter().zip(&tuned.0) {
            let same = match (weight.grad(), tuned.grad()) {
                (expected, found) if expected.defined() && found.defined() => expected == found,
                (expected, found) => expected.defined() == found.defined(),
            };
            ensure!(same, "{what}, step {step}: other gradients");
        }
        let stats = tuned.stats();
        ensure!(stats.is_tuning || step >= 8, "{what}: the trial is over in step {step}");
        if sizes.last() != Some(&stats.buckets.len()) {
            sizes.push(stats.buckets.len());
        }
    }
    ensure!(sizes.len() > 1, "{what}: buckets were always {sizes:?}");
    let stats = tuned.stats();
    ensure!(!stats.is_tuning, "{what}: the trial lasts too long");
    let chosen = Tensor::from_slice(&stats.bucket_cap_mb).to(device());
    let all = group.all_gather_tensor(&chosen)?;
    for rank in 0..group.world_size() as i64 {
        ensure!(all.get(rank) == chosen, "{what}: ranks have chosen {all:?}");
    }
    drop((store, tuned_store));
    Ok(())
}

pub fn same_bits(group: &ProcessGroup) -> Result<()> {
    const ALL: [(usize, f64); 6] = [(5, 1.0), (2, -2.0), (0, 1.0), (4, 3.0), (1, 0.5), (3, 1.0)];
    compare(group, "plain", &ALL, |builder| builder)?;
    compare(group, "views", &ALL, |builder| builder.gradient_as_bucket_view(true))?;
    compare(group, "bf16", &ALL, |builder| builder.comm_hook(Bf16Compress))?;
    compare(group, "unused", &ALL[1..4], |builder| builder.find_unused_parameters(true))?;
    compare(group, "static graph", &ALL[..4], |builder| builder.static_graph(true))?;
    compare(group, "delayed", &ALL, |builder| {
        builder.delay_all_reduce_named_params(&["w1", "w2"], "w0")
    })?;
    // What a hook keeps is kept by parameter.
    compare(group, "top-k", &ALL, |builder| builder.comm_hook(TopK::new(1.0)))
}

/// Ranks that have ended early take part in the trial.
pub fn in_join(group: &ProcessGroup) -> Result<()> {
    let store = models::store();
    let builder = Ddp::builder(group).bucket_cap_mb(1e-4).tune(STEPS);
    let model = builder.wrap(models::mlp(&store.root()), &store)?;
    let input = Tensor::ones([4, 784], (Kind::Float, device()));
    let steps = if group.rank() == 0 { 4 } else { AT_MOST + 3 };
    model.join(|| {
        for _ in 0..steps {
            let loss = model.try_forward_t(&input, true)?.sum(Kind::Float);
            loss.f_backward().map_err(Error::from_backward)?;
        }
        Ok::<_, Error>(())
    })?;
    ensure!(!model.stats().is_tuning, "the trial lasts too long");
    // Again without a join: all ranks have the same buckets.
    let loss = model.try_forward_t(&input, true)?.sum(Kind::Float);
    loss.f_backward().map_err(Error::from_backward)?;
    for gradient in gradients(&store)?.values() {
        let all = group.all_gather_tensor(gradient)?;
        ensure!(all.get(0) == *gradient, "ranks have other gradients");
    }
    Ok(())
}
