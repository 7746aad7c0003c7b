//! Scenarios of collectives on tensors.

mod gradients;
mod grid;
mod misuse;

use flow_tests::registry::{launched, scenario, Job, Scenario};

const ALL: &[Job] = &[launched(1), launched(2), launched(3), on_gpus(1), on_gpus(2), on_gpus(3)];

/// The way of GPUs, with tensors on the CPU: there is no fake libtorch.
const fn on_gpus(ranks: usize) -> Job {
    launched(ranks).mode("tensors on the CPU", "FLOW_TEST_HOST_AS_GPU", "1").on_fake_cuda()
}

pub const SCENARIOS: &[Scenario] = &[
    scenario("every_form_and_kind", grid::all, ALL),
    scenario("overlapping", grid::overlapping, ALL),
    scenario("gradients", gradients::first, ALL),
    scenario("gradients_of_gradients", gradients::second, ALL),
    scenario("pipeline", gradients::pipeline, ALL),
    scenario("misuse", misuse::all, ALL),
];
