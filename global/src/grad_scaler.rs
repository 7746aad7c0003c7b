//! Losses are scaled so that gradients in half precision do not underflow.

use flow_tensor::{ReduceOp, TensorCollectives};
use tch::nn::Optimizer;
use tch::{Kind, Tensor};

use crate::error::{Error, Result};
use crate::gradients::{gradients, own, reduced};
use crate::handle::find_spec;

/// Scales the loss, and skips the steps whose gradients overflow: `torch.amp.GradScaler`, with its
/// defaults. For models of global tensors, and for those of a `Ddp`. All ranks call the same
/// functions, and skip the same steps. Each optimizer needs a scaler of its own: one of `tch`, or a
/// [`ShardedOptimizer`](crate::ShardedOptimizer).
///
/// ```
/// use flow_global::{distribute, GradScaler, Placement, S, B};
/// use flow_tensor::ProcessGroup;
/// use tch::nn::{self, Module, OptimizerConfig};
/// use tch::{Device, Kind, Tensor};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let group = ProcessGroup::from_env()?;
/// let placement = Placement::all(&group)?;
/// let vs = nn::VarStore::new(Device::Cpu);
/// let model = nn::linear(vs.root(), 4, 2, Default::default());
/// distribute(&vs, &placement, |_, _| [B])?;
/// let mut optimizer = nn::Sgd::default().build(&vs, 0.1)?;
/// let mut scaler = GradScaler::default();
/// let x = flow_global::randn([6, 4], Kind::Float, &placement, [S(0)])?;
///
/// optimizer.zero_grad();
/// let loss = model.forward(&x).square().mean(Kind::Float);
/// scaler.scale(&loss).backward();
/// scaler.unscale(&optimizer)?; // only to clip, or to look at gradients
/// let was_taken = scaler.step(&mut optimizer)?;
/// scaler.update();
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
    /// Returns the variables whose gradients the step takes: with these, whole or as this rank's
    /// shards.
    ///
    /// # Errors
    /// A collective fails.
    fn variables_to_step(&self) -> Result<Vec<Tensor>>;

    /// Takes the step.
    ///
    /// # Errors
    /// A collective fails.
    fn take_step(&mut self) -> Result<()>;

    /// Does what there is to do instead of the step.
    ///
    /// # Errors
    /// Of `libtorch`.
    fn skip_step(&mut self) -> Result<()>;
}

impl ScaledOptimizer for Optimizer {
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
    /// [`ShardedOptimizer`](crate::ShardedOptimizer).
    pub fn unscale(&mut self, optimizer: &impl ScaledOptimizer) -> Result<()> {
        if self.stage != Stage::Scaled {
            return Err(fail("gradients are unscaled already; call update() after each step()"));
        }
        let found_inf = tch::no_grad(|| self.divide(&optimizer.variables_to_step()?))?;
        self.stage = Stage::Unscaled { found_inf };
        Ok(())
    }

    /// Takes the optimizer's step, if no gradient has overflowed; returns whether the step was
    /// taken. Unscales the gradients, if that has not been done.
    ///
    /// # Errors
    /// As of [`GradScaler::unscale`], or it was called already in this iteration.
    pub fn step(&mut self, optimizer: &mut impl ScaledOptimizer) -> Result<bool> {
        if self.stage == Stage::Scaled {
            self.unscale(optimizer)?;
        }
        let Stage::Unscaled { found_inf } = self.stage else {
            return Err(fail(
                "step() was called already since the last update(); call update() after each \
                 step(), and use one GradScaler for each optimizer",
            ));
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
    pub fn update(&mut self) {
        match std::mem::replace(&mut self.stage, Stage::Scaled) {
            Stage::Stepped { found_inf: true } | Stage::Unscaled { found_inf: true } => {
                self.scale *= self.backoff_factor;
                self.good_steps = 0;
            }
            Stage::Stepped { found_inf: false } | Stage::Unscaled { found_inf: false } => {
                self.good_steps += 1;
                if self.good_steps == self.growth_interval {
                    self.scale *= self.growth_factor;
                    self.good_steps = 0;
                }
            }
            Stage::Scaled => {}
        }
    }

    /// Returns the scale, and the steps since it changed, for a checkpoint.
    pub fn state(&self) -> (f64, u64) {
        (self.scale, self.good_steps)
    }

    /// Goes on from [`GradScaler::state`].
    pub fn load_state(&mut self, (scale, good_steps): (f64, u64)) {
        (self.scale, self.good_steps, self.stage) = (scale, good_steps, Stage::Scaled);
    }

    fn divide(&self, variables: &[Tensor]) -> Result<bool> {
        let mut flags = Vec::new();
        let mut world = None;
        for mut gradient in gradients(variables) {
            if gradient.kind() == Kind::Half {
                return Err(fail(
                    "a gradient is in f16, which would underflow; keep variables in f32, or use \
                     ShardedOptimizer",
                ));
            }
            if let Some(spec) = find_spec(&gradient) {
                let group = spec.placement().runtime()?.world();
                world.get_or_insert_with(|| group.clone());
            }
            // A sum may overflow where what is added does not.
            let whole = reduced(&gradient)?;
            if let Some(own) = own(&whole) {
                flags.push(own.f_isfinite()?.f_all()?.f_logical_not()?);
            }
            let _ = gradient.f_mul_scalar_(1.0 / self.scale)?;
        }
        let own = if flags.is_empty() {
            0.0
        } else {
            Tensor::f_stack(&flags, 0)?.f_any()?.f_double_value(&[])?
        };
        let Some(world) = world else { return Ok(own > 0.0) };
        let mut found = Tensor::from(own).to_device(world.device());
        world.all_reduce_tensor(&mut found, ReduceOp::Max)?;
        Ok(found.f_double_value(&[])? > 0.0)
    }
}

fn fail(reason: &str) -> Error {
    Error::Unsupported { operation: "GradScaler".to_owned(), reason: reason.to_owned() }
}
