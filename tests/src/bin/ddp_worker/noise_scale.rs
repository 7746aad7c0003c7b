//! The gradient noise scale beside numbers computed by hand.

use anyhow::{Result, ensure};
use flow_comm::ProcessGroup;
use flow_ddp::comm_hooks::{AllReduce, Bf16Compress, NoiseScale, TopK};
use flow_ddp::{Ddp, DdpBuilder};
use tch::nn::{Sgd, VarStore};

use crate::helpers::{close, error, gradients, own_group, says};
use crate::models::{Vectors, store};
use crate::optimizers::{drop_gradients, same_bits};

const LENGTHS: [i64; 4] = [40_000, 10, 1, 3];
const BATCH: u64 = 8;
const STEPS: usize = 5;

/// The factors of a rank's vectors in a step, which are their gradients.
fn factors(rank: usize, step: usize) -> Vec<(usize, f64)> {
    let mut factors = Vec::with_capacity(LENGTHS.len());
    for index in 0..LENGTHS.len() {
        let angle = ((1 + index) * (2 + rank) * (3 + step)) as f64 * 0.37;
        factors.push((index, angle.sin() + 0.5));
    }
    factors
}

fn trained(builder: DdpBuilder, group: &ProcessGroup) -> Result<VarStore> {
    let store = store();
    let model = builder.bucket_cap_mb(0.1).wrap(Vectors::new(&store, &LENGTHS), &store)?;
    for step in 0..STEPS {
        drop_gradients(&store)?;
        model.weighted_sum(&factors(group.rank(), step)).f_backward()?;
    }
    Ok(store)
}

/// The noise scale of all steps, with the sums of squares of one process that knows all gradients.
fn by_hand(ranks: usize, decay: f64) -> f64 {
    let mut small = 0.0;
    let mut large = 0.0;
    for step in 0..STEPS {
        let all: Vec<_> = (0..ranks).map(|rank| factors(rank, step)).collect();
        let weight = decay.powi((STEPS - 1 - step) as i32);
        for (index, &length) in LENGTHS.iter().enumerate() {
            let own = all.iter().map(|factors| factors[index].1);
            let mean = own.clone().sum::<f64>() / ranks as f64;
            small += weight * length as f64 * own.map(|one| one * one).sum::<f64>() / ranks as f64;
            large += weight * length as f64 * mean * mean;
        }
    }
    let [one, all] = [1.0, ranks as f64].map(|ranks| ranks * BATCH as f64);
    let gradient = (all * large - one * small) / (all - one);
    let noise = (small - large) / (1.0 / one - 1.0 / all);
    noise / gradient
}

fn measures(group: &ProcessGroup, noise: &NoiseScale, decay: f64, tolerance: f64) -> Result<()> {
    let expected = by_hand(group.world_size(), decay);
    let samples = noise.samples(group)?;
    ensure!((samples / expected - 1.0).abs() < tolerance, "{samples} instead of {expected}");
    Ok(())
}

/// The estimate is that of one process, and gradients have the bits that they have without it.
pub fn measured(group: &ProcessGroup) -> Result<()> {
    for (decay, view) in [(1.0, false), (0.9, true)] {
        let noise = NoiseScale::new(BATCH).decay(decay);
        let plain = trained(Ddp::builder(group).gradient_as_bucket_view(view), group)?;
        let builder = Ddp::builder(group).gradient_as_bucket_view(view);
        let seen = trained(builder.comm_hook(noise.around(AllReduce)), group)?;
        close(&gradients(&seen)?, &gradients(&plain)?, 0.0)?;
        measures(group, &noise, decay, 1e-5)?;
    }
    Ok(())
}

/// Other hooks may be measured, with what they make of the mean.
pub fn around(group: &ProcessGroup) -> Result<()> {
    let noise = NoiseScale::new(BATCH).decay(1.0);
    trained(Ddp::builder(group).comm_hook(noise.around(TopK::new(1.0))), group)?;
    measures(group, &noise, 1.0, 1e-5)?;
    let noise = NoiseScale::new(BATCH).decay(1.0);
    trained(Ddp::builder(group).comm_hook(noise.around(Bf16Compress)), group)?;
    measures(group, &noise, 1.0, 0.1)
}

/// An optimizer in backward steps once the gradients are measured, to the same weights.
pub fn in_backward(group: &ProcessGroup) -> Result<()> {
    let noise = NoiseScale::new(BATCH).decay(1.0);
    let plain = trained(Ddp::builder(group).optimizer_in_backward(Sgd::default(), 0.1), group)?;
    let builder = Ddp::builder(group).optimizer_in_backward(Sgd::default(), 0.1);
    let seen = trained(builder.comm_hook(noise.around(AllReduce)), group)?;
    same_bits(&seen, &plain)?;
    measures(group, &noise, 1.0, 1e-5)
}

/// Without steps, and where there is one rank, there is nothing to compare.
pub fn misused(group: &ProcessGroup) -> Result<()> {
    let noise = NoiseScale::new(BATCH);
    let rank = group.rank();
    let words = [&format!("rank {rank}: NoiseScale: no gradients were averaged"), "comm_hook("];
    says(&error(noise.samples(group))?, &words)?;
    says(
        &error(noise.samples(&own_group(group)?))?,
        &["one rank has no other batch", "two ranks or more"],
    )
}
