//! The parameters, and this rank's parts of them with their optimizers.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use flow_autograd::{OptimizerState, StateDict, data_ptr, identity};
use flow_tensor::{OVERLAPS, overlaps};
use tch::nn::{VarStore, Variables};
use tch::{COptimizer, Kind, TchError, Tensor};

use super::partition::{Shard, partition};
use crate::apart::are_apart;
use crate::grad_layout::GradLayout;
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
}

/// A parameter that ranks step in parts.
pub(crate) struct ShardedParameter {
    pub name: String,
    pub tensor: Tensor,
    pub layout: GradLayout,
    /// Its group in the `VarStore`.
    pub group: usize,
    pub shards: Vec<Shard>,
    /// This rank's part, if it has one.
    pub own: Option<OwnShard>,
    /// Where its first element was.
    address: usize,
}

/// This rank's part of a parameter.
pub(crate) struct OwnShard {
    pub elements: Range<usize>,
    /// A view of the parameter: the optimizer changes the parameter itself.
    tensor: Tensor,
    pub optimizer: COptimizer,
    /// [`StateDict::parameters`] of the optimizer.
    pub described: Vec<String>,
}

impl Shards {
    /// Parts the trainable variables of `vs`, each once if it has several names.
    pub fn new(
        vs: &VarStore,
        choice: &OptimizerChoice,
        rank: usize,
        ranks: usize,
    ) -> Result<Self, String> {
        let variables = vs.variables_.lock().unwrap_or_else(PoisonError::into_inner);
        let mut names: Vec<_> = variables.named_variables.iter().collect();
        names.sort_by_key(|&(name, _)| std::cmp::Reverse(name));
        // Of several names the last one inserted, which is the first in alphabetical order.
        let names: HashMap<usize, &String> =
            names.iter().map(|(name, tensor)| (identity(tensor), *name)).collect();
        let mut whole = choice.build().map_err(one_line)?;
        let mut seen = HashSet::new();
        let mut parameters = Vec::new();
        for variable in &variables.trainable_variables {
            let tensor = variable.tensor.shallow_clone();
            if !seen.insert(identity(&tensor)) {
                continue;
            }
            whole.add_parameters(&tensor, variable.group).map_err(one_line)?;
            let name = names.get(&identity(&tensor)).map_or("a parameter", |name| name.as_str());
            parameters.push(ShardedParameter::new(name.to_owned(), tensor, variable.group)?);
        }
        if parameters.is_empty() {
            return Err("the VarStore has no trainable variables: make the model first".to_owned());
        }
        let mut sizes = Vec::with_capacity(parameters.len());
        for ShardedParameter { tensor, .. } in &parameters {
            sizes.push((tensor.numel(), tensor.kind().elt_size_in_bytes()));
        }
        for (parameter, shards) in parameters.iter_mut().zip(partition(&sizes, ranks)) {
            parameter.shards = shards;
            let own = parameter.shards.iter().find(|shard| shard.rank == rank).cloned();
            if let Some(own) = own {
                parameter.own = Some(parameter.own_shard(own.elements, choice)?);
            }
        }
        Ok(Self {
            parameters,
            described: whole.state().map_err(one_line)?.parameters,
            store: Arc::clone(&vs.variables_),
            known: variables.trainable_variables.len(),
        })
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
        Ok(())
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

impl ShardedParameter {
    fn new(name: String, tensor: Tensor, group: usize) -> Result<Self, String> {
        if let Some(reason) = flow_autograd::unsendable(&tensor) {
            return Err(format!("{name} {reason}"));
        }
        if overlaps(&tensor) {
            return Err(format!("{name} {OVERLAPS}"));
        }
        let layout = GradLayout::of(&tensor);
        if !layout.in_memory_order(&tensor).is_contiguous() {
            return Err(format!("{name} has gaps in its memory: make it of a contiguous() tensor"));
        }
        let address = address_of(&tensor);
        Ok(Self { name, tensor, layout, group, shards: Vec::new(), own: None, address })
    }

    fn own_shard(
        &self,
        elements: Range<usize>,
        choice: &OptimizerChoice,
    ) -> Result<OwnShard, String> {
        let tensor = self.view(elements.start, elements.len()).map_err(one_line)?;
        let optimizer = choice.build_for(&tensor).map_err(one_line)?;
        let described = optimizer.state().map_err(one_line)?.parameters;
        Ok(OwnShard { elements, tensor, optimizer, described })
    }

    /// Returns the kind of its elements.
    pub fn kind(&self) -> Kind {
        self.tensor.kind()
    }

    /// Returns a view of so many elements, in the order of memory.
    pub fn view(&self, start: usize, elements: usize) -> Result<Tensor, TchError> {
        let flat = self.layout.in_memory_order(&self.tensor.detach()).f_view([-1])?;
        flat.f_narrow(0, start as i64, elements as i64)
    }

    /// Returns these elements of a tensor that is like the parameter, in the order of its memory.
    pub fn elements_of(
        &self,
        tensor: &Tensor,
        elements: &Range<usize>,
    ) -> Result<Tensor, TchError> {
        let flat = self.layout.in_memory_order(tensor).f_reshape([-1])?;
        flat.f_narrow(0, elements.start as i64, elements.len() as i64)
    }

    /// Checks that the gradient can be applied, if there is one.
    fn check_gradient(&self) -> Result<(), String> {
        let gradient = self.tensor.grad();
        if gradient.defined() && gradient.is_sparse() {
            return Err(format!(
                "the gradient of {} is sparse: build the Ddp with sparse_as_dense(true), or use tch's \
                 optimizer",
                self.name
            ));
        }
        Ok(())
    }

    /// Returns these elements of the gradient, if there is one.
    pub fn gradient(&self, elements: &Range<usize>) -> Result<Option<Tensor>, String> {
        self.check_gradient()?;
        let gradient = self.tensor.grad();
        if !gradient.defined() {
            return Ok(None);
        }
        let gradient = flow_autograd::resolved(&gradient).unwrap_or(gradient);
        self.elements_of(&gradient, elements).map(Some).map_err(one_line)
    }

    /// Steps this rank's part, which has this gradient.
    pub fn step(&mut self, gradient: &Tensor) -> Result<(), String> {
        let Some(own) = &mut self.own else { return Ok(()) };
        flow_autograd::set_grad(&own.tensor, Some(gradient)).map_err(one_line)?;
        own.optimizer.step().map_err(one_line)?;
        // The gradient's memory is not to live, or be shared, because of this rank's part.
        flow_autograd::set_grad(&own.tensor, None)
            .and_then(|()| flow_autograd::bump_version(&self.tensor))
            .map_err(one_line)
    }
}

impl OwnShard {
    /// Returns the state, each tensor by its name in PyTorch.
    pub fn state(&self) -> Result<Vec<(String, Tensor)>, flow_autograd::Error> {
        let mut named = Vec::new();
        for (name, tensor) in self.optimizer.state()?.tensors {
            let name = name.strip_prefix("0.").unwrap_or(&name);
            named.push((name.to_owned(), tensor));
        }
        Ok(named)
    }

    /// Replaces the state by these tensors, named as [`OwnShard::state`] names them.
    pub fn load_state(&mut self, named: Vec<(String, Tensor)>) -> Result<(), flow_autograd::Error> {
        let tensors =
            named.into_iter().map(|(name, tensor)| (format!("0.{name}"), tensor)).collect();
        self.optimizer.load_state(&StateDict { parameters: self.described.clone(), tensors })
    }
}

fn address_of(tensor: &Tensor) -> usize {
    data_ptr(tensor).addr()
}
