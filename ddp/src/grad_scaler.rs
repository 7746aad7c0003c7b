//! Losses are scaled so that gradients in half precision do not underflow.

use flow_autograd::global::are_finite;
use tch::nn::Optimizer;
use tch::{Kind, Tensor};

use crate::error::{Error, Result};
use crate::optimizer_choice::one_line;

/// Scales the loss, and skips the steps whose gradients overflow: `torch.amp.GradScaler`, with its
/// defaults. For models of a `Ddp`, and for those of global tensors. All ranks call the same
/// functions, and skip the same steps. Each optimizer needs a scaler of its own: one of `tch`, a
/// [`ZeroRedundancyOptimizer`](crate::ZeroRedundancyOptimizer), or for global tensors
/// `flow::global::ShardedOptimizer`.
///
/// ```
/// use flow_ddp::{Ddp, Error, GradScaler, ProcessGroup};
/// use tch::nn::{self, ModuleT, OptimizerConfig};
/// use tch::{Device, Kind, Tensor};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let group = ProcessGroup::from_env()?;
/// let vs = nn::VarStore::new(Device::Cpu);
/// let net = nn::linear(vs.root(), 4, 2, Default::default());
/// let model = Ddp::new(net, &vs, &group)?;
/// let mut optimizer = nn::Sgd::default().build(&vs, 0.1)?;
/// let mut scaler = GradScaler::default();
/// let x = Tensor::randn([6, 4], (Kind::Float, Device::Cpu));
///
/// optimizer.zero_grad();
/// let loss = model.forward_t(&x, true).square().mean(Kind::Float);
/// scaler.scale(&loss).f_backward().map_err(Error::from_backward)?;
/// scaler.unscale(&optimizer)?; // only to clip, or to look at gradients
/// let was_taken = scaler.step(&mut optimizer)?;
/// scaler.update()?;
/// # assert!(was_taken);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct GradScaler {
    scale: f64,
    growth_factor: f64,
    backoff_factor: f64,
    growth_interval: u64,
    /// Steps since the scale changed, none of which overflowed.
    good_steps: u64,
    stage: Stage,
}

/// An optimizer as a [`GradScaler`] needs it.
pub trait ScaledOptimizer {
    /// The error of its step.
    type Error: From<Error>;

    /// Returns the variables whose gradients the step takes: with these, whole or as this rank's
    /// shards.
    ///
    /// # Errors
    /// A collective fails; the optimizer cannot step with gradients that are unscaled.
    fn variables_to_step(&self) -> Result<Vec<Tensor>, Self::Error>;

    /// Returns what all ranks have found in their gradients, where they may have found different
    /// things (default: what this rank has).
    ///
    /// # Errors
    /// That of this rank; a collective fails; some ranks have gradients and others have none.
    fn agree(&self, found: Result<Found>) -> Result<Found, Self::Error> {
        Ok(found?)
    }

    /// Takes the step.
    ///
    /// # Errors
    /// A collective fails.
    fn take_step(&mut self) -> Result<(), Self::Error>;

    /// Does what there is to do instead of the step.
    ///
    /// # Errors
    /// Of `libtorch`.
    fn skip_step(&mut self) -> Result<(), Self::Error>;
}

impl ScaledOptimizer for Optimizer {
    type Error = Error;

    fn variables_to_step(&self) -> Result<Vec<Tensor>> {
        Ok(self.trainable_variables())
    }

    fn take_step(&mut self) -> Result<()> {
        self.step();
        Ok(())
    }

    fn skip_step(&mut self) -> Result<()> {
        Ok(())
    }
}

/// What a [`GradScaler`] has found in the gradients of an optimizer's variables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// There are no gradients.
    Nothing,
    /// All elements are finite.
    Finite,
    /// An element is infinite or not a number.
    Overflow,
}

/// How far an iteration is.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Stage {
    /// The gradients are, or will be, multiplied by the scale.
    Scaled,
    /// They are divided by it.
    Unscaled { found_inf: bool },
    /// The step was taken or skipped.
    Stepped { found_inf: bool },
}

impl Default for GradScaler {
    fn default() -> Self {
        Self::new(65536.0, 2.0, 0.5, 2000)
    }
}

impl GradScaler {
    /// Begins with a scale of `init_scale`, which a step that overflows multiplies by
    /// `backoff_factor`, and `growth_interval` steps in a row that do not by `growth_factor`.
    pub fn new(
        init_scale: f64,
        growth_factor: f64,
        backoff_factor: f64,
        growth_interval: u64,
    ) -> Self {
        Self {
            scale: init_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
            good_steps: 0,
            stage: Stage::Scaled,
        }
    }

    /// Returns the loss times the scale.
    pub fn scale(&self, loss: &Tensor) -> Tensor {
        loss * self.scale
    }

