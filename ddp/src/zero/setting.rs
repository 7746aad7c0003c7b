//! Settings of an optimizer that a program changes between steps.

use tch::{COptimizer, TchError};

use super::sharded_parameter::ShardedParameter;
use super::shards::Shards;
use crate::join::JoinContext;
use crate::optimizer_choice::one_line;

/// The numbers of a setting.
pub(crate) const NUMBERS: usize = 3;

/// What is set.
#[derive(Clone, Copy)]
pub(crate) enum Hyperparameter {
    LearningRate,
    Momentum,
    WeightDecay,
}

/// A value that a program has set, of all parameters or a group of them.
#[derive(Clone, Copy)]
pub(crate) struct Setting {
    pub parameter: Hyperparameter,
    pub group: Option<usize>,
    pub value: f64,
}

impl Setting {
    /// Sets the value.
    pub fn apply(self, shards: &mut Shards) -> Result<(), String> {
        let is_set =
            |parameter: &ShardedParameter| self.group.is_none_or(|group| parameter.group == group);
        if let Some(group) = self.group.filter(|_| !shards.parameters.iter().any(is_set)) {
            return Err(format!("no parameter is in group {group}: Path::set_group puts it there"));
        }
        for parameter in shards.parameters.iter_mut().filter(|parameter| is_set(parameter)) {
            for chunk in parameter.own.iter_mut().flat_map(|own| &mut own.chunks) {
                self.set(&mut chunk.optimizer).map_err(one_line)?;
            }
        }
        Ok(())
    }

    fn set(self, optimizer: &mut COptimizer) -> Result<(), TchError> {
        match self.parameter {
            Hyperparameter::LearningRate => optimizer.set_learning_rate(self.value),
            Hyperparameter::Momentum => optimizer.set_momentum(self.value),
            Hyperparameter::WeightDecay => optimizer.set_weight_decay(self.value),
        }
    }

    /// Returns the setting as numbers to send.
    pub fn encode(self) -> [i64; NUMBERS] {
        let group = self.group.map_or(-1, |group| group as i64);
        [self.parameter as i64, group, self.value.to_bits() as i64]
    }

    /// Returns the setting of numbers that [`Setting::encode`] made.
    pub fn decode(numbers: &[i64]) -> Self {
        Self {
            parameter: match numbers[0] {
                0 => Hyperparameter::LearningRate,
                1 => Hyperparameter::Momentum,
                _ => Hyperparameter::WeightDecay,
            },
            group: usize::try_from(numbers[1]).ok(),
            value: f64::from_bits(numbers[2] as u64),
        }
    }
}

/// The steps of a join under way.
pub(crate) struct JoinedSteps {
    pub context: JoinContext,
    /// What was set since the last step. Ranks that have ended do not run the program that sets it.
    pub settings: Vec<Setting>,
}
