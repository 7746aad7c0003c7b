//! Trainings of global tensors that begin again in the same processes when ranks are killed.

use anyhow::{Result, ensure};
use flow_comm::ProcessGroup;
use flow_ddp::InProcessRestart;
use flow_global::checkpoint::ShardedCheckpoints;
use flow_global::{B, Placement, S};
use flow_tests::registry::{Scenario, launched, machines, process};
use tch::nn::{Adam, OptimizerConfig, VarStore};
use tch::{Kind, Tensor};

use crate::checkpoints::folder;
use crate::in_process_restart::{Fate, IN_PLACE, STARTED, newcomers_come, note, number};
use crate::models::{device, store};
use crate::sharded_in_memory::same_as;

/// Where the checkpoints are.
const KEPT: &str = "FLOW_TEST_KEPT";

pub const SCENARIOS: &[Scenario] = &[process(
    "global_tensors_go_on_when_ranks_are_killed",
    with_global_tensors,
    &[
        launched(4).flags(IN_PLACE).mode("in a folder", KEPT, "folder"),
        launched(4).flags(IN_PLACE).mode("in memory", KEPT, "memory"),
        machines(&[2, 2]).flags(IN_PLACE).mode("in memory", KEPT, "memory"),
    ],
)
.checked_by(newcomers_come)];

/// A weight whose gradient is a sum over all samples, and weights whose gradients depend on them.
fn model() -> VarStore {
    let vs = store();
    let _ = vs.root().zeros("weight", &[3, 5]);
    for (name, shape) in [("rows", [7, 151]), ("common", [1, 333])] {
        let elements = shape[0] * shape[1];
        let numbers = Tensor::arange(elements, (Kind::Float, device())) / elements as f64;
        let _ = vs.root().add(name, numbers.reshape(shape), true);
    }
    vs
}

/// All sums are exact, in whatever order. A lost rank is an error here, and no panic.
fn loss(vs: &VarStore, input: &Tensor) -> Result<Tensor> {
    let variables = vs.variables();
    let mut loss = input.f_matmul(&variables["weight"])?.f_sum(Kind::Float)?;
    for name in ["rows", "common"] {
        let squares = variables[name].f_sub_scalar(0.3)?.f_square()?;
        loss = loss.f_add(&squares.f_sum(Kind::Float)?)?;
    }
    Ok(loss)
}

fn input() -> Tensor {
    Tensor::arange(12, (Kind::Float, device())).reshape([4, 3])
}

/// Data parallelism over pairs of ranks, which have the weights in parts: over a mesh of 2x2, or one with an axis of
/// one.
fn with_global_tensors() -> Result<()> {
    note(STARTED)?;
    let ranks = number("WORLD_SIZE", 1)?;
    let restart = InProcessRestart::new(ProcessGroup::from_env()?).multiple_of(2);
    let trained = restart.run(|attempt| {
        let group = attempt.group();
        let pairs = (0..group.world_size()).step_by(2).map(|rank| [rank, rank + 1]);
        let mesh = Placement::new(group, pairs.collect::<Vec<_>>())?;
        let vs = model();
        flow_global::distribute(&vs, &mesh, |name, _| match name {
            "weight" => [B, S(1)],
            "rows" => [B, S(0)],
            _ => [B, B],
        })?;
        let mut optimizer = Adam::default().build(&vs, 0.01)?;
        let input_parts = flow_global::distribute_tensor(&input(), &mesh, [S(0), B])?;
        let mut checkpoints = if std::env::var(KEPT)? == "memory" {
            ShardedCheckpoints::in_memory(group)?
        } else {
            ShardedCheckpoints::open(folder()?.join("checkpoints"), group)?
        };
        let mut step = 0_i64;
        if let Some(checkpoint) = checkpoints.latest()? {
            checkpoint.resume(&vs, Some(&mut optimizer))?;
            step = checkpoint.state;
        }
        let fate = Fate::new(group, step, ranks)?;
        while !fate.is_over(group, step)? {
            attempt.check()?;
            optimizer.zero_grad();
            loss(&vs, &input_parts)?.f_backward()?;
            optimizer.step();
            step += 1;
            checkpoints.async_save(step as usize, &vs, Some(&optimizer), &step)?;
        }
        checkpoints.wait()?;
        let expected = model();
        let mut alone = Adam::default().build(&expected, 0.01)?;
        for _ in 0..step {
            alone.backward_step(&loss(&expected, &input())?);
        }
        same_as(&vs, &optimizer, &expected, &alone)
    })?;
    ensure!(trained.is_some());
    println!("all is well");
    Ok(())
}
