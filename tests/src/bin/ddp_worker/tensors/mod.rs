//! Scenarios of collectives on tensors.

mod coalesced;
mod gradients;
mod grid;
mod misuse;
mod nonblocking;
mod pipelines;
mod sync_batch_norm;

use flow_tests::registry::{Job, Scenario, by_hand, launched, scenario};

const CPU: &[Job] = &[
    launched(1).shared(),
    launched(2).shared(),
    launched(3).shared(),
    by_hand(&[1, 1]).shared(),
    by_hand(&[2, 1]).shared(),
];
const SEVERAL_GPUS: &[Job] = &[on_gpus(2), on_gpus(3)];
const ALL: &[Job] =
    &[CPU[0], CPU[1], CPU[2], CPU[3], CPU[4], on_gpus(1), SEVERAL_GPUS[0], SEVERAL_GPUS[1]];
const SEVERAL: &[Job] = &[
    launched(2).shared(),
    launched(3).shared(),
    by_hand(&[2, 1]).shared(),
    SEVERAL_GPUS[0],
    SEVERAL_GPUS[1],
];
const BATCHES: &[Job] =
    &[ALL[0], ALL[1], ALL[2], ALL[3], ALL[4], ALL[5], ALL[6], ALL[7], STAGES[2]];
const STAGES: &[Job] = &[
    launched(2).shared(),
    launched(3).shared(),
    launched(4).shared(),
    by_hand(&[2, 2]).shared(),
    SEVERAL_GPUS[0],
    SEVERAL_GPUS[1],
    on_gpus(4),
];

/// The way of GPUs, with tensors on the CPU: there is no fake libtorch.
const fn on_gpus(ranks: usize) -> Job {
    launched(ranks).mode("tensors on the CPU", "FLOW_TEST_HOST_AS_GPU", "1").on_fake_cuda().shared()
}

pub const SCENARIOS: &[Scenario] = &[
    scenario("every_form_and_kind", grid::all, ALL),
    scenario("overlapping", nonblocking::overlapping, ALL),
    scenario("returned", nonblocking::returned, ALL),
    scenario("beside_the_stream", nonblocking::beside_the_stream, SEVERAL_GPUS),
    scenario("gradients", gradients::first, ALL),
    scenario("gradients_of_gradients", gradients::second, ALL),
    scenario("undefined_gradients", gradients::undefined, ALL),
    scenario("pipeline", gradients::pipeline, ALL),
    scenario("batch_gradients", gradients::batch, SEVERAL),
    scenario("one_forward_one_backward", pipelines::blocking, STAGES),
    scenario("one_forward_one_backward_async", pipelines::nonblocking, STAGES),
    scenario("sync_batch_norm", sync_batch_norm::first, BATCHES),
    scenario("sync_batch_norm_twice", sync_batch_norm::second, BATCHES),
    scenario("sync_batch_norm_converted", sync_batch_norm::converted, BATCHES),
    scenario("sync_batch_norm_misuse", sync_batch_norm::misuse, BATCHES),
    scenario("sync_batch_norm_layers", sync_batch_norm::other_layers, &[launched(2)]),
    scenario("coalesced_broadcast", coalesced::broadcast, ALL),
    scenario("coalesced_all_reduce", coalesced::all_reduce, ALL),
    scenario("allocator", coalesced::allocator, CPU),
    scenario("misuse", misuse::all, ALL),
];