    /// Returns the factor of the loss.
    pub fn get_scale(&self) -> f64 {
        self.scale
    }

    /// Divides the gradients of the optimizer's variables by the scale. Finds out on all ranks
    /// whether an element of any rank is infinite or not a number.
    ///
    /// # Errors
    /// It was called already in this iteration, a gradient is in f16, or a collective fails. f16
    /// cannot hold unscaled gradients: keep the variables in f32, or take a
    /// `flow::global::ShardedOptimizer`. On all ranks, if there are no gradients: a `Ddp` may have
    /// applied them in backward, multiplied by the scale.
    pub fn unscale<O: ScaledOptimizer>(&mut self, optimizer: &O) -> Result<(), O::Error> {
        if self.stage != Stage::Scaled {
            let reason = "gradients are unscaled already; call update() after each step()";
            return Err(failed(reason).into());
        }
        let variables = optimizer.variables_to_step()?;
        let own = tch::no_grad(|| self.divide(&variables));
        let found = optimizer.agree(own)?;
        if found == Found::Nothing {
            return Err(failed(NO_GRADIENTS).into());
        }
        self.stage = Stage::Unscaled { found_inf: found == Found::Overflow };
        Ok(())
    }

    /// Takes the optimizer's step, if no gradient has overflowed; returns whether the step was
    /// taken. Unscales the gradients, if that has not been done.
    ///
    /// # Errors
    /// As of [`GradScaler::unscale`], or it was called already in this iteration.
    pub fn step<O: ScaledOptimizer>(&mut self, optimizer: &mut O) -> Result<bool, O::Error> {
        if self.stage == Stage::Scaled {
            self.unscale(optimizer)?;
        }
        let Stage::Unscaled { found_inf } = self.stage else {
            let reason = "step() was called already since the last update(); call update() after \
                          each step(), and use one GradScaler for each optimizer";
            return Err(failed(reason).into());
        };
        if found_inf {
            optimizer.skip_step()?
        } else {
            optimizer.take_step()?
        }
        self.stage = Stage::Stepped { found_inf };
        Ok(!found_inf)
    }

    /// Updates the scale for the next iteration.
    ///
    /// # Errors
    /// No gradients were unscaled since the last update.
    pub fn update(&mut self) -> Result<()> {
        let (Stage::Unscaled { found_inf } | Stage::Stepped { found_inf }) = self.stage else {
            let reason = "update() was called without a step: call step(&mut optimizer) after the \
                          backward of scale(&loss), and then update(). An optimizer that steps in \
                          backward has applied the scaled gradients: use bf16 with it, without a \
                          scaler";
            return Err(failed(reason));
        };
        self.stage = Stage::Scaled;
        if found_inf {
            self.scale *= self.backoff_factor;
            self.good_steps = 0;
            return Ok(());
        }
        self.good_steps += 1;
        if self.good_steps == self.growth_interval {
            self.scale *= self.growth_factor;
            self.good_steps = 0;
        }
        Ok(())
    }

    /// Returns the scale, and the steps since it changed, for a checkpoint.
    pub fn state(&self) -> (f64, u64) {
        (self.scale, self.good_steps)
    }

    /// Goes on from [`GradScaler::state`].
    pub fn load_state(&mut self, (scale, good_steps): (f64, u64)) {
        (self.scale, self.good_steps, self.stage) = (scale, good_steps, Stage::Scaled);
    }

    fn divide(&self, variables: &[Tensor]) -> Result<Found> {
        let mut gradients = Vec::with_capacity(variables.len());
        for gradient in variables.iter().map(Tensor::grad).filter(Tensor::defined) {
            if gradient.kind() == Kind::Half {
                return Err(failed(
                    "a gradient is in f16, which would underflow; keep variables in f32, or use \
                     flow::global::ShardedOptimizer",
                ));
            }
            gradients.push(gradient);
        }
        if gradients.is_empty() {
            return Ok(Found::Nothing);
        }
        let are_finite = are_finite(&gradients).map_err(Error::in_grad_scaler)?;
        for gradient in &mut gradients {
            let divided = gradient.f_mul_scalar_(1.0 / self.scale);
            let _ = divided.map_err(|error| failed(&one_line(error)))?;
        }
        Ok(if are_finite { Found::Finite } else { Found::Overflow })
    }
}

const NO_GRADIENTS: &str = "no variable of the optimizer has a gradient: call step(&mut optimizer) \
                            after the backward of scale(&loss), and zero_grad() before it. An \
                            optimizer that steps in backward has applied the scaled gradients: build \
                            the Ddp without optimizer_in_backward and hook_with_zero_step, or use bf16 \
                            without a scaler";

fn failed(reason: &str) -> Error {
    Error::GradScaler { reason: reason.to_owned() }
}
