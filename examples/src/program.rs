//! The frame of a program: its log, its arguments, and its error.

use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;

use crate::arguments;

/// Runs the program `name`. It logs warnings, or what `RUST_LOG` asks for, and its error is one
/// line.
pub fn run<A: Parser>(name: &str, program: impl FnOnce(&A) -> Result<()>) -> ExitCode {
    log_to_stderr();
    match program(&arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{name}: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Logs warnings, or what `RUST_LOG` asks for, to stderr.
pub fn log_to_stderr() {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
}
