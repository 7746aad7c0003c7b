//! The parameters, and this rank's parts of them with their optimizers.

use std::sync::{Arc, Mutex, PoisonError};

use flow_autograd::OptimizerState;
use flow_comm::ProcessGroup;
use tch::nn::Variables;
use tch::{TchError, Tensor};

use super::kept::KeptGradients;
use super::sharded_parameter::{OwnShard, ShardedParameter, address_of, sharded_parameters};
use crate::apart::are_apart;
use crate::optimizer_choice::{OptimizerChoice, one_line};

/// The parameters of a model, in the order in which it was made, and the optimizers of this rank's parts.
/// Errors are texts: they say what is wrong, and what would be right.
pub(crate) struct Shards {
    pub parameters: Vec<ShardedParameter>,
    /// [`StateDict::parameters`] of an optimizer that has them all.
    pub described: Vec<String>,
    /// The store of the parameters, and how many it had.
    store: Arc<Mutex<Variables>>,
    known: usize,
    /// Where gradients are, if each rank keeps its parts of them only.
    pub kept: Option<Arc<dyn KeptGradients>>,
}

impl Shards {
    /// Parts the trainable variables of `store` among ranks, and makes the optimizers of this rank's parts.
    pub fn new(
        store: &Arc<Mutex<Variables>>,
        choice: &OptimizerChoice,
        group: &ProcessGroup,
        kept: Option<Arc<dyn KeptGradients>>,
    ) -> Result<Self, String> {
        let sharers = sharers(kept.as_deref(), group, group.rank());
        let own_place = sharers.iter().position(|&sharer| sharer == group.rank());
        let mut parameters = sharded_parameters(store, &choice.ignored, sharers.len())?;
        if let Some(kept) = &kept {
            kept.part(&mut parameters)?;
        }
        let mut whole = choice.build().map_err(one_line)?;
        for (place, parameter) in parameters.iter_mut().enumerate() {
            whole.add_parameters(&parameter.tensor, parameter.group).map_err(one_line)?;
            let own = parameter.shards.iter().find(|shard| Some(shard.rank) == own_place);
            let Some(elements) = own.map(|shard| shard.elements.clone()) else { continue };
            let part = match &kept {
                Some(kept) => kept.own_part(parameter, place, &elements)?,
                None => parameter.view(elements.start, elements.len()).map_err(one_line)?,
            };
            parameter.own = Some(OwnShard::new(elements, &part, choice)?);
            if let Some(kept) = &kept {
                parameter.set_gradients(kept.memory(place).as_ref())?;
            }
        }
        let known = store.lock().unwrap_or_else(PoisonError::into_inner).trainable_variables.len();
        Ok(Self {
            parameters,
            described: whole.state().map_err(one_line)?.parameters,
            store: Arc::clone(store),
            known,
            kept,
        })
    }

    /// Returns the ranks that share the state with `rank`.
    pub fn sharers(&self, group: &ProcessGroup, rank: usize) -> Vec<usize> {
        sharers(self.kept.as_deref(), group, rank)
    }

    /// Checks that the parameters are those that the optimizer was made for, where they were.
    pub fn check(&self) -> Result<(), String> {
        let store = self.store.lock().unwrap_or_else(PoisonError::into_inner);
        if store.trainable_variables.len() != self.known {
            return Err(
                "the VarStore has got variables since: make the optimizer once the model is \
                        complete"
                    .to_owned(),
            );
        }
        if let Some(kept) = &self.kept {
            return kept.check();
        }
        if are_apart(self.parameters.iter().map(|parameter| &parameter.tensor)) {
            return Err(
                "the communication hook of the Ddp gives ranks gradients of their own, as \
                        PostLocalSgd does: use tch's optimizer, or another hook"
                    .to_owned(),
            );
        }
        for parameter in &self.parameters {
            if address_of(&parameter.tensor) != parameter.address {
                return Err(format!(
                    "{} has other memory since (set_data, another type or device): make the optimizer \
                     anew, and give it the state",
                    parameter.name
                ));
            }
        }
        Ok(())
    }

    /// Steps this rank's parts of the parameters that have gradients.
    pub fn step(&mut self) -> Result<(), String> {
        if let Some(kept) = self.kept.clone() {
            return self.step_kept(&*kept);
        }
        // All, not only this rank's: ranks have the same gradients, and so the same error at once.
        self.parameters.iter().try_for_each(ShardedParameter::check_gradient)?;
        for parameter in &mut self.parameters {
            let Some(own) = &parameter.own else { continue };
            if let Some(gradient) = parameter.gradient(&own.elements)? {
                parameter.step(&gradient)?;
            }
        }
        Ok(())
    }

    /// Steps this rank's parts of the parameters whose gradients are there.
    fn step_kept(&mut self, kept: &dyn KeptGradients) -> Result<(), String> {
        for (place, parameter) in self.parameters.iter_mut().enumerate() {
            if kept.is_there(place) {
                parameter.step_chunks()?;
            }
        }
        kept.has_stepped();
        Ok(())
    }

    /// Steps this rank's part of the parameter at a place, which has a gradient, and frees that.
    pub fn step_one(&mut self, place: usize) -> Result<(), String> {
        let parameter = &mut self.parameters[place];
        parameter.check_gradient()?;
        if let Some(own) = &parameter.own
            && let Some(gradient) = parameter.gradient(&own.elements)?
        {
            parameter.step(&gradient)?;
        }
        flow_autograd::set_grad(&parameter.tensor, None).map_err(one_line)
    }

    /// Drops all gradients, as tch's optimizers do.
    pub fn zero_grad(&self) -> Result<(), String> {
        for parameter in &self.parameters {
            flow_autograd::set_grad(&parameter.tensor, None).map_err(one_line)?;
        }
        self.kept.as_ref().map_or(Ok(()), |kept| kept.clear()).map_err(one_line)
    }

    /// Clips the norm of all gradients together as tch's optimizers do, to the bit, and returns what it
    /// was.
    pub fn clip_grad_norm(&self, max: f64) -> Result<f64, String> {
        let gradients = self.parameters.iter().map(|parameter| parameter.tensor.grad());
        let mut gradients: Vec<Tensor> = gradients.filter(Tensor::defined).collect();
        if gradients.is_empty() {
            return Ok(0.0);
        }
        tch::no_grad(|| {
            let norms: Vec<Tensor> = gradients.iter().map(Tensor::norm).collect();
            let norm = f64::try_from(Tensor::f_stack(&norms, 0)?.f_norm()?)?;
            let factor = max / (norm + 1e-6);
            if factor < 1.0 {
                for gradient in &mut gradients {
                    let _ = gradient.f_mul_scalar_(factor)?;
                }
            }
            Ok::<_, TchError>(norm)
        })
        .map_err(one_line)
    }
}

/// Returns the ranks that share the state with `rank`: all, unless gradients are kept in parts.
fn sharers(kept: Option<&dyn KeptGradients>, group: &ProcessGroup, rank: usize) -> Vec<usize> {
    match kept {
        Some(kept) => kept.sharers(group, rank),
        None => (0..group.world_size()).collect(),
    }
}
