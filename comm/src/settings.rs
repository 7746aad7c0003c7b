//! Environment variables that change how the crate works, read here only. (Which rank this is, and
//! where the store is, `env` knows.)

use std::time::Duration;

/// The address, or name, of this host at which ranks on other nodes reach this one.
pub const LOCAL_ADDRESS: &str = "FLOW_LOCAL_ADDR";
/// The variable that names what connects nodes. With `mpi` the ranks also find each other by MPI,
/// else through a store.
pub const TRANSPORT: &str = "FLOW_TRANSPORT";
const TIMEOUT: &str = "FLOW_TIMEOUT";
/// The variable in which flow-launch says for which time it has started this rank anew in the running
/// job.
const REPLACEMENT: &str = "FLOW_REPLACEMENT";

/// Returns the value of `FLOW_LOCAL_ADDR`, if that is set.
pub fn local_address() -> Option<String> {
    std::env::var(LOCAL_ADDRESS).ok()
}

/// Returns how long ranks wait for each other, if that is set.
///
/// # Errors
/// It is no positive number of seconds.
pub fn timeout() -> Result<Option<Duration>, String> {
    let Ok(text) = std::env::var(TIMEOUT) else { return Ok(None) };
    let seconds = text.parse().ok().and_then(|s| Duration::try_from_secs_f64(s).ok());
    match seconds.filter(|seconds| !seconds.is_zero()) {
        None => Err(format!("{TIMEOUT}={text} must be a positive number of seconds")),
        timeout => Ok(timeout),
    }
}

/// Returns the name of the transport between nodes, if that is set.
pub fn transport() -> Option<String> {
    std::env::var(TRANSPORT).ok().filter(|name| !name.is_empty())
}

/// Returns how many processes have had this process' rank before in the running job.
pub fn replacement() -> usize {
    number(REPLACEMENT).unwrap_or(0)
}

/// Whether the environment gives this process this place in the job.
pub fn has_place(rank: usize, world_size: usize) -> bool {
    number("RANK") == Some(rank) && number("WORLD_SIZE") == Some(world_size)
}

fn number(variable: &str) -> Option<usize> {
    std::env::var(variable).ok()?.parse().ok()
}
