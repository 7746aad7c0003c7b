//! A rank with global tensors is killed at some moment of a save.

use std::path::Path;

use anyhow::{Context, Result};
use flow_autograd::OptimizerState;
use flow_comm::ProcessGroup;
use flow_global::checkpoint::ShardedCheckpoints;
use flow_global::{B, Placement, S, distribute};
use flow_tests::registry::{Scenario, launched, scenario};
use tch::nn::{Adam, Optimizer, OptimizerConfig, VarStore};
use tch::{Device, Kind, Tensor};

use crate::checkpoint_killed::{
    Training, check_left, loss, the_last_or_the_one_before_is_whole, train,
};
use crate::checkpoints::folder;
use crate::optimizers::{same_elements, same_state};

pub const SCENARIOS: &[Scenario] =
    &[scenario("a_rank_killed_in_a_save_leaves_this_or_the_one_before", training, &[launched(2)])
        .checked_by(|test| the_last_or_the_one_before_is_whole(test, checked))];

/// 12 MB that the ranks split, and 4 MB that they have in common and write together.
fn store() -> VarStore {
    let store = VarStore::new(Device::Cpu);
    for (name, elements) in [("split", 3_000_001), ("common", 1_000_000)] {
        let numbers = Tensor::arange(elements, (Kind::Float, Device::Cpu)) / elements as f64;
        let _ = store.root().add(name, numbers, true);
    }
    store
}

/// A training of a model of global tensors.
pub struct OfGlobal {
    pub store: VarStore,
    pub optimizer: Optimizer,
    pub checkpoints: ShardedCheckpoints,
}

impl Training for OfGlobal {
    fn step(&mut self) -> Result<()> {
        self.optimizer.backward_step(&loss(&self.store));
        Ok(())
    }

    fn save(&mut self, step: i64) -> Result<()> {
        Ok(self.checkpoints.save(step as usize, &self.store, Some(&self.optimizer), &step)?)
    }

    fn async_save(&mut self, step: i64) -> Result<()> {
        Ok(self.checkpoints.async_save(step as usize, &self.store, Some(&self.optimizer), &step)?)
    }

    fn wait(&mut self) -> Result<()> {
        Ok(self.checkpoints.wait()?)
    }
}

/// A training that goes on from what it finds.
fn training(group: &ProcessGroup) -> Result<()> {
    let store = store();
    let placement = Placement::all(group)?;
    distribute(&store, &placement, |name, _| [if name == "split" { S(0) } else { B }])?;
    let mut optimizer = Adam::default().build(&store, 0.01)?;
    let mut checkpoints = ShardedCheckpoints::open(folder()?.join("checkpoints"), group)?;
    let mut done = 0;
    if let Some(checkpoint) = checkpoints.latest::<i64>()? {
        checkpoint.resume(&store, Some(&mut optimizer))?;
        done = checkpoint.state;
    }
    train(group, &mut OfGlobal { store, optimizer, checkpoints }, done)
}

/// Checks the folder after a job, by what a process alone computes.
fn checked(folder: &Path) -> Result<()> {
    let folder = folder.join("checkpoints");
    let group = ProcessGroup::in_process(1)?.remove(0);
    let mut checkpoints = ShardedCheckpoints::open(&folder, &group)?;
    let checkpoint = checkpoints.latest::<i64>()?.context("a checkpoint")?;
    let step = checkpoint.state;
    check_left(&folder, step)?;
    let resumed = store();
    let mut optimizer = Adam::default().build(&resumed, 0.01)?;
    checkpoint.resume(&resumed, Some(&mut optimizer))?;

    let expected = store();
    let mut alone = Adam::default().build(&expected, 0.01)?;
    for _ in 0..step {
        alone.backward_step(&loss(&expected));
    }
    for (name, tensor) in resumed.variables() {
        same_elements(&name, &tensor, &expected.variables()[&name])?;
    }
    same_state(&optimizer.state()?, &alone.state()?)
}
