//! An optimizer's step whose errors can be handled.

use tch::nn::Optimizer;
use tch::{TchError, Tensor};

use crate::error::{Error, Result};

/// tch's `backward_step` panics when backward fails, and with many ranks backward fails when a peer is lost.
pub trait TryBackwardStep {
    /// Zeroes the gradients, runs backward from `loss`, and steps. A failing backward, be it libtorch's or a failing
    /// reduction of gradients, is an [`Error::Backward`]; the parameters are then as they were.
    fn try_backward_step(&mut self, loss: &Tensor) -> Result<()>;
}

impl TryBackwardStep for Optimizer {
    fn try_backward_step(&mut self, loss: &Tensor) -> Result<()> {
        self.zero_grad();
        loss.f_backward().map_err(|error| match error {
            TchError::Torch(reason) => Error::Backward { reason },
            other => Error::Backward { reason: other.to_string() },
        })?;
        self.step();
        Ok(())
    }
}
