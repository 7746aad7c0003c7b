//! All ranks are killed at some moment of a save, again and again: flow-launch starts them anew, and they go
//! on from its memory.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use flow_autograd::OptimizerState;
use flow_comm::ProcessGroup;
use flow_ddp::{Checkpoint, CheckpointModel, Checkpoints, Ddp, DistributedSampler, Fsdp};
use flow_tests::net::Net;
use flow_tests::registry::{Job, Scenario, Test, launched, machines, scenario};
use flow_tests::{Process, TEST_TIMEOUT};
use rustix::process::{Pid, Signal, kill_process};
use tch::Tensor;
use tch::nn::{Adam, OptimizerConfig, VarStore};

use crate::checkpoint_killed::{BEGUN, OfVariables, Training, loss, store};
use crate::checkpoints::{FOLDER, folder};
use crate::helpers::Draws;
use crate::optimizers::{same_elements, same_state};

/// How often the ranks are started anew.
pub const RESTARTS: &[&str] = &["--max-restarts", "8"];
/// Set if checkpoints are written to a folder as well.
pub const WITH_FOLDER: &str = "FLOW_TEST_WITH_FOLDER";
/// Without and with a folder.
const JOBS: &[Job] = &[
    launched(2).flags(RESTARTS),
    launched(2).flags(RESTARTS).mode("with a folder", WITH_FOLDER, "1"),
    machines(&[2, 2]).flags(RESTARTS),
    machines(&[2, 2]).flags(RESTARTS).mode("with a folder", WITH_FOLDER, "1"),
];

pub const SCENARIOS: &[Scenario] = &[
    scenario("killed_ranks_go_on_to_the_bit", training, JOBS).checked_by(all_ends_well),
    scenario("the_newest_is_resumed_wherever_it_is", newest, &[launched(2)])
        .checked_by(all_ends_well),
];

pub fn all_ends_well(test: &Test) {
    let mut commands = test.commands();
    for command in &mut commands {
        command.env(FOLDER, test.folder.path());
    }
    if commands.len() == 1 {
        Process::start(commands.remove(0)).finish(TEST_TIMEOUT).success();
        return;
    }
    let Some(net) = Net::new(commands.len()) else { return };
    let agents = commands.iter().enumerate().map(|(node, command)| net.start(node, command));
    for agent in agents.collect::<Vec<_>>() {
        agent.finish().success();
    }
    net.until_nothing_is_left();
}

/// Steps of the last start.
const LAST: i64 = 3;

pub fn number(variable: &str) -> Result<u64> {
    Ok(std::env::var(variable)?.parse()?)
}

/// A training whose model ranks share in every second start.
fn training(group: &ProcessGroup) -> Result<()> {
    let store = store();
    if number("TORCHELASTIC_RESTART_COUNT")? % 2 == 0 {
        let model = Fsdp::new((), &store, group)?;
        let optimizer = model.optimizer(Adam::default(), 0.01)?;
        return train(group, store, model, optimizer, |optimizer, loss| {
            Ok(optimizer.backward_step(loss)?)
        });
    }
    let model = Ddp::new((), &store, group)?;
    let optimizer = Adam::default().build(&store, 0.01)?;
    train(group, store, model, optimizer, |optimizer, loss| {
        optimizer.backward_step(loss);
        Ok(())
    })
}

fn train<O: OptimizerState>(
    group: &ProcessGroup,
    store: VarStore,
    model: impl CheckpointModel,
    mut optimizer: O,
    train_step: impl Fn(&mut O, &Tensor) -> Result<()>,
) -> Result<()> {
    let mut sampler = DistributedSampler::new(1, group);
    let mut checkpoints = Checkpoints::in_memory(group)?;
    if std::env::var(WITH_FOLDER).is_ok() {
        checkpoints = checkpoints.and_folder(folder()?.join("checkpoints"))?;
    }
    let mut done = 0;
    if let Some(checkpoint) = checkpoints.latest::<i64>()? {
        checkpoint.resume(&store, &mut optimizer, &mut sampler)?;
        done = checkpoint.state;
    }
    let mut training = OfVariables { store, model, optimizer, sampler, checkpoints, train_step };
    let last = until_killed(group, &mut training, done)?;
    same_as_alone(group, &training.store, &mut training.optimizer, last)
}

