//! A rank of an `Fsdp` is killed at some moment of a save.

use std::fs;
use std::path::Path;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use flow_autograd::OptimizerState;
use flow_comm::ProcessGroup;
use flow_ddp::{CheckpointModel, Checkpoints, DistributedSampler, Fsdp, ZeroRedundancyOptimizer};
use flow_tests::registry::{Scenario, Test, launched, scenario};
use flow_tests::{Process, TEST_TIMEOUT, assert_contains};
use rustix::process::{Signal, getpid, kill_process};
use tch::nn::{Adam, OptimizerConfig, VarStore};
use tch::{Device, Kind, Tensor};

use crate::checkpoints::{FOLDER, folder};
use crate::helpers::Draws;
use crate::optimizers::{same_elements, same_state};

pub const SCENARIOS: &[Scenario] =
    &[scenario("a_rank_killed_in_a_save_leaves_this_or_the_one_before", training, &[launched(2)])
        .checked_by(|test| the_last_or_the_one_before_is_whole(test, checked))];

/// Which rank is killed, and when: in thousandths of the time that the save before took.
const KILLED: &str = "FLOW_TEST_KILLED";
/// Set if checkpoints are written beside the training.
const BESIDE: &str = "FLOW_TEST_BESIDE";
/// In the folder: the step that is being saved.
pub const BEGUN: &str = "begun";
/// The steps of one job.
const STEPS: i64 = 3;
/// The jobs that are killed.
const JOBS: u64 = 10;

/// 12 MB in two weights, the same on all ranks.
pub fn store() -> VarStore {
    let store = VarStore::new(Device::Cpu);
    for (name, elements) in [("a", 3_000_000), ("b", 777)] {
        let numbers = Tensor::arange(elements, (Kind::Float, Device::Cpu)) / elements as f64;
        let _ = store.root().add(name, numbers, true);
    }
    store
}

pub fn loss(store: &VarStore) -> Tensor {
    let parts = store.trainable_variables().into_iter().map(|weight| (weight - 0.3).square());
    parts.map(|part| part.sum(Kind::Float)).sum()
}

/// A training and its checkpoints.
pub trait Training {
    fn step(&mut self) -> Result<()>;
    fn save(&mut self, step: i64) -> Result<()>;
    fn async_save(&mut self, step: i64) -> Result<()>;
    fn wait(&mut self) -> Result<()>;
}

/// Trains after so many steps, and saves each step: the last one while a rank is killed, if one is to be.
pub fn train(group: &ProcessGroup, training: &mut impl Training, done: i64) -> Result<()> {
    let is_beside = std::env::var(BESIDE).is_ok();
    let mut killer: Option<JoinHandle<()>> = None;
    let mut took = Duration::ZERO;
    for step in done + 1..=done + STEPS {
        training.step()?;
        training.wait()?;
        if group.rank() == 0 {
            fs::write(folder()?.join(BEGUN), step.to_string())?;
        }
        group.barrier()?;
        if step == done + STEPS {
            killer = arm(group.rank(), took)?;
        }
        let start = Instant::now();
        if is_beside {
            training.async_save(step)?;
            if step < done + STEPS {
                training.wait()?;
            } else {
                // What is written is what was there before this.
                training.step()?;
            }
        } else {
            training.save(step)?;
        }
        took = start.elapsed();
    }
    training.wait()?;
    if let Some(killer) = killer {
        let _ = killer.join(); // it does not return
    }
    Ok(())
}

/// A training that `Checkpoints` saves.
pub struct OfVariables<M, O, F> {
    pub store: VarStore,
    pub model: M,
    pub optimizer: O,
    pub sampler: DistributedSampler,
    pub checkpoints: Checkpoints,
    /// Has the optimizer take a step of this loss.
    pub train_step: F,
}

impl<M, O, F> Training for OfVariables<M, O, F>
where
    M: CheckpointModel,
    O: OptimizerState,
    F: Fn(&mut O, &Tensor) -> Result<()>,
{
    fn step(&mut self) -> Result<()> {
        (self.train_step)(&mut self.optimizer, &loss(&self.store))
    }

    fn save(&mut self, step: i64) -> Result<()> {
        let Self { store, model, optimizer, sampler, checkpoints, .. } = self;
        Ok(checkpoints.save(step as usize, model, store, optimizer, sampler, &step)?)
    }

    fn async_save(&mut self, step: i64) -> Result<()> {
        let Self { store, model, optimizer, sampler, checkpoints, .. } = self;
        Ok(checkpoints.async_save(step as usize, model, store, optimizer, sampler, &step)?)
    }

    fn wait(&mut self) -> Result<()> {
        Ok(self.checkpoints.wait()?)
    }
}

