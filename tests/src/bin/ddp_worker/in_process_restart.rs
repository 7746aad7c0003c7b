//! Trainings of models in parts that begin again in the same processes, from checkpoints in memory, when ranks are
//! killed.

use std::fs::{self, File};
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use flow_autograd::OptimizerState;
use flow_comm::ProcessGroup;
use flow_ddp::{
    Attempt, CheckpointModel, Checkpoints, Ddp, DistributedSampler, Fsdp, FullyShard,
    InProcessRestart, ZeroRedundancyOptimizer,
};
use flow_tests::net::Net;
use flow_tests::registry::{Scenario, Test, launched, machines, process};
use flow_tests::{Finished, Process, TEST_TIMEOUT, assert_contains};
use rustix::process::{Signal, getpid, kill_process};
use tch::nn::{Adam, Module, OptimizerConfig, Path, VarStore};
use tch::{Kind, Tensor};

use crate::checkpoint_killed::BEGUN;
use crate::checkpoints::{FOLDER, folder};
use crate::helpers::{Draws, error};
use crate::models::{device, store};
use crate::optimizers::{same_elements, same_state};

/// As many workers are killed.
const KILLS: usize = 6;
pub const IN_PLACE: &[&str] = &["--elastic", "in-place", "--max-restarts", "6"];
const SMALLER: &[&str] = &["--elastic", "in-place", "--min-workers", "1"];
/// What has the model in parts.
const WAY: &str = "FLOW_TEST_WAY";
/// The ranks train in multiples of this.
const MULTIPLE: &str = "FLOW_TEST_MULTIPLE";
/// In the folder: a line of each worker that has started, and of each that was killed.
pub const STARTED: &str = "started";
const KILLED: &str = "killed";
/// The steps of a training that nobody interrupts.
const STEPS: i64 = 3;

pub const SCENARIOS: &[Scenario] = &[
    process(
        "what_is_in_parts_goes_on_when_ranks_are_killed",
        with_newcomers,
        &[
            launched(2).flags(IN_PLACE).mode("fsdp", WAY, "fsdp"),
            launched(2).flags(IN_PLACE).mode("zero", WAY, "zero"),
            launched(2).flags(IN_PLACE).mode("fully_shard", WAY, "fully_shard"),
            launched(4).flags(IN_PLACE).mode("multiples", MULTIPLE, "2"),
            launched(4).flags(IN_PLACE).mode("all or none", MULTIPLE, "4"),
            // All ranks of the machine that has the checkpoint may be killed at once: the others wait for them.
            machines(&[2, 2]).flags(IN_PLACE).mode("multiples", MULTIPLE, "2"),
        ],
    )
    .checked_by(newcomers_come),
    process("the_rest_of_a_replica_waits", smaller, &[launched(4).flags(SMALLER)])
        .checked_by(ends_smaller),
    process("too_few_ranks_are_an_error", too_few, &[launched(2).flags(SMALLER)])
        .checked_by(ends_with_an_error),
];

/// A module of one weight.
#[derive(Debug)]
pub struct Layer(Tensor);

impl Layer {
    pub fn new(path: Path<'_>, number: i64) -> Self {
        let numbers = Tensor::arange(151 * 151, (Kind::Float, device())) * (number + 1);
        let weight = (numbers.remainder(97) / 97.0 - 0.5) * 0.2;
        Self(path.add("weight", weight.reshape([151, 151]), true))
    }

    pub fn weight(&self) -> Tensor {
        self.0.shallow_clone()
    }
}

impl Module for Layer {
    fn forward(&self, input: &Tensor) -> Tensor {
        input.matmul(&self.0).tanh()
    }
}

/// The same on all ranks, so that the mean of gradients is exact on 1, 2 and 4.
fn loss(layers: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
    let input = Tensor::arange(3 * 151, (Kind::Float, device())).reshape([3, 151]) / 453.0;
    Ok((layers(&input)? - 0.3).square().sum(Kind::Float))
}

pub fn number(variable: &str, default: usize) -> Result<usize> {
    let Ok(text) = std::env::var(variable) else { return Ok(default) };
    text.parse().with_context(|| format!("{variable} is '{text}'"))
}

/// Adds a line of this process.
pub fn note(name: &str) -> Result<()> {
    let mut file = File::options().create(true).append(true).open(folder()?.join(name))?;
    Ok(file.write_all(format!("{}\n", std::process::id()).as_bytes())?)
}

