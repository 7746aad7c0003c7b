//! Runs one scenario that needs libtorch: `ddp_worker ddp::NAME`, `ddp_worker forks::NAME`.

mod accumulation;
mod buffer_hook;
mod checkpoint_in_memory;
mod checkpoint_killed;
mod checkpoint_memory;
mod checkpoint_random;
mod checkpoints;
mod compression;
mod elastic;
mod equivalence;
mod failures;
mod forks;
mod fsdp;
mod fsdp_ignored;
mod fsdp_misused;
mod fsdp_plan;
mod fsdp_whole_batch;
mod fully_shard;
mod fully_shard_memory;
mod fully_shard_misused;
mod fully_shard_mixed;
mod globals;
mod globals_restarted;
mod helpers;
mod hooks;
mod in_process_restart;
mod join;
mod join_random;
mod lifecycle;
mod local_sgd;
mod mixed_precision;
mod models;
mod nested;
mod noise_scale;
mod optimizer_in_backward;
mod optimizers;
mod options;
mod out_of_step;
mod parity;
mod pipelines;
mod pipelines_restarted;
mod power_sgd;
mod random_options;
mod reported;
mod scaled;
mod sharded_checkpoint_killed;
mod sharded_in_memory;
mod sharded_pair;
mod sparse;
mod static_graph;
mod steps_shown;
mod sync_batchnorm;
mod tensors;
mod tied;
mod tuned;
mod unfit;
mod unused;
mod virtual_ranks;
mod zero;
mod zero_misused;

use std::process::ExitCode;

use anyhow::Result;
use flow_tests::registry::{self, File, Job, Scenario, by_hand, in_process, launched, scenario};

/// How gradients travel: in place, by copies, or on a thread for communication.
const CPU: &[Job] = &[
    launched(2).shared(),
    launched(3).shared(),
    launched(3).mode("copies", "FLOW_DDP_COPY", "1").shared(),
    launched(2).mode("thread", "FLOW_DDP_PROGRESS", "thread").shared(),
];
/// The way of GPUs, with tensors on the CPU: there is no fake libtorch. `scripts/gpu-check` runs
/// the same on GPUs. What runs between nodes runs on two and on three GPUs, other scenarios on three.
const GPUS: [Job; 2] = [
    launched(2).mode("tensors on the CPU", "FLOW_TEST_HOST_AS_GPU", "1").on_fake_cuda().shared(),
    launched(3).mode("tensors on the CPU", "FLOW_TEST_HOST_AS_GPU", "1").on_fake_cuda().shared(),
];
const ALL: &[Job] = &[CPU[0], CPU[1], CPU[2], CPU[3], GPUS[1]];
const ALL_AND_NODES: &[Job] =
    &[ALL[0], ALL[1], ALL[2], ALL[3], ALL[4], GPUS[0], NODES[0], NODES[1]];
const NODES: [Job; 3] =
    [by_hand(&[2, 2]).shared(), by_hand(&[1, 1]).shared(), by_hand(&[2, 1]).shared()];
const AND_THREADS: &[Job] = &[
    ALL[0],
    ALL[1],
    ALL[2],
    ALL[3],
    ALL[4],
    GPUS[0],
    NODES[0],
    NODES[1],
    in_process(4),
    in_process(5),
];
/// Gradients are reduced where backward has put them.
const IN_PLACE: &[Job] = &[CPU[0], CPU[1], CPU[3]];
/// In processes of their own: what other scenarios leave behind is freed at any time.
const MEASURES_MEMORY: &[Job] = &[launched(2), launched(3)];
const MEASURES_MEMORY_ON_NODES: &[Job] = &[launched(2), launched(3), by_hand(&[2, 2])];
/// Where gradients' way makes no difference.
const EACH_TRANSPORT: &[Job] = &[CPU[0], CPU[1], GPUS[0], NODES[0]];
/// Where ranks see what the others call.
const ON_HOSTS: &[Job] = &[CPU[0], CPU[1], NODES[0]];
const WHO_REDUCES: &[Job] = &[CPU[0], CPU[3], NODES[1], NODES[2]];

