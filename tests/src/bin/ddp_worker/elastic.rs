//! Trainings that go on when ranks are killed and others come in their place.

use std::cell::Cell;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use flow_ddp::{
    BoxError, DataLoader, Dataset, Ddp, DistributedSampler, Elastic, Error, OptimizerState,
    ProcessGroup, SamplerState, TryBackwardStep, convert_sync_batchnorm,
};
use flow_tests::assert_contains;
use flow_tests::registry::{Scenario, Test, launched, machines, process};
use rustix::process::{Signal, getpid, kill_process};
use serde::{Deserialize, Serialize};
use tch::nn::{self, Optimizer, OptimizerConfig, VarStore};
use tch::{Kind, Tensor};

use crate::helpers::{Draws, error, own_group, says, values};
use crate::models::{batchnorm, device, store};
use crate::random_options::model::{Layer, Net, Operation, WIDTH, When};
use crate::virtual_ranks::bits;

const NEWCOMERS_FAIL: &str = "FLOW_TEST_NEWCOMERS_FAIL";
const STOPPED: &str = "FLOW_TEST_STOPPED";
const IN_PLACE: &[&str] = &["--elastic", "in-place", "--max-restarts", "4"];
const HANGS: &[&str] = &["--elastic", "in-place", "--max-restarts", "2", "--hang-timeout", "10"];

pub const SCENARIOS: &[Scenario] = &[
    process(
        "killed_ranks_leave_the_bits_of_one_process",
        same_bits,
        &[
            launched(2).flags(IN_PLACE),
            launched(3).flags(IN_PLACE),
            launched(2).flags(IN_PLACE).mode("copies", "FLOW_DDP_COPY", "1"),
            launched(3).flags(IN_PLACE).mode("thread", "FLOW_DDP_PROGRESS", "thread"),
            launched(2).flags(IN_PLACE).mode("newcomers fail", NEWCOMERS_FAIL, "1"),
            machines(&[1, 2]).flags(IN_PLACE),
        ],
    )
    .checked_by(ends_well),
    process(
        "stopped_ranks_leave_the_bits_of_one_process",
        same_bits,
        &[launched(2).flags(HANGS).mode("stopped", STOPPED, "1")],
    )
    .checked_by(are_taken_out),
    process(
        "killed_ranks_lose_no_sample",
        every_sample,
        &[launched(2).flags(IN_PLACE), launched(3).flags(IN_PLACE)],
    )
    .checked_by(ends_well),
];

/// The fewest steps.
const STEPS: u64 = 16;
const VIRTUAL_RANKS: usize = 4;
/// Ranks, and how many processes had them before, that kill themselves at once: one such group after the other.
const VICTIMS_OF_2: &[&[[i64; 2]]] = &[&[[1, 0]], &[[0, 0]], &[[1, 1]], &[[0, 1]]];
const VICTIMS_OF_3: &[&[[i64; 2]]] = &[&[[0, 0]], &[[1, 0], [2, 0]], &[[0, 1]]];

const VICTIMS_THAT_STOP: &[&[[i64; 2]]] = &[&[[1, 0]], &[[0, 0]]];

/// The first one trains; those that come after it fail when they come: with another model, or killed.
const NEWCOMERS: &[&[[i64; 2]]] = &[&[[1, 0]], &[[1, 1]], &[[1, 2]], &[[1, 3]]];

/// Which process this is, among those that are to be killed.
struct Fate {
    own: [i64; 2],
    victims: &'static [&'static [[i64; 2]]],
    ranks: usize,
    is_doomed: Cell<bool>,
}

impl Fate {
    fn from_env() -> Self {
        let number =
            |name| std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(0);
        let ranks = number("WORLD_SIZE") as usize;
        Self {
            own: [number("RANK"), number("FLOW_REPLACEMENT")],
            victims: match ranks {
                _ if std::env::var_os(NEWCOMERS_FAIL).is_some() => NEWCOMERS,
                _ if std::env::var_os(STOPPED).is_some() => VICTIMS_THAT_STOP,
                2 => VICTIMS_OF_2,
                _ => VICTIMS_OF_3,
            },
            ranks,
            is_doomed: Cell::new(false),
        }
    }

    /// Whether this process is to fail when it comes.
    fn fails_at_once(&self) -> bool {
        self.victims == NEWCOMERS && self.own[1] > 0 && self.victims.contains(&&[self.own][..])
    }