fn noted(name: &str) -> Result<usize> {
    let path = folder()?.join(name);
    Ok(if path.exists() { fs::read_to_string(path)?.lines().count() } else { 0 })
}

/// Kills this process after a while. It is counted at once, so that there are not too many.
fn kill_soon(delay: Duration) -> Result<()> {
    static IS_DOOMED: AtomicBool = AtomicBool::new(false);
    if IS_DOOMED.swap(true, Ordering::Relaxed) {
        return Ok(());
    }
    note(KILLED)?;
    thread::spawn(move || {
        thread::sleep(delay);
        let _ = kill_process(getpid(), Signal::KILL);
    });
    Ok(())
}

/// Who is killed while the ranks stay the same, and when.
pub struct Fate {
    ranks: usize,
    /// The steps that were done at the begin.
    done: i64,
    is_victim: bool,
    /// The step in which the victims are killed.
    at: i64,
    delay: Duration,
}

impl Fate {
    /// Draws victims: two at most, and not all ranks. All ranks call this.
    pub fn new(group: &ProcessGroup, done: i64, ranks: usize) -> Result<Self> {
        let mut seed = [i64::from(std::process::id()), noted(KILLED)? as i64];
        group.broadcast(&mut seed, 0)?;
        let mut draws = Draws(seed[0] as u64);
        let size = group.world_size();
        let most = KILLS.saturating_sub(seed[1] as usize).min(size - 1).min(2);
        let victims = if most == 0 { 0 } else { 1 + draws.below(most as u64) as usize };
        let first = draws.below(size as u64) as usize;
        let delay = draws.below(20_000) + u64::from(std::process::id()) % 97;
        Ok(Self {
            ranks,
            done,
            is_victim: (group.rank() + size - first) % size < victims,
            at: done + draws.below(3) as i64,
            delay: Duration::from_micros(delay),
        })
    }

    /// Whether enough were killed, and all ranks are there again. All ranks call this.
    pub fn is_over(&self, group: &ProcessGroup, step: i64) -> Result<bool> {
        if self.is_victim && step == self.at {
            kill_soon(self.delay)?;
        }
        let mut is_over = [0_i64];
        if group.rank() == 0 {
            // Of each that is killed: who is to be killed may have some time left.
            let have_come = noted(STARTED)? >= self.ranks + KILLS;
            let is_enough = have_come && step >= self.done + STEPS;
            is_over[0] = i64::from(is_enough && group.world_size() == self.ranks);
        }
        group.broadcast(&mut is_over, 0)?;
        Ok(is_over[0] > 0)
    }
}

fn with_newcomers() -> Result<()> {
    note(STARTED)?;
    let ranks = number("WORLD_SIZE", 1)?;
    let restart = InProcessRestart::new(ProcessGroup::from_env()?);
    let trained = restart.multiple_of(number(MULTIPLE, 1)?).run(|attempt| train(attempt, ranks))?;
    ensure!(trained.is_some());
    println!("all is well");
    Ok(())
}

/// Trains until enough are killed and all `ranks` are there again.
fn train(attempt: &Attempt<'_>, ranks: usize) -> Result<()> {
    let group = attempt.group();
    let vs = store();
    let way = std::env::var(WAY).unwrap_or_else(|_| "fully_shard".into());
    if way == "fully_shard" {
        // Two replicas, where there are enough ranks.
        let replicas = group.world_size().div_ceil(2).min(2);
        let shard = FullyShard::builder(group).replicas(replicas).begin(&vs)?;
        let first = shard.module(|| Layer::new(vs.root() / 0, 0))?;
        let second = shard.module(|| Layer::new(vs.root() / 1, 1))?;
        let model = shard.wrap(())?;
        let optimizer = model.optimizer(Adam::default(), 0.01)?;
        let layers =
            |input: &Tensor| Ok(second.try_forward_t(&first.try_forward_t(input, true)?, true)?);
        return steps(attempt, ranks, &vs, &model, optimizer, layers);
    }
    let (first, second) = (Layer::new(vs.root() / 0, 0), Layer::new(vs.root() / 1, 1));
    let layers = |input: &Tensor| Ok(second.forward(&first.forward(input)));
    if way == "fsdp" {
        let model = Fsdp::new((), &vs, group)?;
        let optimizer = model.optimizer(Adam::default(), 0.01)?;
        steps(attempt, ranks, &vs, &model, optimizer, layers)
    } else {
        let model = Ddp::new((), &vs, group)?;
        let optimizer = ZeroRedundancyOptimizer::new(&vs, group, Adam::default(), 0.01)?;
        steps(attempt, ranks, &vs, &model, optimizer, layers)
    }
}

