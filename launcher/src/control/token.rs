//! The secrets that admit agents and workers to the stores.

use std::ffi::OsString;

use anyhow::bail;

/// The variable with the job's secret.
pub const TOKEN: &str = "FLOW_TOKEN";

/// Returns the token that admits an agent: FLOW_TOKEN, a secret that is the same on all nodes, or
/// else just the job's name, its id.
pub fn token(id: &str) -> anyhow::Result<String> {
    match std::env::var_os(TOKEN).map(OsString::into_string) {
        None => Ok(format!("flow-launch job {id}")),
        Some(Ok(token)) if !token.is_empty() => Ok(token),
        Some(_) => bail!("{TOKEN} is empty or not UTF-8; it must be the same text on all nodes"),
    }
}
