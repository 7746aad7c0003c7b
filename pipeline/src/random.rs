//! Random numbers that a forward draws again when it is computed anew.

use flow_autograd::{with_rng_state, BoxError, RngState};
use flow_global::{rng_state, set_rng_state, Placement};
use tch::Device;

/// Where the generators were: libtorch's, and that of global tensors.
pub struct Random {
    libtorch: RngState,
    global: Option<(Placement, [u64; 2])>,
}

impl Random {
    pub fn state(device: Device, placement: Option<&Placement>) -> Result<Self, BoxError> {
        let global = placement.map(|placement| Ok((placement.clone(), rng_state(placement)?)));
        let global = global.transpose().map_err(|error: flow_global::Error| error)?;
        Ok(Self { libtorch: RngState::of(device)?, global })
    }

    /// Runs `draw` from here on. The generators then go on from where they are now.
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
