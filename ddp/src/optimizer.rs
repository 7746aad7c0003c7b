//! An optimizer's step whose errors can be handled.

use flow_comm::trace;
use tch::Tensor;
use tch::nn::Optimizer;

use crate::error::{Error, Result};
use crate::steps::last_step;

/// tch's `backward_step` panics when backward fails, and with many ranks backward fails when a peer
/// is lost.
pub trait TryBackwardStep {
    /// Zeroes the gradients, runs backward from `loss`, and steps. If backward fails the parameters
    /// are as they were, and the error is that of [`Error::from_backward`].
    fn try_backward_step(&mut self, loss: &Tensor) -> Result<()>;
}

impl TryBackwardStep for Optimizer {
    fn try_backward_step(&mut self, loss: &Tensor) -> Result<()> {
        self.zero_grad();
        loss.f_backward().map_err(Error::from_backward)?;
        let _phase = trace::phase(trace::Phase::Optimizer, last_step().into());
        self.step();
        Ok(())
    }
}
