//! The state of libtorch's random number generators.

use std::ptr::null_mut;

use tch::{Device, Kind, Tensor};

use crate::error::Error;
use crate::ffi;

/// Where libtorch's generator of a device is: [`RngState::restore`] has the numbers that followed
/// drawn again.
pub struct RngState {
    device: Device,
    state: Tensor,
}

impl RngState {
    /// The state of the generator of this device.
    ///
    /// # Errors
    ///
    /// libtorch has no such device.
    pub fn of(device: Device) -> Result<Self, Error> {
        let like = empty(device)?;
        let mut state = null_mut();
        // SAFETY: the tensor is alive, and `state` is writable.
        let state = unsafe {
            ffi::check("RngState::of", ffi::flow_rng_state(like.as_ptr(), &mut state))?;
            Tensor::from_ptr(state)
        };
        Ok(Self { device, state })
    }

    /// Has the generator go on from here.
    ///
    /// # Errors
    ///
    /// libtorch's.
    pub fn restore(&self) -> Result<(), Error> {
        let like = empty(self.device)?;
        // SAFETY: the tensors are alive.
        unsafe {
            let text = ffi::flow_set_rng_state(like.as_ptr(), self.state.as_ptr());
            ffi::check("RngState::restore", text)
        }
    }
}

/// Runs `draw` from `state` on; the generator then goes on from where it was before.
///
/// # Errors
///
/// libtorch's.
pub fn with_rng_state<T>(state: &RngState, draw: impl FnOnce() -> T) -> Result<T, Error> {
    let now = RngState::of(state.device)?;
    state.restore()?;
    let result = draw();
    now.restore()?;
    Ok(result)
}

fn empty(device: Device) -> Result<Tensor, Error> {
    let libtorch =
        |error: tch::TchError| Error::Libtorch { operation: "RngState", reason: error.to_string() };
    Tensor::f_empty([0], (Kind::Float, device)).map_err(libtorch)
}
