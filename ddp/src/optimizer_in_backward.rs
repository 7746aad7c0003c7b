//! An optimizer that a [`Ddp`](crate::Ddp) steps in backward.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use flow_autograd::{OptimizerState, SavedState, StateDict};
use flow_comm::{ForkSafe, ProcessGroup};
use tch::{COptimizer, TchError, Tensor};

use crate::error::{Error, Result, job_rank};
use crate::optimizer_choice::OptimizerChoice;

/// The operation's name in errors.
pub(crate) const OPERATION: &str = "optimizer_in_backward";

/// The optimizer that a [`Ddp`](crate::Ddp) steps in backward: see
/// [`DdpBuilder::optimizer_in_backward`](crate::DdpBuilder::optimizer_in_backward). This is a handle;
/// [`Ddp::optimizer_in_backward`](crate::Ddp::optimizer_in_backward) returns another one.
///
/// Its state is that of the [`Optimizer`](tch::nn::Optimizer) which `config.build(&vs, learning_rate)`
/// makes: [`Checkpoints`](crate::Checkpoints) save it, and either can go on from the other's.
#[derive(Clone)]
pub struct OptimizerInBackward {
    rank: usize,
    /// One for each parameter of the model, trained or frozen, in the model's order: buckets change,
    /// and which parameters are trained.
    parts: Arc<ForkSafe<Mutex<Vec<Part>>>>,
}

/// The optimizer of one parameter.
struct Part {
    optimizer: COptimizer,
    group: usize,
}

impl fmt::Debug for OptimizerInBackward {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OptimizerInBackward").finish_non_exhaustive()
    }
}

impl OptimizerInBackward {
    /// Makes the optimizer of these parameters.
    pub(crate) fn new(
        choice: &OptimizerChoice,
        parameters: &[(String, Tensor)],
        group: &ProcessGroup,
    ) -> Result<Self> {
        let rank = job_rank(group);
        let mut parts = Vec::with_capacity(parameters.len());
        for (_, tensor) in parameters {
            let optimizer = choice.build_for(tensor).map_err(|error| failed(rank, error))?;
            let group = choice.groups.get(&flow_autograd::identity(tensor)).copied();
            parts.push(Part { optimizer, group: group.unwrap_or(0) });
        }
        Ok(Self { rank, parts: Arc::new(ForkSafe::new(Mutex::new(parts))) })
    }

    /// Applies the gradient of the parameter at this place of the model, and frees it.
    pub(crate) fn step(&self, position: usize, parameter: &Tensor) -> Result<()> {
        self.parts()?[position].optimizer.step().map_err(|error| failed(self.rank, error))?;
        flow_autograd::bump_version(parameter)
            .and_then(|()| flow_autograd::set_grad(parameter, None))
            .map_err(|error| failed(self.rank, error))
    }

    /// Sets the learning rate of the steps to come. All ranks call this, between two steps.
    ///
    /// # Errors
    /// This process was forked from the rank.
    pub fn set_lr(&self, learning_rate: f64) -> Result<()> {
        self.each(None, |optimizer| optimizer.set_learning_rate(learning_rate))
    }

    /// Sets the learning rate of a group of parameters: see [`tch::nn::Path::set_group`].
    ///
    /// # Errors
    /// No parameter is in the group; this process was forked from the rank.
    pub fn set_lr_group(&self, group: usize, learning_rate: f64) -> Result<()> {
        self.each(Some(group), |optimizer| optimizer.set_learning_rate(learning_rate))
    }

    /// Sets the momentum; of Adam and AdamW, their first beta.
    ///
    /// # Errors
    /// This process was forked from the rank.
    pub fn set_momentum(&self, momentum: f64) -> Result<()> {
        self.each(None, |optimizer| optimizer.set_momentum(momentum))
    }

    /// Sets the weight decay.
    ///
    /// # Errors
    /// This process was forked from the rank.
    pub fn set_weight_decay(&self, weight_decay: f64) -> Result<()> {
        self.each(None, |optimizer| optimizer.set_weight_decay(weight_decay))
    }

    /// Sets the weight decay of a group of parameters.
    ///
    /// # Errors
    /// Those of [`OptimizerInBackward::set_lr_group`].
    pub fn set_weight_decay_group(&self, group: usize, weight_decay: f64) -> Result<()> {
        self.each(Some(group), |optimizer| optimizer.set_weight_decay(weight_decay))
    }

