//! A sample of what the tests of flow-global check on threads: operations and models on global
//! tensors give what plain tensors do.

// Tables and checks of those tests, which use more of them.
#[allow(dead_code)]
#[path = "../../../../global/tests/it/operations/cases/mod.rs"]
mod cases;
#[allow(dead_code)]
#[path = "../../../../global/tests/it/fully_sharded/model.rs"]
mod fully_sharded;
#[allow(dead_code)]
#[path = "../../../../global/tests/it/models/training/mod.rs"]
mod training;

use crate::models;
use anyhow::{Result, anyhow, ensure};
use cases::check::{Check, Own};
use flow_comm::ProcessGroup;
use flow_global::Placement;
use flow_tests::registry::{Job, Scenario, by_hand, launched, scenario};
use training::layouts;
use training::{Optimizer, Training};

/// Ranks that read each other's memory, and those that have NCCL's collectives only.
const JOBS: &[Job] = &[launched(2), launched(3), launched(4), on_gpus(2), on_gpus(4)];

/// With tensors on the CPU: there is no fake libtorch.
const fn on_gpus(ranks: usize) -> Job {
    launched(ranks).mode("tensors on the CPU", "FLOW_TEST_HOST_AS_GPU", "1").on_fake_cuda()
}

/// Ranks that have all parameters in common, and such that have them with some of the others.
const MACHINES: &[Job] = &[launched(4), by_hand(&[2, 2]), by_hand(&[3, 1])];

pub const SCENARIOS: &[Scenario] = &[
    scenario("operations", operations, JOBS),
    scenario("models", trained, JOBS),
    scenario("fully_sharded", fully_sharded, MACHINES),
];

/// Every so many combinations of SBPs of a case's inputs.
const SAMPLE: usize = 10;
/// Combinations of SBPs of a case, of which the sample is taken.
const COMBINATIONS: usize = 20;

/// On a GPU (`FLOW_TEST_DEVICE=cuda`) tensors are there.
fn choose_device() {
    cases::case::DEVICE.get_or_init(models::device);
    training::DEVICE.get_or_init(models::device);
}

/// Two ranks, three in another order, or a mesh.
fn place(group: &ProcessGroup) -> Result<Placement> {
    Ok(match group.world_size() {
        4 => Placement::new(group, [[0, 1], [2, 3]])?,
        3 => Placement::new(group, [2, 0, 1])?,
        size => Placement::new(group, (0..size).collect::<Vec<_>>())?,
    })
}

fn operations(group: &ProcessGroup) -> Result<()> {
    choose_device();
    let placement = place(group)?;
    let own = Own { rank: group.rank(), placement: &placement };
    let mut count = 0;
    for case in &cases::cases() {
        let check = Check::new(case).map_err(|error| anyhow!("{}: {error}", case.name))?;
        let combinations =
            check.combinations(placement.shape(), COMBINATIONS).into_iter().enumerate();
        for (index, sbps) in combinations.step_by(SAMPLE) {
            count += 1;
            let result = check.run(own, &sbps, index);
            let is_refused =
                |error: &String| case.refusal.is_some_and(|words| error.contains(words));
            if let Err(error) = result.as_ref().map_err(Clone::clone) {
                ensure!(is_refused(&error), "{} {sbps:?}: {error}", case.name);
            }
        }
    }
    ensure!(count > 1000, "only {count} combinations");
    Ok(())
}

fn fully_sharded(group: &ProcessGroup) -> Result<()> {
    fully_sharded::same_bits(group);
    Ok(())
}

fn trained(group: &ProcessGroup) -> Result<()> {
    choose_device();
    let placement = place(group)?;
    let is_mesh = placement.axes() == 2;
    for training in [Training::mlp(Optimizer::Adam), Training::cnn(), Training::gpt()] {
        let reference = training.reference();
        let layouts = if is_mesh {
            layouts::hybrid()
        } else {
            layouts::of_data().into_iter().chain(layouts::of_tensors()).collect()
        };
        for layout in &layouts {
            training.check(&placement, layout, &reference);
        }
    }
    Ok(())
}
