//! A model that a `Ddp` and tch's optimizer train, and the same one whose optimizer is sharded.

use anyhow::{Context, Result};
use flow_autograd::OptimizerState;
use flow_comm::ProcessGroup;
use flow_ddp::{
    Checkpoints, Ddp, DistributedSampler, Fsdp, TryBackwardStep, ZeroRedundancyOptimizer,
};
use tch::Kind;
use tch::nn::{Optimizer, VarStore};

use crate::helpers::{Draws, own_group};
use crate::optimizers::{Config, LARGE, Parameters, configs, same_bits};

/// What trains with the sharded optimizer.
pub trait Sharded {
    /// Returns it as a `Ddp`.
    fn ddp(&self) -> &Ddp<Parameters>;
}

impl Sharded for Ddp<Parameters> {
    fn ddp(&self) -> &Ddp<Parameters> {
        self
    }
}

impl Sharded for Fsdp<Parameters> {
    fn ddp(&self) -> &Ddp<Parameters> {
        self
    }
}

pub struct Pair<S> {
    pub plain: Ddp<Parameters>,
    pub optimizer: Optimizer,
    pub plain_store: VarStore,
    pub sharded: S,
    pub zero: ZeroRedundancyOptimizer,
    pub zero_store: VarStore,
}

impl<S: Sharded> Pair<S> {
    /// Trains both with the same losses, and compares the weights.
    pub fn step(&mut self, uses: &[(usize, f64)]) -> Result<()> {
        self.optimizer.backward_step(&self.plain.loss(uses)?);
        self.zero.try_backward_step(&self.sharded.ddp().loss(uses)?)?;
        same_bits(&self.zero_store, &self.plain_store)
    }
}

/// Draws which parameters this rank uses in a step, and how: all ranks draw alike, and each uses others if
/// some may be left out. All use the last one.
pub fn draw_uses(
    draws: &mut Draws,
    group: &ProcessGroup,
    count: usize,
    find_unused: bool,
) -> Vec<(usize, f64)> {
    let mut uses = Vec::new();
    for index in 0..count {
        let is_used = (0..group.world_size()).map(|_| draws.below(2) == 0).nth(group.rank());
        if !find_unused || is_used == Some(true) {
            uses.push((index, 0.25 + group.rank() as f64));
        }
    }
    uses.push((count - 1, 1.0));
    uses
}

/// A training goes on from a checkpoint of either optimizer, with either, on fewer ranks and alone; and
/// states go from one optimizer to the other. The checkpoints are in a folder of this `name`.
pub fn resumed<S: Sharded>(
    group: &ProcessGroup,
    name: &str,
    new: impl Fn(&ProcessGroup, &[(i64, Kind)], Config) -> Result<Pair<S>>,
) -> Result<()> {
    let model = [
        (LARGE, Kind::Float),
        (10, Kind::Double),
        (0, Kind::Float),
        (20 * LARGE, Kind::BFloat16),
        (1, Kind::Float),
    ];
    let mut pid = [i64::from(std::process::id())];
    group.broadcast(&mut pid, 0)?;
    let folder = std::env::temp_dir().join(format!("flow-{name}-{}", pid[0]));
    let uses = |group: &ProcessGroup| -> Vec<(usize, f64)> {
        (0..model.len()).map(|index| (index, 1.0 + group.rank() as f64)).collect()
    };
    let fewer = group.new_group(&(0..group.world_size() - 1).collect::<Vec<_>>())?;
    let alone = own_group(group)?;
    for (number, config) in configs().into_iter().enumerate() {
        let mut pair = new(group, &model, config)?;
        for _ in 0..2 {
            pair.step(&uses(group))?;
            let expected = pair.optimizer.state()?;
            pair.zero.load_state(&expected)?;
        }
        let sampler = DistributedSampler::new(10, group);
        let folder = folder.join(number.to_string());
        let mut checkpoints = Checkpoints::open(&folder, group)?;
        let from_zero = number % 2 == 0;
        let optimizer: &dyn OptimizerState = if from_zero { &pair.zero } else { &pair.optimizer };
        checkpoints.save(1, pair.sharded.ddp(), &pair.zero_store, optimizer, &sampler, &())?;
        drop(checkpoints);
        group.barrier()?;
        for part in [Some(group), fewer.as_ref(), Some(&alone).filter(|_| group.rank() == 0)] {
            if let Some(part) = part {
                let mut resumed = new(part, &model, config)?;
                let mut checkpoints = Checkpoints::open(&folder, part)?;
                let checkpoint = checkpoints.latest::<()>()?.context("it was saved")?;
                let mut sampler = DistributedSampler::new(10, part);
                checkpoint.resume(&resumed.zero_store, &mut resumed.zero, &mut sampler)?;
                checkpoint.resume(&resumed.plain_store, &mut resumed.optimizer, &mut sampler)?;
                same_bits(&resumed.zero_store, &pair.zero_store)?;
                for _ in 0..2 {
                    resumed.step(&uses(part)).with_context(|| format!("{config:?}"))?;
                }
            }
            group.barrier()?;
        }
    }
    group.barrier()?;
    if group.rank() == 0 {
        std::fs::remove_dir_all(&folder)?;
    }
    Ok(())
}
