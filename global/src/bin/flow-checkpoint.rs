//! What can be done with sharded checkpoints: `flow-checkpoint merge` makes one plain file of one.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use flow_global::checkpoint;

/// Work with the sharded checkpoints of global tensors
#[derive(Parser)]
#[command(name = "flow-checkpoint", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Write a checkpoint's model to one plain safetensors file, as PyTorch and tch read it
    ///
    /// The model need not fit into memory.
    Merge {
        /// The folder of one checkpoint, as checkpoints/step-100
        #[arg(value_name = "DIR")]
        checkpoint: PathBuf,
        /// The file to write; one that is there is replaced
        #[arg(value_name = "OUT.safetensors")]
        out: PathBuf,
    },
}

fn main() -> ExitCode {
    let Command::Merge { checkpoint, out } = Arguments::parse().command;
    match checkpoint::merge(checkpoint, out) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("flow-checkpoint: {error}");
            ExitCode::FAILURE
        }
    }
}
