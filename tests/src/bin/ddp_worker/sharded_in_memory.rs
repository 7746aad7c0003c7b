//! All ranks that train a model of global tensors are killed at some moment of a save, again and again. Each start has
//! other ranks and another layout, and goes on from flow-launch's memory.

use anyhow::{Context, Result};
use flow_autograd::{OptimizerState, StateDict};
use flow_comm::ProcessGroup;
use flow_global::checkpoint::ShardedCheckpoints;
use flow_global::{B, GlobalTensor, NdSbp, Placement, S, distribute};
use flow_tests::registry::{Job, Scenario, launched, machines, scenario};
use tch::nn::{Adam, Optimizer, OptimizerConfig, VarStore};
use tch::{Device, Kind, Tensor};

use crate::checkpoint_in_memory::{RESTARTS, WITH_FOLDER, all_ends_well, number, until_killed};
use crate::checkpoint_killed::loss;
use crate::checkpoints::folder;
use crate::optimizers::{same_elements, same_state};
use crate::sharded_checkpoint_killed::OfGlobal;

const JOBS: &[Job] = &[
    launched(4).flags(RESTARTS),
    launched(4).flags(RESTARTS).mode("with a folder", WITH_FOLDER, "1"),
    machines(&[2, 2]).flags(RESTARTS),
];

pub const SCENARIOS: &[Scenario] =
    &[scenario("other_ranks_go_on_to_the_bit", training, JOBS).checked_by(all_ends_well)];

/// The ranks that train in each start, of both machines, and the columns of their mesh: some have an axis of one.
const STARTS: [(&[usize], usize); 4] =
    [(&[0, 1, 2, 3], 2), (&[1, 2], 1), (&[3, 0], 2), (&[2, 1, 0], 3)];

/// 8 MB that ranks split or have in common, and what is too small to be split.
fn store() -> VarStore {
    let store = VarStore::new(Device::Cpu);
    let shapes: [(&str, &[i64]); 4] = [
        ("rows", &[1001, 500]),
        ("columns", &[3, 201]),
        ("common", &[1500, 1000]),
        ("one", &[1, 1]),
    ];
    for (name, shape) in shapes {
        let elements: i64 = shape.iter().product();
        let numbers = Tensor::arange(elements, (Kind::Float, Device::Cpu)) / elements as f64;
        let _ = store.root().add(name, numbers.reshape(shape), true);
    }
    store
}

fn layout(start: u64, name: &str) -> NdSbp {
    let pair = match name {
        "rows" => [S(0), B],
        "columns" => [S(0), S(1)],
        _ => [B, B],
    };
    // In every third start the axes change places.
    if start % 3 == 2 { vec![pair[1], pair[0]] } else { pair.to_vec() }
}

fn training(world: &ProcessGroup) -> Result<()> {
    let start = number("TORCHELASTIC_RESTART_COUNT")?;
    let (ranks, columns) = STARTS[start as usize % STARTS.len()];
    if let Some(group) = world.new_group(ranks)? {
        let all: Vec<usize> = (0..ranks.len()).collect();
        let rows: Vec<_> = all.chunks(columns).map(<[usize]>::to_vec).collect();
        train(&group, &Placement::new(&group, rows)?, start)?;
    }
    // The others wait here until they are killed.
    Ok(world.barrier()?)
}

fn train(group: &ProcessGroup, placement: &Placement, start: u64) -> Result<()> {
    let store = store();
    distribute(&store, placement, |name, _| layout(start, name))?;
    let mut optimizer = Adam::default().build(&store, 0.01)?;
    let mut checkpoints = ShardedCheckpoints::in_memory(group)?;
    if std::env::var(WITH_FOLDER).is_ok() {
        checkpoints = checkpoints.and_folder(folder()?.join("checkpoints"))?;
    }
    let mut done = 0;
    if let Some(checkpoint) = checkpoints.latest::<i64>()? {
        checkpoint.resume(&store, Some(&mut optimizer))?;
        done = checkpoint.state;
    }
    let mut training = OfGlobal { store, optimizer, checkpoints };
    let last = until_killed(group, &mut training, done)?;
    same_as_alone(&training.store, &training.optimizer, last)
}

fn same_as_alone(trained: &VarStore, optimizer: &Optimizer, steps: i64) -> Result<()> {
    let expected = store();
    let mut alone = Adam::default().build(&expected, 0.01)?;
    for _ in 0..steps {
        alone.backward_step(&loss(&expected));
    }
    same_as(trained, optimizer, &expected, &alone)
}

/// Checks global weights and their optimizer's state. All ranks call this.
pub fn same_as(
    trained: &VarStore,
    optimizer: &Optimizer,
    expected: &VarStore,
    alone: &Optimizer,
) -> Result<()> {
    let mut trained: Vec<_> = trained.variables().into_iter().collect();
    trained.sort_by(|(one, _), (other, _)| one.cmp(other));
    for (name, tensor) in trained {
        same_elements(&name, &tensor.full()?, &expected.variables()[&name])?;
    }
    let StateDict { parameters, tensors } = optimizer.state()?;
    let whole = tensors.into_iter().map(|(name, tensor)| {
        let tensor = if tensor.is_global() { tensor.full()? } else { tensor };
        Ok((name, tensor))
    });
    let whole = StateDict { parameters, tensors: whole.collect::<Result<_>>()? };
    same_state(&whole, &alone.state()?).context("the optimizer")
}