    /// Kills this process soon, if it is its turn. Returns whether all are there and none is to be killed any
    /// more. All ranks call this.
    fn is_over(&self, group: &ProcessGroup) -> Result<bool, Error> {
        let mut present = vec![0; 2 * group.world_size()];
        group.all_gather(&self.own, &mut present)?;
        let is_whole = group.world_size() == self.ranks;
        let next = self.victims.iter().find(|victims| {
            victims.iter().any(|victim| present.chunks(2).any(|own| own == victim))
        });
        let Some(next) = next else { return Ok(is_whole) };
        if is_whole && next.contains(&self.own) && !self.is_doomed.replace(true) {
            if self.victims == VICTIMS_THAT_STOP {
                stop_soon();
            } else {
                kill_soon();
            }
        }
        Ok(false)
    }
}

fn kill_soon() {
    let delay = random_delay();
    std::thread::spawn(move || {
        std::thread::sleep(delay);
        let _ = kill_process(getpid(), Signal::KILL);
    });
}

/// Stops this process. It is continued when it is about to be taken out, goes on for a moment, and stops again.
fn stop_soon() {
    let delay = random_delay();
    std::thread::spawn(move || {
        std::thread::sleep(delay);
        let script = format!("sleep 10; kill -CONT {}", std::process::id());
        let _ = Command::new("sh").args(["-c", &script]).stdout(Stdio::null()).spawn();
        loop {
            let _ = kill_process(getpid(), Signal::STOP);
            std::thread::sleep(delay);
        }
    });
}

fn random_delay() -> Duration {
    Duration::from_micros(u64::from(std::process::id()) * 7919 % 9000)
}

/// A random model of many layers, and its optimizer.
#[derive(Debug)]
struct Drawn {
    layers: Vec<Layer>,
    kind: Kind,
    cap: f64,
    backwards: usize,
    is_adam: bool,
    clips: bool,
}

impl Drawn {
    /// `seed` is the same on all ranks and in each process that comes.
    fn new(seed: u64) -> Self {
        let draws = &mut Draws(seed);
        let kind = if draws.below(2) == 0 { Kind::Double } else { Kind::Float };
        let mut operations = vec![
            Operation::Linear,
            Operation::BatchNorm,
            Operation::Dropout,
            Operation::Empty,
            Operation::One,
            Operation::Count,
            Operation::Average,
            Operation::Large,
            Operation::Conv,
            Operation::Scalar,
        ];
        let mut layers = Vec::new();
        while !operations.is_empty() {
            let operation = operations.swap_remove(draws.below(operations.len() as u64) as usize);
            let frozen = draws.below(8) == 0 && operation == Operation::Conv;
            let (when, permuted) = (When::Always, draws.below(3) == 0);
            let (recomputed, tied_to) = (false, None);
            layers.push(Layer { operation, when, kind, permuted, frozen, recomputed, tied_to });
        }
        Self {
            layers,
            kind,
            cap: [0.00001, 0.05, 25.0][draws.below(3) as usize],
            backwards: 1 + draws.below(2) as usize,
            is_adam: draws.below(2) == 0,
            clips: draws.below(2) == 0,
        }
    }

    fn optimizer(&self, store: &VarStore) -> Result<Optimizer> {
        let optimizer = if self.is_adam {
            nn::Adam::default().build(store, 0.01)
        } else {
            nn::sgd(0.9, 0.0, 0.0, false).build(store, 0.01)
        };
        Ok(optimizer?)
    }

    fn options(&self, group: &ProcessGroup) -> flow_ddp::DdpBuilder {
        Ddp::builder(group).virtual_ranks(VIRTUAL_RANKS).bucket_cap_mb(self.cap)
    }

    /// Computes the gradients of a step.
    fn gradients(
        &self,
        model: &Ddp<Net>,
        optimizer: &mut Optimizer,
        step: u64,
    ) -> Result<(), Error> {
        for part in model.virtual_ranks() {
            model.in_virtual_rank(part, step, || self.backward(model))?;
        }
        if self.clips {
            optimizer.clip_grad_norm(0.3);
        }
        Ok(())
    }

    fn backward(&self, model: &Ddp<Net>) -> Result<(), Error> {
        for number in 0..self.backwards {
            let _guard = (number + 1 < self.backwards).then(|| model.no_sync());
            let input = Tensor::randn([3, WIDTH], (self.kind, device()));
            let loss = model.try_forward_t(&input, true)?.square().mean(self.kind);
            loss.f_backward().map_err(Error::from_backward)?;
        }
        Ok(())
    }
}