fn steps(
    attempt: &Attempt<'_>,
    ranks: usize,
    vs: &VarStore,
    model: &impl CheckpointModel,
    mut optimizer: ZeroRedundancyOptimizer,
    layers: impl Fn(&Tensor) -> Result<Tensor>,
) -> Result<()> {
    let group = attempt.group();
    let mut sampler = DistributedSampler::new(1, group);
    let mut checkpoints = Checkpoints::in_memory(group)?;
    let mut step = 0;
    if let Some(checkpoint) = checkpoints.latest::<i64>()? {
        checkpoint.resume(vs, &mut optimizer, &mut sampler)?;
        step = checkpoint.state;
    }
    let begun_file = folder()?.join(BEGUN);
    let begun = fs::read_to_string(&begun_file).map_or(Ok(0), |begun| begun.parse::<i64>())?;
    group.barrier()?;
    ensure!(step == begun || step == begun - 1, "step {step} is resumed, and {begun} was begun");

    let fate = Fate::new(group, step, ranks)?;
    while !fate.is_over(group, step)? {
        attempt.check()?;
        optimizer.backward_step(&loss(&layers)?)?;
        step += 1;
        checkpoints.wait()?;
        if group.rank() == 0 {
            // Whole or not there, whenever this rank is killed.
            let new = folder()?.join("begun.new");
            fs::write(&new, step.to_string())?;
            fs::rename(new, &begun_file)?;
        }
        group.barrier()?;
        checkpoints.async_save(step as usize, model, vs, &optimizer, &sampler, &step)?;
    }
    checkpoints.wait()?;
    same_as_alone(vs, &mut optimizer, model, group, step)
}

/// Checks weights and optimizer's state, by way of a checkpoint that one process loads.
fn same_as_alone(
    vs: &VarStore,
    optimizer: &mut ZeroRedundancyOptimizer,
    model: &impl CheckpointModel,
    group: &ProcessGroup,
    steps: i64,
) -> Result<()> {
    let saved = folder()?.join("end");
    let sampler = DistributedSampler::new(1, group);
    let mut checkpoints = Checkpoints::open(&saved, group)?;
    let _ = checkpoints.latest::<i64>()?;
    checkpoints.save(steps as usize, model, vs, optimizer, &sampler, &steps)?;
    drop(checkpoints);
    group.barrier()?;
    if group.rank() > 0 {
        return Ok(());
    }
    let alone = ProcessGroup::in_process(1)?.remove(0);
    let mut pairs = Vec::new();
    for resumes in [true, false] {
        let vs = store();
        let (first, second) = (Layer::new(vs.root() / 0, 0), Layer::new(vs.root() / 1, 1));
        let mut optimizer = Adam::default().build(&vs, 0.01)?;
        if resumes {
            let mut checkpoints = Checkpoints::open(&saved, &alone)?;
            let checkpoint = checkpoints.latest::<i64>()?.context("there is no checkpoint")?;
            ensure!(checkpoint.state == steps, "step {} is saved", checkpoint.state);
            let mut sampler = DistributedSampler::new(1, &alone);
            checkpoint.resume(&vs, &mut optimizer, &mut sampler)?;
        } else {
            for _ in 0..steps {
                optimizer.backward_step(&loss(|x| Ok(second.forward(&first.forward(x))))?);
            }
        }
        pairs.push((vs, optimizer));
    }
    let [(trained, optimizer), (expected, expected_optimizer)] = &pairs[..] else { unreachable!() };
    for (name, tensor) in trained.variables() {
        same_elements(&name, &tensor, &expected.variables()[&name])?;
    }
    same_state(&optimizer.state()?, &expected_optimizer.state()?).context("the optimizer")
}