    /// Returns an error: the norm of all gradients is known once all have come, and by then the first
    /// ones are applied and freed.
    ///
    /// # Errors
    /// Always.
    pub fn clip_grad_norm(&self, max: f64) -> Result<()> {
        Err(failed(
            self.rank,
            format!(
                "gradients cannot be clipped to the norm {max} of all of them: each bucket is applied \
                 and freed before the last gradient has come; build without \
                 {OPERATION}, and clip before the optimizer's step"
            ),
        ))
    }

    /// Calls `set` with the optimizer of each parameter, of this group if there is one.
    fn each(
        &self,
        group: Option<usize>,
        set: impl Fn(&mut COptimizer) -> Result<(), TchError>,
    ) -> Result<()> {
        let mut parts = self.parts()?;
        let mut is_empty = true;
        for part in parts.iter_mut().filter(|part| group.is_none_or(|group| part.group == group)) {
            set(&mut part.optimizer).map_err(|error| failed(self.rank, error))?;
            is_empty = false;
        }
        match group.filter(|_| is_empty) {
            None => Ok(()),
            Some(group) => Err(failed(
                self.rank,
                format!("no parameter is in group {group}: Path::set_group puts it there"),
            )),
        }
    }

    fn parts(&self) -> Result<MutexGuard<'_, Vec<Part>>> {
        if !self.parts.is_ours() {
            let reason =
                "this process was forked from the rank: only the rank can use its optimizer";
            return Err(failed(self.rank, reason));
        }
        Ok(self.parts.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl OptimizerState for OptimizerInBackward {
    fn state(&self) -> Result<StateDict, flow_autograd::Error> {
        state(&self.parts().map_err(in_state)?)
    }

    fn load_state(&mut self, saved: &StateDict) -> Result<(), flow_autograd::Error> {
        let mut parts = self.parts().map_err(in_state)?;
        let before = state(&parts)?;
        saved.check_parameters(&before.parameters)?;
        let loaded = load(&mut parts, saved);
        if loaded.is_err() {
            load(&mut parts, &before)?;
        }
        loaded
    }
}

/// Returns the places of parameters as a tch optimizer has them: group by group.
fn in_groups(parts: &[Part]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..parts.len()).collect();
    order.sort_by_key(|&position| parts[position].group);
    order
}

fn state(parts: &[Part]) -> Result<StateDict, flow_autograd::Error> {
    let mut all = StateDict::default();
    for (number, position) in in_groups(parts).into_iter().enumerate() {
        let own = parts[position].optimizer.state()?;
        all.parameters.extend(own.parameters);
        for (name, tensor) in own.tensors {
            let part = name.split_once('.').map_or("", |(_, part)| part);
            all.tensors.push((format!("{number}.{part}"), tensor));
        }
    }
    Ok(all)
}

/// Replaces the state of each parameter's optimizer; of some only, if there is an error.
fn load(parts: &mut [Part], saved: &StateDict) -> Result<(), flow_autograd::Error> {
    let order = in_groups(parts);
    let mut states: Vec<StateDict> = Vec::with_capacity(order.len());
    for text in &saved.parameters {
        states.push(StateDict { parameters: vec![text.clone()], tensors: Vec::new() });
    }
    for (name, tensor) in &saved.tensors {
        let place = name.split_once('.').and_then(|(number, part)| {
            let number: usize = number.parse().ok()?;
            Some((states.get_mut(number)?, part))
        });
        let Some((state, part)) = place else {
            return Err(in_state(format!(
                "the state has {name}, which the optimizer has no place for"
            )));
        };
        state.tensors.push((format!("0.{part}"), tensor.shallow_clone()));
    }
    for (position, state) in order.into_iter().zip(&states) {
        parts[position].optimizer.load_state(state)?;
    }
    Ok(())
}

fn in_state(reason: impl ToString) -> flow_autograd::Error {
    flow_autograd::Error::Libtorch { operation: "OptimizerState", reason: reason.to_string() }
}

fn failed(rank: usize, reason: impl ToString) -> Error {
    Error::Torch { rank, operation: OPERATION, reason: reason.to_string() }
}