/// The weights, buffers and optimizer's state are the bits of one process that nothing happened to.
fn same_bits() -> Result<()> {
    let fate = Fate::from_env();
    let group = ProcessGroup::from_env()?;
    let drawn = Drawn::new(fate.ranks as u64 + 100);
    let own = store();
    let rank = fate.own[0] as usize;
    // Each process begins with other weights.
    let net = Net::new(&own, &drawn.layers, drawn.kind, rank + 7 * fate.own[1] as usize);
    if fate.fails_at_once() && fate.own[1] == 1 {
        let _ = own.root().zeros("more", &[3]);
    } else if fate.fails_at_once() && !fate.is_doomed.replace(true) {
        kill_soon();
    }
    let start = snapshot(&own, &drawn.optimizer(&own)?)?;
    let mut elastic = Elastic::new(net, &own, drawn.optimizer(&own)?, 0, &group)
        .options(|group| drawn.options(group));
    drop(group);
    elastic.run(|training| -> Result<(), Error> {
        while *training.state < STEPS || !fate.is_over(training.group())? {
            let step = *training.state;
            ensure_steps(training.steps(), step)?;
            training.step(|model, optimizer| drawn.gradients(model, optimizer, step))?;
            *training.state += 1;
        }
        Ok(())
    })?;
    let steps = *elastic.state();
    let trained = snapshot(&own, elastic.optimizer())?;

    let alone = own_group(elastic.group())?;
    let other = store();
    let net = Net::new(&other, &drawn.layers, drawn.kind, 0);
    let mut optimizer = drawn.optimizer(&other)?;
    let model = drawn.options(&alone).wrap(net, &other)?;
    for step in 0..steps {
        drawn.gradients(&model, &mut optimizer, step)?;
        optimizer.step();
    }
    let expected = snapshot(&other, &optimizer)?;
    ensure!(trained.len() == expected.len(), "{} of {}", trained.len(), expected.len());
    for ((name, trained), (_, expected)) in trained.iter().zip(&expected) {
        ensure!(trained == expected, "{drawn:?}: after {steps} steps {name} has other bits");
    }
    ensure!(start[..] != trained[..start.len()], "nothing was trained");
    println!("all is well");
    Ok(())
}

/// The number of the step is part of the program's state, and of the job's.
fn ensure_steps(of_the_job: u64, of_the_program: u64) -> Result<(), Error> {
    if of_the_job == of_the_program {
        return Ok(());
    }
    let reason = format!("{of_the_job} steps of the job, {of_the_program} of the program");
    Err(Error::Backward { reason })
}

/// The weights, the buffers and the optimizer's state.
fn snapshot(store: &VarStore, optimizer: &Optimizer) -> Result<Vec<(String, Vec<u8>)>> {
    let mut all = variables(store)?;
    for (name, tensor) in optimizer.state()?.tensors {
        all.push((name, bits(&tensor)?));
    }
    Ok(all)
}

fn variables(store: &VarStore) -> Result<Vec<(String, Vec<u8>)>> {
    values(store).into_iter().map(|(name, tensor)| Ok((name, bits(&tensor)?))).collect()
}

const SAMPLES: usize = 1003;
const EPOCHS: u64 = 3;

/// The samples are their own numbers.
struct Numbers;

impl Dataset for Numbers {
    type Batch = Tensor;

    fn len(&self) -> usize {
        SAMPLES
    }

    fn batch(&self, indices: &[usize]) -> Result<Tensor, BoxError> {
        let indices: Vec<i64> = indices.iter().map(|&index| index as i64).collect();
        Ok(Tensor::from_slice(&indices))
    }
}

#[derive(Default, Serialize, Deserialize)]
struct Progress {
    epoch: u64,
    /// None at the beginning of an epoch.
    sampler: Option<SamplerState>,
}

