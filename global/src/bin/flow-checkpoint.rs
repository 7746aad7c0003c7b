//! What can be done with checkpoints: looked into, checked, compared, and made plain files of.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use flow_global::checkpoint::{self, CheckpointError};

/// Work with checkpoints: those of Checkpoints, and the sharded ones of global tensors
#[derive(Parser)]
#[command(name = "flow-checkpoint", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Print the tensors of a checkpoint or of a safetensors file, with their types and shapes
    Inspect {
        /// The folder of one checkpoint, as checkpoints/step-100, or a file
        path: PathBuf,
    },
    /// Check that the files of a checkpoint have the sums that they were written with
    Verify {
        /// The folder of one checkpoint, as checkpoints/step-100
        #[arg(value_name = "DIR")]
        checkpoint: PathBuf,
    },
    /// Write a checkpoint's model to plain safetensors files, as PyTorch, tch and Hugging Face read them
    ///
    /// The model need not fit into memory.
    Merge {
        /// The folder of one checkpoint, as checkpoints/step-100
        #[arg(value_name = "DIR")]
        checkpoint: PathBuf,
        /// The file to write; one that is there is replaced. With --file-bytes: the folder
        #[arg(value_name = "OUT.safetensors")]
        out: PathBuf,
        /// Write files of at most so many bytes, and Hugging Face's index of them
        #[arg(long, value_name = "N")]
        file_bytes: Option<u64>,
    },
    /// Print the tensors that differ between two checkpoints or files; the exit code is 1 if any do
    Diff {
        /// The folder of a checkpoint, or a file
        one: PathBuf,
        /// The same
        other: PathBuf,
    },
}

fn main() -> ExitCode {
    match run(Arguments::parse().command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("flow-checkpoint: {error}");
            ExitCode::from(2)
        }
    }
}

fn run(command: Command) -> Result<ExitCode, CheckpointError> {
    match command {
        Command::Inspect { path } => {
            let lines = checkpoint::inspect(path)?;
            lines.iter().for_each(|line| println!("{line}"));
        }
        Command::Verify { checkpoint } => checkpoint::verify(checkpoint)?,
        Command::Merge { checkpoint, out, file_bytes: None } => checkpoint::merge(checkpoint, out)?,
        Command::Merge { checkpoint, out, file_bytes: Some(most) } => {
            checkpoint::merge_into_folder(checkpoint, out, most)?;
        }
        Command::Diff { one, other } => {
            let lines = checkpoint::diff(one, other)?;
            lines.iter().for_each(|line| println!("{line}"));
            if !lines.is_empty() {
                return Ok(ExitCode::FAILURE);
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}