/// A training that goes on from what it finds.
fn training(group: &ProcessGroup) -> Result<()> {
    let store = store();
    let model = Fsdp::new((), &store, group)?;
    let mut optimizer = model.optimizer(Adam::default(), 0.01)?;
    let mut sampler = DistributedSampler::new(1, group);
    let mut checkpoints = Checkpoints::open(folder()?.join("checkpoints"), group)?;
    let mut done = 0;
    if let Some(checkpoint) = checkpoints.latest::<i64>()? {
        checkpoint.resume(&store, &mut optimizer, &mut sampler)?;
        done = checkpoint.state;
    }
    let train_step =
        |optimizer: &mut ZeroRedundancyOptimizer, loss: &Tensor| Ok(optimizer.backward_step(loss)?);
    let mut training = OfVariables { store, model, optimizer, sampler, checkpoints, train_step };
    train(group, &mut training, done)
}

/// Has this rank killed, if it is the one.
fn arm(own_rank: usize, save: Duration) -> Result<Option<JoinHandle<()>>> {
    let Ok(killed) = std::env::var(KILLED) else { return Ok(None) };
    let (rank, thousandths) = killed.split_once(':').context("rank and thousandths")?;
    let rank: usize = rank.parse()?;
    let delay = save * thousandths.parse()? / 1000;
    if own_rank != rank {
        return Ok(None);
    }
    Ok(Some(thread::spawn(move || {
        thread::sleep(delay);
        let _ = kill_process(getpid(), Signal::KILL);
    })))
}

/// After each kill there is the last checkpoint or the one before, whole, and nothing else.
pub fn the_last_or_the_one_before_is_whole(test: &Test, checked: fn(&Path) -> Result<()>) {
    let ranks = 2;
    let mut draws = Draws(u64::from(std::process::id()));
    for job in 0..JOBS {
        let rank = job % ranks;
        // Some are killed after the save, while the old checkpoint is removed.
        let thousandths = draws.below(1200);
        let process = start(test, Some(&format!("{rank}:{thousandths}")), job / ranks % 2 == 0);
        let stderr = process.finish(TEST_TIMEOUT).stderr;
        assert_contains(&stderr, &["SIGKILL"]);
        let what = format!("job {job}, rank {rank} killed after {thousandths} thousandths");
        checked(test.folder.path()).with_context(|| what).unwrap();
    }
    start(test, None, false).finish(TEST_TIMEOUT).success();
    checked(test.folder.path()).unwrap();
}

fn start(test: &Test, killed: Option<&str>, is_beside: bool) -> Process {
    let mut command = test.commands().remove(0);
    command.env(FOLDER, test.folder.path());
    if is_beside {
        command.env(BESIDE, "1");
    }
    if let Some(killed) = killed {
        command.env(KILLED, killed);
    }
    Process::start(command)
}

/// Checks the folder after a job, by what a process alone computes.
fn checked(folder: &Path) -> Result<()> {
    let folder = folder.join("checkpoints");
    let group = ProcessGroup::in_process(1)?.remove(0);
    let mut checkpoints = Checkpoints::open(&folder, &group)?;
    let checkpoint = checkpoints.latest::<i64>()?.context("a checkpoint")?;
    let step = checkpoint.state;
    check_left(&folder, step)?;
    let resumed = store();
    let mut optimizer = Adam::default().build(&resumed, 0.01)?;
    let mut sampler = DistributedSampler::new(1, &group);
    checkpoint.resume(&resumed, &mut optimizer, &mut sampler)?;

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

/// Checks that `step` is the one that was being saved or the one before, and that nothing else is left in the
/// folder of the checkpoints.
pub fn check_left(folder: &Path, step: i64) -> Result<()> {
    let begun: i64 = fs::read_to_string(folder.with_file_name(BEGUN))?.parse()?;
    ensure!(step == begun || step == begun - 1, "step {step} of {begun}");
    for entry in fs::read_dir(folder)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        let found = name.strip_prefix("step-").and_then(|step| step.parse::<i64>().ok());
        let is_kept = found.is_some_and(|found| found > step - 3 && found <= step);
        ensure!(
            is_kept || name == ".checkpoint.lock",
            "{name} is left, and step {step} is the last"
        );
    }
    Ok(())
}