/// Each weight counts how often its sample was taken. An epoch takes all samples, and none twice, but for those
/// that make the last places of the ranks even.
fn every_sample() -> Result<()> {
    let fate = Fate::from_env();
    let group = ProcessGroup::from_env()?;
    let vs = store();
    let counts = vs.root().zeros("counts", &[SAMPLES as i64]);
    let optimizer = nn::Sgd::default().build(&vs, 1.0)?;
    let mut elastic = Elastic::new((), &vs, optimizer, Progress::default(), &group);
    drop(group);
    let data = Arc::new(Numbers);
    elastic.run(|training| -> Result<()> {
        let ranks = training.group().world_size() as f64;
        let mut sampler = DistributedSampler::new(SAMPLES, training.group());
        if let Some(position) = &training.state.sampler {
            sampler.resume(position)?;
        }
        while training.state.sampler.is_some()
            || training.state.epoch < EPOCHS
            || !fate.is_over(training.group())?
        {
            sampler.set_epoch(training.state.epoch);
            for batch in DataLoader::new(&data, &sampler, 7) {
                let taken = batch?;
                // Gradients are averaged.
                training.step(|_, _| {
                    let loss = counts.index_select(0, &taken).sum(Kind::Float) * -ranks;
                    loss.f_backward().map_err(Error::from_backward)
                })?;
                training.state.sampler = Some(sampler.state());
            }
            training.state.sampler = None;
            training.state.epoch += 1;
        }
        Ok(())
    })?;
    let epochs = elastic.state().epoch as f64;
    let least = counts.min().double_value(&[]);
    ensure!(least == epochs, "a sample was taken {least} times in {epochs} epochs");
    let more = counts.sum(Kind::Double).double_value(&[]) - epochs * SAMPLES as f64;
    let places = epochs * (fate.ranks - 1) as f64;
    ensure!(more <= places, "{more} were taken once more, there are {places} places at most");
    println!("all is well");
    Ok(())
}

fn ends_well(test: &Test) {
    is_well(test, &["is started again alone (4 of 4)"]);
}

fn are_taken_out(test: &Test) {
    let why = "is killed: the others have waited for it as long as --hang-timeout";
    let killed = [1, 0].map(|rank| format!("rank {rank} {why}"));
    is_well(test, &[&killed[0], &killed[1], "is started again alone (2 of 2)"]);
}

fn is_well(test: &Test, says: &[&str]) {
    let Some(finished) = test.finish() else { return };
    assert_eq!(finished.code, Some(0), "{finished:?}");
    let ranks: usize = test.job.nodes().iter().sum();
    assert_eq!(finished.stdout.matches("all is well\n").count(), ranks, "{finished:?}");
    assert_contains(&finished.stderr, says);
}

/// Wrong uses are told in one line, and change nothing.
pub fn misused(group: &ProcessGroup) -> Result<()> {
    let vs = store();
    let net = batchnorm(&vs.root());
    let sgd = |vs: &VarStore| nn::Sgd::default().build(vs, 0.1);
    let mut elastic = Elastic::new(net, &vs, sgd(&vs)?, 0, group);
    let input = Tensor::ones([2, 3, 8, 8], (Kind::Float, device()));
    elastic.run(|training| {
        let stepped = training.step(|model, optimizer| {
            optimizer
                .try_backward_step(&model.try_forward_t(&input, true)?.square().mean(Kind::Float))
        });
        let text = error(stepped)?;
        ensure!(text.lines().count() == 1, "{text}");
        says(&text, &["Elastic", "changed parameters", "computes gradients"])?;
        ensure!(training.steps() == 0);
        Ok(())
    })?;
    fails_between(group)?;
    // The state of the first of the ranks that are farthest is that of all, whatever it is.
    let own = if group.rank() == 0 { f64::NAN } else { 1.0 };
    let mut elastic = Elastic::new((), &vs, sgd(&vs)?, own, group);
    elastic.run(|_| Ok::<_, Error>(()))?;
    ensure!(elastic.state().is_nan());
    says(&error(elastic.run(|_| Ok::<_, Error>(())))?, &["run was called before"])?;
    convert_sync_batchnorm(&vs, group)?;
    let converted = Elastic::new((), &vs, sgd(&vs)?, 0, group).run(|_| Ok::<_, Error>(()));
    says(&error(converted)?, &["Elastic", "convert_sync_batchnorm"])
}

/// A step that fails after its forward leaves parameters and buffers as they were.
fn fails_between(group: &ProcessGroup) -> Result<()> {
    let vs = store();
    let net = batchnorm(&vs.root());
    let optimizer = nn::Sgd::default().build(&vs, 0.1)?;
    let input = Tensor::ones([2, 3, 8, 8], (Kind::Float, device()));
    let mut before = Vec::new();
    let mut elastic = Elastic::new(net, &vs, optimizer, 0, group);
    let result: Result<()> = elastic.run(|training| {
        before = variables(&vs)?;
        training.step(|model, _| {
            let _ = model.try_forward_t(&input, true)?;
            ensure!(variables(&vs)? != before, "forward changes no buffer");
            bail!("no more data")
        })
    });
    says(&error(result)?, &["no more data"])?;
    ensure!(variables(&vs)? == before, "a buffer or a parameter has changed");
    Ok(())
}