const CPU_AND_NODES: &[Job] = &[CPU[0], CPU[1], CPU[2], CPU[3], NODES[0], NODES[1], NODES[2]];
const CPU_AND_NODES_AND_THREADS: &[Job] =
    &[CPU[0], CPU[1], CPU[2], CPU[3], NODES[0], NODES[1], NODES[2], in_process(4)];

const VIRTUAL_RANKS: &[Job] =
    &[CPU[0], CPU[1], CPU[2], CPU[3], launched(6), NODES[0], NODES[2], by_hand(&[1, 2])];

/// Each with other numbers of ranks, of which other ones are on a machine.
const WORLDS: &[Job] = &[CPU[0], CPU[1], in_process(4), NODES[0], NODES[1], NODES[2]];

const SCENARIOS: &[Scenario] = &[
    scenario("linear", equivalence::linear, ALL_AND_NODES),
    scenario("mlp", equivalence::mlp, ALL_AND_NODES),
    scenario("lenet", equivalence::lenet, ALL),
    scenario("sync_batchnorm", equivalence::sync_batchnorm, ALL_AND_NODES),
    scenario("mobilenet", equivalence::mobilenet, ALL),
    scenario("gradient_penalty", equivalence::gradient_penalty, ALL),
    scenario("shared_gradients", equivalence::shared_gradients, ALL),
    scenario("no_sync", accumulation::no_sync, ALL),
    scenario("guards", accumulation::guards, ALL),
    scenario("several_forwards", accumulation::several_forwards, ALL),
    scenario("cleared_gradients", accumulation::cleared_gradients, ALL),
    scenario("unused_found", unused::found, ALL_AND_NODES),
    scenario("unused_now_and_then", unused::now_and_then, ALL),
    scenario("unused_everywhere", unused::everywhere, ALL),
    scenario("unused_accumulated", unused::accumulated, ALL),
    scenario("nested", nested::reduced, ALL),
    scenario("nested_delayed", nested::delayed, ALL_AND_NODES),
    scenario("nested_unused", nested::unused, ALL),
    scenario("nested_twice", nested::twice, ALL),
    scenario("static_graph_random", static_graph::random, ALL_AND_NODES),
    scenario("static_graph_changed", static_graph::changed, ALL),
    scenario("static_graph_unused", static_graph::unused, ALL),
    scenario("elastic_misused", elastic::misused, ALL),
    scenario("virtual_ranks_random", virtual_ranks::random, VIRTUAL_RANKS),
    scenario("virtual_ranks_as_plain", virtual_ranks::as_plain, CPU),
    scenario("virtual_ranks_refused", virtual_ranks::refused, EACH_TRANSPORT),
    scenario("virtual_ranks_misused", virtual_ranks::misused, CPU_AND_NODES),
    scenario("optimizer_in_backward_random", optimizer_in_backward::random, ALL_AND_NODES),
    scenario("optimizer_in_backward_memory", optimizer_in_backward::memory, IN_PLACE),
    scenario("optimizer_in_backward_resumed", optimizer_in_backward::resumed, ALL),
    scenario("optimizer_in_backward_misused", optimizer_in_backward::misused, ALL),
    scenario("fsdp_random", fsdp::random, CPU_AND_NODES_AND_THREADS),
    scenario("fsdp_whole_batch", fsdp_whole_batch::random, WORLDS),
    scenario("fsdp_in_parts", fsdp::in_parts, &[NODES[0]]),
    scenario("fsdp_batch_norm", fsdp::batch_norm, CPU_AND_NODES),
    scenario("fsdp_scaled", fsdp::scaled, CPU_AND_NODES),
    scenario("fsdp_memory", fsdp::memory, MEASURES_MEMORY_ON_NODES),
    scenario("fsdp_memory_of_large", fsdp::memory_of_large, MEASURES_MEMORY),
    scenario("fsdp_plan_of_adam", fsdp_plan::of_adam, MEASURES_MEMORY),
    scenario("fsdp_plan_of_sgd", fsdp_plan::of_sgd, MEASURES_MEMORY),
    scenario("fsdp_plan_too_large", fsdp_plan::too_large, CPU_AND_NODES),
    scenario("fsdp_resumed", fsdp::resumed, CPU_AND_NODES),
    scenario("fsdp_ignored_random", fsdp_ignored::random, CPU_AND_NODES),
    scenario("fsdp_ignored_saved", fsdp_ignored::saved, ON_HOSTS),
    scenario("fsdp_ignored_written", fsdp_ignored::written, ON_HOSTS),
    scenario("fsdp_ignored_gradients", fsdp_ignored::gradients, ON_HOSTS),
    scenario("fsdp_ignored_misused", fsdp_ignored::misused, ON_HOSTS),
    scenario("steps_are_shown", steps_shown::of_all, &[launched(2)]),
    scenario("checkpoint_memory", checkpoint_memory::in_parts, MEASURES_MEMORY),
    scenario("checkpoint_random", checkpoint_random::random, CPU_AND_NODES),
    scenario("fsdp_misused", fsdp_misused::misused, CPU_AND_NODES),
    scenario("fsdp_other_optimizer", fsdp_misused::other_optimizer, CPU_AND_NODES),
    scenario("fsdp_written", fsdp_misused::written, CPU_AND_NODES),
    scenario("fsdp_buffers", fsdp_misused::buffers, CPU_AND_NODES),
    scenario("fsdp_step_left_out", fsdp_misused::step_left_out, CPU_AND_NODES),
    scenario("fsdp_read_before_step", fsdp_misused::read_before_step, CPU_AND_NODES),
    scenario("fully_shard_random", fully_shard::random, AND_THREADS),
    scenario("fully_shard_memory", fully_shard_memory::memory, MEASURES_MEMORY),
    scenario("fully_shard_resumed", fully_shard::resumed, ALL_AND_NODES),
    scenario("fully_shard_accumulated", fully_shard::accumulated, ALL_AND_NODES),
    scenario("fully_shard_scaled", fully_shard::scaled, ALL_AND_NODES),
    scenario("fully_shard_left_out", fully_shard_misused::left_out, ALL_AND_NODES),
    scenario(
        "fully_shard_gradients_elsewhere",
        fully_shard_misused::gradients_elsewhere,
        ALL_AND_NODES,
    ),
    scenario("fully_shard_written", fully_shard_misused::written, ALL_AND_NODES),
    scenario("fully_shard_misused", fully_shard_misused::misused, ALL_AND_NODES),
    scenario("fully_shard_misused_graphs", fully_shard_misused::misused_graphs, ALL_AND_NODES),
    scenario("fully_shard_mixed_random", fully_shard_mixed::random, EACH_TRANSPORT),
    scenario("fully_shard_mixed_accumulated", fully_shard_mixed::accumulated, EACH_TRANSPORT),
    scenario("fully_shard_mixed_changed", fully_shard_mixed::changed, EACH_TRANSPORT),
    scenario("fully_shard_mixed_shared", fully_shard_mixed::shared, EACH_TRANSPORT),
    scenario("fully_shard_mixed_misused", fully_shard_mixed::misused, EACH_TRANSPORT),
    scenario("fully_shard_out_of_step", fully_shard_misused::out_of_step, ALL_AND_NODES),
    scenario("zero_random", zero::random, AND_THREADS),
    scenario("zero_in_backward_random", optimizer_in_backward::random_with_zero, ALL_AND_NODES),
    scenario("zero_in_backward_misused", zero_misused::in_backward, ALL_AND_NODES),
    scenario("zero_layouts", zero::layouts, ALL_AND_NODES),
    scenario("zero_memory", zero::memory, MEASURES_MEMORY),
    scenario("zero_resumed", zero::resumed, ALL_AND_NODES),
    scenario("zero_joined", zero::joined, ALL_AND_NODES),
    scenario("zero_misused", zero_misused::misused, ALL_AND_NODES),
    scenario("zero_failing", zero_misused::failing, ALL_AND_NODES),
    scenario("zero_scaled", scaled::zero, ALL_AND_NODES),
    scenario("zero_scaled_alone", scaled::zero_alone, ALL_AND_NODES),
    scenario("zero_scaled_joined", scaled::zero_joined, ALL_AND_NODES),
    scenario("scaled_misused", scaled::misused, ALL_AND_NODES),
    scenario("mixed_precision_random", mixed_precision::random, ALL_AND_NODES),
    scenario("mixed_precision_memory", mixed_precision::memory, MEASURES_MEMORY),
    scenario("mixed_precision_outdated", mixed_precision::outdated, ALL_AND_NODES),
    scenario("mixed_precision_differing", mixed_precision::differing, CPU),
    scenario("mixed_precision_buffers", mixed_precision::buffers, ALL),
    scenario("mixed_precision_in_join", mixed_precision::in_join, ALL),
    scenario("mixed_precision_sparse", mixed_precision::sparse, ALL),
    scenario("mixed_precision_scaled", scaled::trained, ALL),
    scenario("mixed_precision_misused", mixed_precision::misused, ALL),
    scenario("mixed_precision_written", mixed_precision::written, ALL),
    scenario("unused_reported", reported::unused, ALL_AND_NODES),
    scenario("frozen_later", reported::frozen_later, ALL),
    scenario("differing_models", reported::differing_models, ALL),
    scenario("unfit_models", reported::unfit_models, ALL),
    scenario("unfit_tensors", unfit::tensors, ALL),
    scenario("sparse_random", sparse::random, ALL_AND_NODES),
    scenario("sparse_trained", sparse::trained, ALL_AND_NODES),
    scenario("sparse_in_join", sparse::in_join, ALL),
    scenario("sparse_refreshed", sparse::refreshed, ALL),
    scenario("sparse_beside_hooks", sparse::beside_hooks, ALL),
    scenario("sparse_misused", sparse::misused, ALL),
    scenario("unfit_checkpoints", unfit::checkpoints, EACH_TRANSPORT),
    scenario("no_memory", unfit::no_memory, CPU),
    scenario("replaced_buffers", unfit::replaced_buffers, ALL),
    scenario("tied", tied::trained, ALL),
    scenario("tied_names", tied::named, ALL),
    scenario("wrapped_twice", tied::wrapped_twice, ALL),
    scenario("frozen", lifecycle::frozen, ALL),
    scenario("refreshed", lifecycle::refreshed, ALL_AND_NODES),
    scenario("buffers", lifecycle::buffers, ALL),
    scenario("changed", lifecycle::changed, ALL),
    scenario("buffer_hook", buffer_hook::averaged, ALL_AND_NODES),
    scenario("buffer_hook_by_hand", buffer_hook::by_hand, ALL),
    scenario("buffer_hook_in_join", buffer_hook::in_join, ALL_AND_NODES),
    scenario("buffer_hook_misused", buffer_hook::misused, ALL),
    scenario("failing_sync_batchnorm", sync_batchnorm::failing, ALL_AND_NODES),
    scenario("wrapped_again", lifecycle::wrapped_again, CPU),
    scenario("joined_again", lifecycle::joined_again, CPU),
    scenario("sub_group", lifecycle::sub_group, ALL),
    scenario("memory", lifecycle::memory, ALL),
    scenario("waits", lifecycle::waits, &[GPUS[0]]),
    scenario("sampler", lifecycle::sampler, ALL),
    scenario("alone", lifecycle::alone, ALL),
    scenario("kinds", options::kinds, ALL),
    scenario("large_halves", options::large_halves, ALL_AND_NODES),
    scenario("complex", options::complex, ALL),
    scenario("zeros_without_memory", options::zeros_without_memory, ALL),
    scenario("communication_kinds", options::communication_kinds, ALL),
    scenario("many_buckets", options::many_buckets, ALL_AND_NODES),
    scenario("tuned", tuned::same_bits, ALL_AND_NODES),
    scenario("tuned_in_join", tuned::in_join, ALL),
    scenario("ready_order", options::ready_order, ALL_AND_NODES),
    scenario("layouts", options::layouts, ALL),
    scenario("who_reduces", options::who_reduces, WHO_REDUCES),
    scenario("own_hooks", hooks::own, ALL_AND_NODES),
    scenario("hooks_in_turn", hooks::in_turn, ALL_AND_NODES),
    scenario("hooks_of_unused", hooks::unused, ALL),
    scenario("hooks_that_fail", hooks::failing, ALL),
    scenario("hooks_that_panic", hooks::panicking, ALL),
    scenario("compression_exact", compression::exact, ALL),
    scenario("compression_quantized", compression::quantized, ALL),
    scenario("compression_feedback", compression::feedback, ALL),
    scenario("compression_overflow", compression::overflow, ALL),
    scenario("compression_unused", compression::unused, ALL),
    scenario("compression_beside_batch_norm", compression::beside_batch_norm, CPU),
    scenario("noise_scale", noise_scale::measured, ALL_AND_NODES),
    scenario("noise_scale_around", noise_scale::around, ALL),
    scenario("noise_scale_in_backward", noise_scale::in_backward, ALL),
    scenario("noise_scale_misused", noise_scale::misused, ALL),
    scenario("differing_hooks", hooks::differing, ALL),
    scenario("post_local_sgd", local_sgd::post_local, ALL_AND_NODES),
    scenario("post_local_sgd_combined", local_sgd::post_local_combined, EACH_TRANSPORT),
    scenario("complex_averages", local_sgd::complex_averages, EACH_TRANSPORT),
    scenario("post_local_sgd_failing", local_sgd::post_local_failing, EACH_TRANSPORT),
    scenario("hierarchical_averages", local_sgd::hierarchical, EACH_TRANSPORT),
    scenario("diloco", local_sgd::diloco, EACH_TRANSPORT),
    scenario("diloco_quantized", local_sgd::diloco_quantized, EACH_TRANSPORT),
    scenario("diloco_synchronized", local_sgd::diloco_synchronized, EACH_TRANSPORT),
    scenario("diloco_resumed", local_sgd::diloco_resumed, EACH_TRANSPORT),
    scenario("local_sgd_misused", local_sgd::misused, EACH_TRANSPORT),
    scenario("local_sgd_out_of_step", local_sgd::out_of_step, ON_HOSTS),
    scenario("random_options", random_options::trained, AND_THREADS),
    scenario("join_random", join_random::trained, AND_THREADS),
    scenario("join_ended_early", join::ended_early, ALL_AND_NODES),
    scenario("join_ended_early_in_forward_t", join::ended_early_in_forward_t, ALL),
    scenario("join_failing", join::failing, ALL_AND_NODES),
    scenario("join_failing_alone", join::failing_alone, CPU),
    scenario("join_panicking", join::panicking, ALL),
    scenario("join_panicking_hook", join::panicking_hook, ALL),
    scenario("join_dropped", join::dropped, ALL),
    scenario("join_missing_gradients", join::missing_gradients, ALL),
    scenario("join_of_some_ranks", join::of_some_ranks, CPU),
    scenario("join_misused", join::misused, ALL),
    scenario("join_nested", join::nested, ALL),
    scenario("join_out_of_step", join::out_of_step, ALL_AND_NODES),
    scenario("join_two_models", join::two_models, ALL),
    scenario("join_own", join::own, ALL_AND_NODES),
];