/// Trains after so many steps, until all ranks are killed while they save. Returns the last step: nobody is killed in the
/// last start.
pub fn until_killed(group: &ProcessGroup, training: &mut impl Training, done: i64) -> Result<i64> {
    let begun_file = folder()?.join(BEGUN);
    let begun = fs::read_to_string(&begun_file).map_or(Ok(0), |begun| begun.parse::<i64>())?;
    group.barrier()?;
    ensure!(done == begun || done == begun - 1, "step {done} is resumed, and {begun} was begun");

    let restart = number("TORCHELASTIC_RESTART_COUNT")?;
    let is_last = restart == number("TORCHELASTIC_MAX_RESTARTS")?;
    let mut seed = [i64::from(std::process::id())];
    group.broadcast(&mut seed, 0)?;
    let mut draws = Draws(seed[0] as u64);
    let last = done + if is_last { LAST } else { 1 + draws.below(2) as i64 };
    let mut killer = None;
    // Of the save before: the time of the copy, and of all of it.
    let mut took = [Duration::from_millis(10); 2];
    for step in done + 1..=last {
        training.step()?;
        training.wait()?;
        if group.rank() == 0 {
            fs::write(&begun_file, step.to_string())?;
        }
        group.barrier()?;
        if step == last && !is_last {
            // During the copy, until all is written, or later.
            let most = [took[0], took[1], 5 * took[1]][draws.below(3) as usize];
            let delay = most * draws.below(1200) as u32 / 1000;
            killer = kill_all(group, delay)?;
        }
        let start = Instant::now();
        training.async_save(step)?;
        took[0] = start.elapsed();
        if draws.below(2) == 0 {
            training.wait()?;
            took[1] = start.elapsed();
        }
    }
    training.wait()?;
    if !is_last {
        // What is written is what was there before this.
        training.step()?;
        killer.map(JoinHandle::join); // it does not return
        group.barrier()?; // nor does this, on the others
    }
    Ok(last)
}

/// Has all ranks killed after a while, by rank 0.
fn kill_all(group: &ProcessGroup, delay: Duration) -> Result<Option<JoinHandle<()>>> {
    let mut pids = vec![0_i64; group.world_size()];
    group.all_gather(&[i64::from(std::process::id())], &mut pids)?;
    if group.rank() > 0 {
        return Ok(None);
    }
    Ok(Some(thread::spawn(move || {
        thread::sleep(delay);
        // This one comes last.
        for pid in pids.into_iter().rev().filter_map(|pid| Pid::from_raw(pid as i32)) {
            let _ = kill_process(pid, Signal::KILL);
        }
    })))
}

fn same_as_alone(
    group: &ProcessGroup,
    store: &VarStore,
    optimizer: &mut impl OptimizerState,
    steps: i64,
) -> Result<()> {
    let expected = crate::checkpoint_killed::store();
    let mut alone = Adam::default().build(&expected, 0.01)?;
    for _ in 0..steps {
        alone.backward_step(&loss(&expected));
    }
    for (name, tensor) in store.variables() {
        same_elements(&name, &tensor, &expected.variables()[&name])?;
    }
    optimizer.consolidate_state_dict(0)?;
    if group.rank() == 0 {
        same_state(&optimizer.state()?, &alone.state()?).context("the optimizer")?;
    }
    Ok(())
}

/// Saves steps, and checks which one is found.
struct Steps<'a> {
    group: &'a ProcessGroup,
    folder: PathBuf,
}

