//! The command line of `flow-launch setup-libtorch`.

use std::ffi::OsString;

use super::flags;
use super::usage::Usage;

/// What libtorch is asked for.
pub struct Request {
    pub cuda: bool,
    /// None: the one for the `tch` in Cargo.lock.
    pub version: Option<String>,
    /// Write cargo's configuration.
    pub cargo_config: bool,
}

/// Reads the arguments after `setup-libtorch`. Answers `--help` here and ends the process.
pub fn request(arguments: &[OsString]) -> Result<Request, Usage> {
    let mut matches = flags::parse(flags::setup_libtorch_command(), arguments)?;
    Ok(Request {
        cuda: matches.get_flag(flags::CUDA),
        version: matches.remove_one(flags::TORCH),
        cargo_config: matches.get_flag(flags::CARGO_CONFIG),
    })
}