const FILES: &[File] = &[
    ("checkpoint_in_memory", checkpoint_in_memory::SCENARIOS),
    ("checkpoint_killed", checkpoint_killed::SCENARIOS),
    ("checkpoints", checkpoints::SCENARIOS),
    ("ddp", SCENARIOS),
    ("elastic", elastic::SCENARIOS),
    ("in_process_restart", in_process_restart::SCENARIOS),
    ("failures", failures::SCENARIOS),
    ("forks", forks::SCENARIOS),
    ("globals", globals::SCENARIOS),
    ("globals_restarted", globals_restarted::SCENARIOS),
    ("out_of_step", out_of_step::SCENARIOS),
    ("parity", parity::SCENARIOS),
    ("pipelines", pipelines::SCENARIOS),
    ("pipelines_restarted", pipelines_restarted::SCENARIOS),
    ("power_sgd", power_sgd::SCENARIOS),
    ("sharded_checkpoint_killed", sharded_checkpoint_killed::SCENARIOS),
    ("sharded_in_memory", sharded_in_memory::SCENARIOS),
    ("tensors", tensors::SCENARIOS),
];

fn main() -> Result<ExitCode> {
    registry::main(FILES, |group, run| {
        models::choose_device(group)?;
        tch::set_num_threads(1);
        let rank = std::process::id();
        run(group)?;
        if std::process::id() == rank {
            group.barrier()?;
        }
        Ok(())
    })
}
