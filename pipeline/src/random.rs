//! Random numbers that a recomputed forward draws again.

use flow_autograd::{BoxError, RngState, with_rng_state};
use flow_global::{Placement, rng_state, set_rng_state};
use tch::Device;

/// The state of the random generators: libtorch's, and that of global tensors.
pub struct Random {
    libtorch: RngState,
    global: Option<(Placement, [u64; 2])>,
}

impl Random {
    /// Returns the present state of the generators.
    pub fn state(device: Device, placement: Option<&Placement>) -> Result<Self, BoxError> {
        let global = placement.map(|placement| Ok((placement.clone(), rng_state(placement)?)));
        let global = global.transpose().map_err(|error: flow_global::Error| error)?;
        Ok(Self { libtorch: RngState::of(device)?, global })
    }

    /// Runs `draw` with the generators in this state. Afterwards they have the state of before.
    pub fn replay<T>(&self, draw: impl FnOnce() -> T) -> Result<T, BoxError> {
        let Some((placement, state)) = &self.global else {
            return Ok(with_rng_state(&self.libtorch, draw)?);
        };
        let now = rng_state(placement)?;
        set_rng_state(placement, *state)?;
        let result = with_rng_state(&self.libtorch, draw)?;
        set_rng_state(placement, now)?;
        Ok(result)
    }
}
