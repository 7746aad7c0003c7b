//! The state of libtorch's random number generators.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr::null_mut;

use tch::{Device, Kind, Tensor};

use crate::error::Error;
use crate::ffi;

/// The state of libtorch's generators, of a device and of the CPU: [`RngState::restore`] has the
/// numbers that followed drawn again.
pub struct RngState(Vec<(Device, Tensor)>);

impl RngState {
    /// Reads the state of the generators of this device and of the CPU.
    ///
    /// # Errors
    ///
    /// libtorch has no such device.
    pub fn of(device: Device) -> Result<Self, Error> {
        let mut states = vec![(Device::Cpu, state(Device::Cpu)?)];
        if device != Device::Cpu {
            states.push((device, state(device)?));
        }
        Ok(Self(states))
    }

    /// Has the generators go on from here.
    ///
    /// # Errors
    ///
    /// libtorch's.
    pub fn restore(&self) -> Result<(), Error> {
        self.0.iter().try_for_each(|(device, state)| {
            let like = empty(*device)?;
            // SAFETY: the tensors are alive.
            unsafe {
                let text = ffi::flow_set_rng_state(like.as_ptr(), state.as_ptr());
                ffi::check("RngState::restore", text)
            }
        })
    }
}

/// Runs `draw` from `state` on; the generators then go on from where they were before, also after a
/// panic.
///
/// # Errors
///
/// libtorch's.
pub fn with_rng_state<T>(state: &RngState, draw: impl FnOnce() -> T) -> Result<T, Error> {
    let device = state.0.last().map_or(Device::Cpu, |&(device, _)| device);
    let now = RngState::of(device)?;
    state.restore()?;
    then_restore(&now, draw)
}

/// Runs `draw` with the CPU's generator seeded, which then goes on from where it was before, also after a
/// panic.
///
/// # Errors
///
/// libtorch's.
pub fn with_seed<T>(seed: i64, draw: impl FnOnce() -> T) -> Result<T, Error> {
    let now = RngState::of(Device::Cpu)?;
    tch::manual_seed(seed);
    then_restore(&now, draw)
}

fn then_restore<T>(state: &RngState, draw: impl FnOnce() -> T) -> Result<T, Error> {
    let result = catch_unwind(AssertUnwindSafe(draw));
    state.restore()?;
    Ok(result.unwrap_or_else(|panic| resume_unwind(panic)))
}

fn state(device: Device) -> Result<Tensor, Error> {
    let like = empty(device)?;
    let mut state = null_mut();
    // SAFETY: the tensor is alive, and `state` is writable.
    unsafe {
        ffi::check("RngState::of", ffi::flow_rng_state(like.as_ptr(), &mut state))?;
        Ok(Tensor::from_ptr(state))
    }
}

fn empty(device: Device) -> Result<Tensor, Error> {
    Tensor::f_empty([0], (Kind::Float, device))
        .map_err(|error| Error::Libtorch { operation: "RngState", reason: error.to_string() })
}