impl Steps<'_> {
    fn in_both(&self) -> Result<Checkpoints> {
        Ok(Checkpoints::in_memory(self.group)?.and_folder(&self.folder)?)
    }

    /// Saves a model that is all `step`.
    fn save(&self, checkpoints: &mut Checkpoints, step: i64) -> Result<()> {
        let (store, sampler) = (filled(step), DistributedSampler::new(1, self.group));
        let model = Ddp::new((), &store, self.group)?;
        let optimizer = Adam::default().build(&store, 0.01)?;
        Ok(checkpoints.save(step as usize, &model, &store, &optimizer, &sampler, &step)?)
    }

    fn finds(&self, checkpoints: &mut Checkpoints, expected: Option<i64>) -> Result<()> {
        let latest = checkpoints.latest::<i64>()?;
        let found = latest.as_ref().map(|latest| latest.state);
        ensure!(found == expected, "{found:?} is found, not {expected:?}");
        latest.map_or(Ok(()), |latest| self.resumes(&latest))
    }

    fn resumes(&self, latest: &Checkpoint<i64>) -> Result<()> {
        let (store, mut sampler) = (filled(0), DistributedSampler::new(1, self.group));
        let mut optimizer = Adam::default().build(&store, 0.01)?;
        latest.resume(&store, &mut optimizer, &mut sampler)?;
        let expected = filled(latest.state).variables();
        for (name, tensor) in store.variables() {
            same_elements(&name, &tensor, &expected[&name])?;
        }
        Ok(())
    }

    /// Has rank 0 do something to the folder.
    fn on_disk(&self, change: impl FnOnce(&Path) -> io::Result<()>) -> Result<()> {
        self.group.barrier()?;
        if self.group.rank() == 0 {
            change(&self.folder)?;
        }
        Ok(self.group.barrier()?)
    }
}

fn filled(step: i64) -> VarStore {
    let store = store();
    tch::no_grad(|| store.variables().values_mut().for_each(|tensor| _ = tensor.fill_(step)));
    store
}

fn newest(group: &ProcessGroup) -> Result<()> {
    let steps = Steps { group, folder: folder()?.join("checkpoints") };
    let mut both = steps.in_both()?;
    steps.finds(&mut both, None)?;
    steps.save(&mut both, 1)?;
    drop(both);
    let mut in_folder = Checkpoints::open(&steps.folder, group)?;
    steps.finds(&mut in_folder, Some(1))?;
    steps.save(&mut in_folder, 2)?;
    drop(in_folder);
    let mut both = steps.in_both()?;
    steps.finds(&mut both, Some(2))?;
    steps.save(&mut both, 3)?;
    steps.on_disk(|folder| fs::remove_dir_all(folder.join("step-3")))?;
    drop(both);
    let mut both = steps.in_both()?;
    let unread = steps.save(&mut both, 4).err().context("it was not read")?.to_string();
    ensure!(unread.contains("call latest first"), "{unread}");
    steps.finds(&mut both, Some(3))?;
    drop(both);
    // A later one that is damaged does not hide what is in memory.
    let mut in_folder = Checkpoints::open(&steps.folder, group)?;
    steps.finds(&mut in_folder, Some(2))?;
    steps.save(&mut in_folder, 5)?;
    drop(in_folder);
    steps.on_disk(|folder| fs::write(folder.join("step-5/model.safetensors"), "none"))?;
    let mut both = steps.in_both()?;
    steps.finds(&mut both, Some(3))?;
    steps.save(&mut both, 6)?;
    drop(both);
    // Of another training it is not seen.
    let mut alone = Checkpoints::in_memory(group)?;
    steps.finds(&mut alone, None)?;
    steps.save(&mut alone, 1)?;
    steps.finds(&mut alone, Some(1))?;
    // What was found stays while one more is saved.
    let found = alone.latest::<i64>()?.context("the first")?;
    steps.save(&mut alone, 2)?;
    steps.resumes(&found)?;
    steps.save(&mut alone, 3)?;
    let replaced = steps.resumes(&found).err().context("it is gone")?.to_string();
    ensure!(replaced.contains("two checkpoints were saved"), "{replaced}");
    drop(alone);
    steps.finds(&mut steps.in_both()?, Some(6))
}
