//! Global tensors: the programs of OneFlow's documents on global tensors and on parallel strategies.
//!
//!     flow-launch --nproc_per_node 2 global data-parallel
//!     flow-launch --nproc_per_node 4 global hybrid
//!
//! Each program says where its tensors lie (placement) and how (SBP); the rest is as on one device.

mod boxing;
mod creation;
mod data_parallel;
mod hybrid;
mod matmul;
mod mesh;
mod model_parallel;
mod pipeline;
mod show;
mod to_global;
mod train;
mod two_placements;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use flow::prelude::*;
use flow_examples::program;

/// Programs with global tensors.
#[derive(Parser)]
#[command(name = "global")]
struct Args {
    #[command(subcommand)]
    command: Command,
    /// cpu, or cuda: a GPU for each rank
    #[arg(long, default_value = "cpu", global = true)]
    device: DeviceKind,
}

#[derive(Subcommand)]
enum Command {
    /// A product of matrices on one device, without global tensors
    Matmul,
    /// Makes global tensors; 2 ranks
    Creation,
    /// Gives tensors another SBP; 2 ranks
    ToGlobal,
    /// What ranks have before and after a tensor gets another SBP, as JSON; 2 ranks
    Boxing,
    /// The product, where the data are split; 2 ranks
    DataParallel,
    /// The product, where the model is split; 2 ranks
    ModelParallel,
    /// Two stages, each on a rank of its own; 2 ranks
    TwoPlacements,
    /// Trains a pipeline of two stages, each on a rank of its own; 2 ranks
    Pipeline,
    /// A data-parallel stage on two ranks and a model-parallel one on two others; 4 ranks
    Hybrid,
    /// Data and model are split on a mesh of 2 x 2 ranks; 4 ranks
    Mesh,
    /// Trains a linear model, data parallel by SBP; 2 ranks
    Train,
}

/// A program, and how many ranks it needs.
type Program = (fn(&ProcessGroup) -> anyhow::Result<()>, usize);

fn run(args: &Args) -> anyhow::Result<()> {
    let (run, ranks): Program = match args.command {
        Command::Matmul => (matmul::run, 1),
        Command::Creation => (creation::run, 2),
        Command::ToGlobal => (to_global::run, 2),
        Command::Boxing => (boxing::run, 2),
        Command::DataParallel => (data_parallel::run, 2),
        Command::ModelParallel => (model_parallel::run, 2),
        Command::TwoPlacements => (two_placements::run, 2),
        Command::Pipeline => (pipeline::run, 2),
        Command::Hybrid => (hybrid::run, 4),
        Command::Mesh => (mesh::run, 4),
        Command::Train => (train::run, 2),
    };
    let group = ProcessGroup::from_env()?;
    let given = group.world_size();
    anyhow::ensure!(
        given >= ranks,
        "this program needs {ranks} ranks, and the job has {given}: start it by flow-launch \
         --nproc_per_node {ranks}"
    );
    group.use_device(args.device)?;
    run(&group)
}

fn main() -> ExitCode {
    program::run("global", run)
}
