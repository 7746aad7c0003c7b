//! An optimizer that is chosen before it is made for several parameters, or parts of some.

use std::collections::{HashMap, HashSet};

use flow_autograd::OptimizerState;
use tch::nn::OptimizerConfig;
use tch::{COptimizer, Device, Kind, TchError, Tensor};

/// An optimizer and its learning rate.
pub(crate) struct OptimizerChoice {
    build: Box<dyn Fn() -> Result<COptimizer, TchError> + Send>,
    learning_rate: f64,
    /// The groups that parameters have in their `VarStore`, by identity; 0 of others.
    pub groups: HashMap<usize, usize>,
    /// Parameters of the `VarStore` that it does not step, by identity.
    pub ignored: HashSet<usize>,
}

impl OptimizerChoice {
    /// Keeps the configuration, of which [`OptimizerChoice::build_for`] makes optimizers.
    pub fn new(config: impl OptimizerConfig + Send + 'static, learning_rate: f64) -> Self {
        let build = Box::new(move || config.build_copt(learning_rate));
        Self { build, learning_rate, groups: HashMap::new(), ignored: HashSet::new() }
    }

    /// Makes an optimizer without parameters.
    pub fn build(&self) -> Result<COptimizer, TchError> {
        (self.build)()
    }

    /// Makes the optimizer of one parameter.
    pub fn build_for(&self, parameter: &Tensor) -> Result<COptimizer, TchError> {
        let mut optimizer = self.build()?;
        optimizer.add_parameters(parameter, 0)?;
        Ok(optimizer)
    }

    /// Describes what must be equal on all ranks, in a line. The error is that of a choice that makes
    /// no sense.
    pub fn describe(&self) -> Result<String, String> {
        let like = Tensor::zeros([0], (Kind::Float, Device::Cpu));
        let built = self.build_for(&like).map_err(one_line)?;
        let state = built.state().map_err(one_line)?;
        let kind = state.parameters[0].split(" of ").next().unwrap_or_default();
        Ok(format!("{kind} with learning rate {}", self.learning_rate))
    }
}

/// Returns the first line of an error: libtorch's have more, which name its sources.
pub(crate) fn one_line(error: impl ToString) -> String {
    error.to_string().lines().next().unwrap_or_default().to_owned()
}
