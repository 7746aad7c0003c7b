//! `state.json`, and what files are called.

use serde::{Deserialize, Serialize};

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
