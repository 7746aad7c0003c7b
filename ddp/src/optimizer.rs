//! An optimizer's step whose errors can be handled.

use tch::nn::Optimizer;
use tch::{TchError, Tensor};

/// tch's `backward_step` panics when backward fails, and with many ranks backward fails when a peer is lost.
pub trait TryBackwardStep {
    /// Zeroes the gradients, runs backward from `loss`, and steps. A failing backward, be it libtorch's or a failing
    /// reduction of gradients, is returned; the parameters are then as they were.
    fn try_backward_step(&mut self, loss: &Tensor) -> Result<(), TchError>;
}

impl TryBackwardStep for Optimizer {
    fn try_backward_step(&mut self, loss: &Tensor) -> Result<(), TchError> {
        self.zero_grad();
        loss.f_backward()?;
        self.step();
        Ok(())
    }
}
