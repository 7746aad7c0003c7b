//! Measures Flow. `scripts/bench` runs it beside PyTorch and prints the ratios.
//!
//! `flow-launch --nproc_per_node 2 flow-bench allreduce`, `flow-bench limit`,
//! `flow-launch --nproc_per_node 2 flow-bench step --model mlp`
//!
//! On GPUs, where `scripts/gpu-check` runs it: `flow-bench launch`, `step` and `losses` with
//! `--device cuda`.

mod allreduce;
mod boxing;
mod checkpoints;
mod comm_hooks;
mod global_checkpoints;
mod gpt;
mod in_memory_checkpoints;
mod in_turn;
mod join;
mod launch;
mod limit;
mod losses;
mod mixed_precision;
mod models;
mod optimizer_in_backward;
mod overhead;
mod pipeline;
mod sbp;
mod sharded;
mod sharded_memory;
mod sizes;
mod step;
mod sync_batchnorm;
mod timeline;
mod timing;
mod tune;
mod virtual_ranks;
mod zero;

use std::process::ExitCode;

use clap::Parser;
use flow_examples::program;

/// Measures Flow: medians, from rank 0.
#[derive(Parser)]
#[command(name = "flow-bench")]
enum Command {
    /// All-reduce of f32 sums, on all ranks
    Allreduce(allreduce::Options),
    /// What an all-reduce between two ranks could reach at best: two threads sum two buffers in
    /// place
    Limit(sizes::Sizes),
    /// A training step without and with Ddp, on all ranks
    Step(step::Options),
    /// A training step with Ddp, without and with SyncBatchNorm, on all ranks
    SyncBatchnorm(in_turn::Options),
    /// A training step with Ddp, without and in a join, on all ranks, and while the last rank has ended
    Join(in_turn::Options),
    /// A training step with Ddp, with an optimizer that steps after backward and in it, on all ranks
    OptimizerInBackward(optimizer_in_backward::Options),
    /// A training step with Ddp, and with as many virtual ranks as ranks, on all ranks
    VirtualRanks(in_turn::Options),
    /// A training step with Ddp, with buckets of the usual size and of one that is found, on all ranks
    Tune(in_turn::Options),
    /// A training with a communication hook, local SGD or DiLoCo, on all ranks
    CommHooks(comm_hooks::Options),
    /// A training step with Ddp, with Adam and with ZeroRedundancyOptimizer, on all ranks
    Zero(in_turn::Options),
    /// A training step with Ddp and with Fsdp, on all ranks
    Sharded(in_turn::Options),
    /// The memory of a training with Fsdp, on all ranks; with one rank, of tch's
    ShardedMemory(sharded_memory::Options),
    /// Saving and loading a model and its Adam, trained by Fsdp, on all ranks, beside dd
    Checkpoints(checkpoints::Options),
    /// Saving a model of global tensors and its Adam, on all ranks, beside a copy in memory
    GlobalCheckpoints(global_checkpoints::Options),
    /// Saving a model and its Adam in flow-launch's memory, on all ranks, beside a copy in memory
    InMemoryCheckpoints(in_memory_checkpoints::Options),
    /// A training step with Ddp, in single and in mixed precision, and where each rank casts for itself
    MixedPrecision(in_turn::Options),
    /// A data-parallel training step by SBP beside Ddp, on all ranks
    Sbp(sbp::Options),
    /// A training step of a tensor-parallel GPT block, on all ranks, beside the block in one process
    Gpt(gpt::Options),
    /// Operations on global tensors beside plain ones, on all ranks, without communication
    Overhead(overhead::Options),
    /// Conversions of global tensors beside memory copies, on all ranks
    Boxing(boxing::Options),
    /// A training step of a pipeline, on all ranks, beside the work of a rank without idle time
    Pipeline(pipeline::Options),
    /// The losses of a short training with Ddp, on all ranks
    Losses(losses::Options),
    /// The host's time to launch the reduction of a bucket on a GPU, on all ranks
    Launch(launch::Options),
}

fn main() -> ExitCode {
    program::run("flow-bench", |command: &Command| match command {
        Command::Allreduce(options) => allreduce::run(options),
        Command::Limit(sizes) => limit::run(sizes),
        Command::Step(options) => step::run(options),
        Command::SyncBatchnorm(options) => sync_batchnorm::run(options),
        Command::Join(options) => join::run(options),
        Command::OptimizerInBackward(options) => optimizer_in_backward::run(options),
        Command::VirtualRanks(options) => virtual_ranks::run(options),
        Command::Tune(options) => tune::run(options),
        Command::CommHooks(options) => comm_hooks::run(options),
        Command::Zero(options) => zero::run(options),
        Command::Sharded(options) => sharded::run(options),
        Command::ShardedMemory(options) => sharded_memory::run(options),
        Command::Checkpoints(options) => checkpoints::run(options),
        Command::GlobalCheckpoints(options) => global_checkpoints::run(options),
        Command::InMemoryCheckpoints(options) => in_memory_checkpoints::run(options),
        Command::MixedPrecision(options) => mixed_precision::run(options),
        Command::Sbp(options) => sbp::run(options),
        Command::Gpt(options) => gpt::run(options),
        Command::Overhead(options) => overhead::run(options),
        Command::Boxing(options) => boxing::run(options),
        Command::Pipeline(options) => pipeline::run(options),
        Command::Losses(options) => losses::run(options),
        Command::Launch(options) => launch::run(options),
    })
}