/// One of four is lost for good: two train, and one waits to the end.
fn smaller() -> Result<()> {
    note(STARTED)?;
    let mut worlds = Vec::new();
    let trained =
        InProcessRestart::new(ProcessGroup::from_env()?).multiple_of(2).run(|attempt| {
            let group = attempt.group();
            worlds.push(group.world_size());
            let vs = store();
            let shard = FullyShard::new(&vs, group)?;
            let first = shard.module(|| Layer::new(vs.root() / 0, 0))?;
            let second = shard.module(|| Layer::new(vs.root() / 1, 1))?;
            let model = shard.wrap(())?;
            let mut optimizer = model.optimizer(Adam::default(), 0.01)?;
            let mut sampler = DistributedSampler::new(1, group);
            let mut checkpoints = Checkpoints::in_memory(group)?;
            let mut step = 0;
            if let Some(checkpoint) = checkpoints.latest::<i64>()? {
                checkpoint.resume(&vs, &mut optimizer, &mut sampler)?;
                step = checkpoint.state;
            }
            // The parts of the lost rank, and of the one that waits, are read from their memory.
            ensure!(
                step == if group.world_size() == 4 { 0 } else { STEPS },
                "step {step} is resumed"
            );
            let layers = |input: &Tensor| {
                Ok(second.try_forward_t(&first.try_forward_t(input, true)?, true)?)
            };
            while step < 2 * STEPS {
                attempt.check()?;
                if step == STEPS && group.world_size() == 4 {
                    checkpoints.wait()?;
                    group.barrier()?;
                    if group.rank() == 1 {
                        kill_process(getpid(), Signal::KILL)?;
                    }
                }
                optimizer.backward_step(&loss(layers)?)?;
                step += 1;
                if step <= STEPS {
                    checkpoints.save(step as usize, &model, &vs, &optimizer, &sampler, &step)?;
                }
            }
            same_as_alone(&vs, &mut optimizer, &model, group, step)
        })?;
    println!("{worlds:?} {}", trained.is_some());
    Ok(())
}

fn too_few() -> Result<()> {
    note(STARTED)?;
    let group = ProcessGroup::from_env()?;
    group.barrier()?;
    group.set_timeout(Duration::from_secs(3));
    let run = InProcessRestart::new(group).multiple_of(2).run(|attempt| {
        let group = attempt.group();
        group.barrier()?;
        if group.rank() == 0 {
            kill_process(getpid(), Signal::KILL)?;
        }
        Ok(group.barrier()?)
    });
    let text = error(run.map(drop).map_err(|error: anyhow::Error| error))?;
    println!("{text}");
    Ok(())
}

/// Runs the job, on machines if it has several; None if there can be none.
fn run(test: &Test) -> Option<Vec<Finished>> {
    let mut commands = test.commands();
    for command in &mut commands {
        command.env(FOLDER, test.folder.path());
    }
    if commands.len() == 1 {
        return Some(vec![Process::start(commands.remove(0)).finish(TEST_TIMEOUT)]);
    }
    let net = Net::new(commands.len())?;
    let agents = commands.iter().enumerate().map(|(node, command)| net.start(node, command));
    let agents: Vec<_> = agents.collect();
    let finished = agents.into_iter().map(|agent| agent.finish()).collect();
    net.until_nothing_is_left();
    Some(finished)
}

/// How many workers have started.
fn started(test: &Test) -> usize {
    fs::read_to_string(test.folder.path().join(STARTED)).unwrap().lines().count()
}

pub fn newcomers_come(test: &Test) {
    let Some(finished) = run(test) else { return };
    assert!(finished.iter().all(|node| node.code == Some(0)), "{finished:?}");
    let ranks: usize = test.job.nodes().iter().sum();
    let good = finished.iter().map(|node| node.stdout.matches("all is well\n").count());
    assert_eq!(good.sum::<usize>(), ranks, "{finished:?}");
    // The others have gone on in their processes.
    assert_eq!(started(test), ranks + KILLS, "{finished:?}");
}

fn ends_smaller(test: &Test) {
    let Some(mut finished) = run(test) else { return };
    let finished = finished.remove(0);
    assert_eq!(finished.code, Some(0), "{finished:?}");
    let lines = finished.sorted_lines();
    let said: Vec<&str> = lines.into_iter().filter(|line| line.starts_with('[')).collect();
    assert_eq!(said, ["[4, 2] true", "[4, 2] true", "[4] false"], "{finished:?}");
    assert_eq!(started(test), 4);
}

fn ends_with_an_error(test: &Test) {
    let Some(mut finished) = run(test) else { return };
    let finished = finished.remove(0);
    assert_eq!(finished.code, Some(0), "{finished:?}");
    let parts = ["2 ranks train together, the job has 1,", "3s", "--max-restarts"];
    assert_contains(finished.stdout.lines().next().unwrap_or_default(), &parts);
}
