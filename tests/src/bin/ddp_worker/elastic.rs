//! Trainings that go on when ranks are killed and others come in their place.

use std::time::Duration;

use anyhow::{Result, ensure};
use flow_ddp::{CommError, Ddp, Error, ProcessGroup, ReduceOp, TensorCollectives, TryBackwardStep};
use flow_tests::registry::{Scenario, Test, launched, process};
use flow_tests::{TEST_TIMEOUT, assert_contains};
use rustix::process::{Signal, getpid, kill_process};
use tch::nn::{self, ModuleT, OptimizerConfig, VarStore};
use tch::{Device, Kind, Tensor};

const IN_PLACE: &[&str] = &["--elastic", "in-place", "--max-restarts", "4"];

pub const SCENARIOS: &[Scenario] = &[process(
    "a_training_whose_ranks_are_killed_has_the_weights_of_one_process",
    train,
    &[
        launched(2).flags(IN_PLACE),
        launched(2).flags(IN_PLACE).mode("copies", "FLOW_DDP_COPY", "1"),
        launched(2).flags(IN_PLACE).mode("thread", "FLOW_DDP_PROGRESS", "thread"),
    ],
)
.checked_by(ends_well)];

/// Small enough that the weights stay finite for any number of steps.
const LEARNING_RATE: f64 = 1e-3;
/// The fewest steps.
const STEPS: i64 = 16;
/// The ranks and how many processes had them before, of those that kill themselves one after the other.
const VICTIMS: [[i64; 2]; 4] = [[1, 0], [0, 0], [1, 1], [0, 1]];

enum Next {
    Step,
    Grow,
    End,
}

struct Training {
    store: VarStore,
    net: Option<nn::SequentialT>,
    /// The steps that are done; none in a newcomer, which has no weights yet.
    step: i64,
}

impl Training {
    fn new(step: i64) -> Self {
        tch::manual_seed(7);
        let store = VarStore::new(Device::Cpu);
        let net = nn::seq_t()
            .add(nn::linear(store.root() / "one", 64, 600, Default::default()))
            .add_fn(|x| x.tanh())
            .add(nn::linear(store.root() / "two", 600, 300, Default::default()))
            .add_fn(|x| x.tanh())
            .add(nn::linear(store.root() / "three", 300, 3, Default::default()));
        Self { store, net: Some(net), step }
    }

    /// Sorted by name.
    fn weights(&self) -> Vec<Tensor> {
        let mut variables: Vec<_> = self.store.variables().into_iter().collect();
        variables.sort_by(|a, b| a.0.cmp(&b.0));
        variables.into_iter().map(|(_, tensor)| tensor).collect()
    }

    /// Trains until all that are to be killed were, or others wait to join.
    fn train(&mut self, group: &ProcessGroup, seat: [i64; 2]) -> Result<Next> {
        self.take_over(group)?;
        let net = self.net.take().expect("it is there between trainings");
        let model = Ddp::builder(group).bucket_cap_mb(0.1).wrap(net, &self.store)?;
        let mut optimizer = nn::Sgd::default().build(&self.store, LEARNING_RATE)?;
        let result = loop {
            match self.train_step(group, seat, &model, &mut optimizer) {
                Ok(Next::Step) => {}
                other => break other,
            }
        };
        self.net = Some(model.into_inner());
        result
    }

    /// All ranks take the weights of the one that is farthest.
    fn take_over(&mut self, group: &ProcessGroup) -> Result<()> {
        let mut steps = vec![0; group.world_size()];
        group.all_gather(&[self.step], &mut steps)?;
        let farthest = (0..steps.len()).max_by_key(|&rank| steps[rank]).unwrap_or(0);
        for mut tensor in self.weights() {
            tch::no_grad(|| group.broadcast_tensor(&mut tensor, farthest))?;
        }
        self.step = steps[farthest];
        Ok(())
    }

    fn train_step(
        &mut self,
        group: &ProcessGroup,
        seat: [i64; 2],
        model: &Ddp<nn::SequentialT>,
        optimizer: &mut nn::Optimizer,
    ) -> Result<Next> {
        let mut waiting = [group.newcomers()? as i64];
        group.all_reduce(&mut waiting, ReduceOp::Max)?;
        if waiting[0] > 0 {
            return Ok(Next::Grow);
        }
        let mut seats = vec![0; 2 * group.world_size()];
        group.all_gather(&seat, &mut seats)?;
        let next = VICTIMS.iter().find(|victim| seats.chunks(2).any(|other| other == *victim));
        let is_whole = group.world_size() == 2;
        if self.step >= STEPS && is_whole && next.is_none() {
            return Ok(Next::End);
        }
        if self.step % 3 == 1 && is_whole && next == Some(&seat) {
            kill_soon();
        }
        optimizer.try_backward_step(&loss(model, self.step))?;
        self.step += 1;
        Ok(Next::Step)
    }
}

/// The same on all ranks, so that any number of them gets the gradients of one process.
fn loss(model: &impl ModuleT, step: i64) -> Tensor {
    let x = Tensor::arange(16 * 64, (Kind::Float, Device::Cpu)).view([16, 64]);
    model.forward_t(&(x * (step + 1) * 0.01).sin(), true).square().mean(Kind::Float)
}

fn kill_soon() {
    let delay = Duration::from_micros(u64::from(std::process::id()) * 7919 % 3000);
    std::thread::spawn(move || {
        std::thread::sleep(delay);
        let _ = kill_process(getpid(), Signal::KILL);
    });
}

/// Whether a rank was lost, here or before.
fn is_loss(error: &anyhow::Error) -> bool {
    let comm = match error.downcast_ref::<Error>() {
        Some(Error::Comm(error)) => Some(error),
        _ => error.downcast_ref(),
    };
    matches!(comm, Some(CommError::PeerLost { .. } | CommError::Poisoned { .. }))
}

fn train() -> Result<()> {
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(0);
    let seat = [number("RANK"), number("FLOW_REPLACEMENT")];
    let mut training = Training::new(if seat[1] == 0 { 0 } else { -1 });
    let mut group = ProcessGroup::from_env()?;
    loop {
        match training.train(&group, seat) {
            Ok(Next::End) => break,
            Ok(_) => {}
            Err(error) if is_loss(&error) => {}
            Err(error) => return Err(error),
        }
        group = group.reconfigure()?;
    }
    let mut alone = Training::new(0);
    let net = alone.net.take().expect("it is new");
    let mut optimizer = nn::Sgd::default().build(&alone.store, LEARNING_RATE)?;
    for step in 0..training.step {
        optimizer.backward_step(&loss(&net, step));
    }
    let pairs = training.weights().into_iter().zip(alone.weights());
    for (ours, expected) in pairs {
        let difference = (&ours - &expected).abs().max().double_value(&[]);
        ensure!(difference == 0.0, "after {} steps they differ by {difference}", training.step);
    }
    println!("same weights");
    Ok(())
}

fn ends_well(test: &Test) {
    let finished = test.launcher().finish_unless_silent(TEST_TIMEOUT);
    assert_eq!(finished.code, Some(0), "{finished:?}");
    assert_eq!(finished.stdout.matches("same weights\n").count(), 2, "{finished:?}");
    assert_contains(&finished.stderr, &["is started again alone (4 of 4)"]);
}
