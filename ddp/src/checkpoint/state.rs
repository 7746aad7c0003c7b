//! `state.json`, and what files are called.

use std::fs;
use std::path::Path;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::error::{CheckpointError, Result};
use crate::data::sampler_state::SamplerState;

/// Files of a checkpoint begin with it: they have the variables.
pub const MODEL: &str = "model";
/// Files of a checkpoint begin with it: they have the optimizer's state.
pub const OPTIMIZER: &str = "optimizer";
/// The file of what the program, the sampler and the optimizer go on from.
pub const STATE: &str = "state.json";
/// Raised when files change so that versions before cannot read them.
pub const FORMAT: u32 = 3;

/// `state.json`.
#[derive(Serialize, Deserialize)]
pub struct SavedState<S> {
    pub format: u32,
    pub world_size: usize,
    /// The threads of each rank.
    pub threads: i32,
    /// [`StateDict::parameters`](flow_autograd::StateDict::parameters).
    pub optimizer: Vec<String>,
    pub sampler: SamplerState,
    pub state: S,
}

/// Checks that the checkpoint is of this format, if it says which it has. The rest may be of another
/// one.
pub fn check_format(path: &Path) -> Result<()> {
    let Ok(text) = fs::read(path.join(STATE)) else { return Ok(()) };
    let Ok(state) = serde_json::from_slice::<serde_json::Value>(&text) else { return Ok(()) };
    if state["format"] == FORMAT {
        return Ok(());
    }
    let reason = format!("it has not format {FORMAT} of Flow's checkpoints");
    Err(CheckpointError::Other { path: path.to_owned(), what: "program", reason })
}

/// Returns JSON that can be read back as a `T`: it has `null` where a number is NaN.
pub fn json<T: DeserializeOwned>(value: &impl Serialize) -> Result<String, String> {
    let text = serde_json::to_string_pretty(value).map_err(|error| error.to_string())?;
    match serde_json::from_str::<T>(&text) {
        Ok(_) => Ok(text),
        Err(error) => Err(format!("it cannot be read back: {error}; JSON has no NaN or infinity")),
    }
}
