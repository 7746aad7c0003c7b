//! Checks of collectives on tensors, started as any number of ranks, on CPUs or, with
//! `FLOW_TEST_DEVICE=cuda`, on GPUs.

mod gradients;
mod grid;
mod misuse;

use anyhow::{Context, Result};
use flow_tensor::{DeviceKind, ProcessGroup, TensorCollectives};

type Check = fn(&ProcessGroup) -> Result<()>;

const CHECKS: &[(&str, Check)] = &[
    ("grid", grid::all),
    ("overlapping", grid::overlapping),
    ("first_gradients", gradients::first),
    ("second_gradients", gradients::second),
    ("pipeline", gradients::pipeline),
    ("misuse", misuse::all),
];

fn main() -> Result<()> {
    let name = std::env::args().nth(1).context("the name of a check is missing")?;
    let (_, check) = CHECKS
        .iter()
        .find(|(n, _)| *n == name)
        .with_context(|| format!("there is no check {name}"))?;
    let group = ProcessGroup::from_env()?;
    let cuda = std::env::var("FLOW_TEST_DEVICE").is_ok_and(|kind| kind == "cuda");
    group.use_device(if cuda { DeviceKind::Cuda } else { DeviceKind::Cpu })?;
    tch::set_num_threads(1);
    check(&group).with_context(|| format!("{name}, rank {}", group.rank()))?;
    group.barrier()?;
    if group.rank() == 0 {
        println!("{name} holds on {} ranks", group.world_size());
    }
    Ok(())
}
