//! A job: a model, and what is done with it in one call.

use std::path::Path;

use flow_tensor::{ProcessGroup, ReduceOp, TensorCollectives};
use tch::nn::{self, Optimizer};
use tch::{Kind, Tensor};

use super::placeholder::Placeholder;
use super::{Array, View, variables};
use crate::error::{Error, Result};
use crate::local::distribute_tensor;
use crate::lr_scheduler::LrScheduler;
use crate::placement::Placement;
use crate::sbp::{B, S, Sbp};
use crate::tensor::GlobalTensor;

/// A model that all ranks call together, to train it or to predict with it.
///
/// The model gets the inputs and returns one tensor: what a training job minimizes, or what a
/// prediction is. In the consistent view inputs and variables are global tensors, in the mirrored
/// view plain ones.
pub struct Job<'a, M> {
    view: View,
    placement: Placement,
    /// The ranks of the placement, in its order.
    group: ProcessGroup,
    variables: &'a nn::VarStore,
    inputs: Vec<Placeholder>,
    training: Option<Training>,
    model: M,
    later: Option<(Output, Callback)>,
}

type Callback = Box<dyn FnOnce(Array)>;

struct Training {
    optimizer: Optimizer,
    lr_scheduler: Option<LrScheduler>,
    step: u64,
}

/// The result of the model.
struct Output {
    tensor: Tensor,
    /// On all ranks.
    elements: i64,
    /// Mirrored: how many rows each rank has.
    rows: Vec<i64>,
}

impl<'a, M: FnMut(&[Tensor]) -> Result<Tensor>> Job<'a, M> {
    /// Makes a job that minimizes the mean of what the model returns. Its variables begin with the
    /// first rank's values. In the consistent view those that are not yet global become so, as B: a
    /// variable that is to be split is distributed before.
    ///
    /// # Errors
    /// Ranks with other variables; in the mirrored view a placement that leaves out ranks of its
    /// group, or a variable that is global.
    pub fn train(
        view: View,
        placement: &Placement,
        vs: &'a nn::VarStore,
        optimizer: Optimizer,
        model: M,
    ) -> Result<Self> {
        let training = Training { optimizer, lr_scheduler: None, step: 0 };
        Self::new(view, placement, vs, Some(training), model)
    }

    /// Makes a job that returns what the model does, without gradients.
    ///
    /// # Errors
    /// As of [`Job::train`].
    pub fn predict(
        view: View,
        placement: &Placement,
        vs: &'a nn::VarStore,
        model: M,
    ) -> Result<Self> {
        Self::new(view, placement, vs, None, model)
    }

    fn new(
        view: View,
        placement: &Placement,
        vs: &'a nn::VarStore,
        training: Option<Training>,
        model: M,
    ) -> Result<Self> {
        let runtime = placement.runtime()?;
        let ranks = placement.ranks();
        let world = runtime.world();
        if view == View::Mirrored && ranks.len() != world.world_size() {
            return Err(Error::Unsupported {
                operation: "a mirrored job".to_owned(),
                reason: format!(
                    "the placement {placement} has {} of {} ranks, and every rank needs a model; \
                     use View::Consistent, or a group of these ranks only",
                    ranks.len(),
                    world.world_size()
                ),
            });
        }
        // Consistent jobs may leave out ranks, which then have no part of the group of a placement.
        let group = match view {
            View::Mirrored => runtime.groups.group(ranks)?,
            View::Consistent => world.clone(),
        };
        variables::prepare(view, placement, &group, vs)?;
        Ok(Self {
            view,
            placement: placement.clone(),
            group,
            variables: vs,
            inputs: Vec::new(),
            training,
            model,
            later: None,
        })
    }

    /// Declares the next input. Of a consistent job `shape` is that of the logical array. Of a
    /// mirrored one it is that of a rank's array, which may be shorter in dimension 0.
    pub fn input(mut self, name: &str, shape: impl AsRef<[i64]>, kind: Kind) -> Self {
        let shape = shape.as_ref().to_vec();
        self.inputs.push(Placeholder { name: name.to_owned(), shape, kind });
        self
    }

    /// Sets the learning rate of each step, the next of which is number `step`: 0, unless the
    /// training goes on from a checkpoint. Without this the optimizer's own stays.
    pub fn lr_scheduler(mut self, lr_scheduler: LrScheduler, step: u64) -> Self {
        if let Some(training) = &mut self.training {
            (training.lr_scheduler, training.step) = (Some(lr_scheduler), step);
        }
        self
    }

    /// Calls the model, and trains it if this is a training job. Returns what the model did before
    /// its weights changed: in the consistent view the logical array, in the mirrored view a list.
    /// All ranks call this, with the same inputs; of a list a rank reads its own array only.
    ///
    /// # Errors
    /// Inputs that are not as declared, before anything is computed; the model's; a loss that does
    /// not depend on the variables; a collective that fails.
    pub fn run<I: Into<Array>>(&mut self, inputs: impl IntoIterator<Item = I>) -> Result<Array> {
        let output = self.step(inputs)?;
        self.result(output)
    }

    /// Runs as [`Job::run`] does, but does not wait for the result: `callback` gets it in the job's
    /// next call, or in [`Job::wait`]. A result that is not fetched so is dropped with the job.
    ///
    /// # Errors
    /// As of [`Job::run`].
    pub fn run_then<I: Into<Array>>(
        &mut self,
        inputs: impl IntoIterator<Item = I>,
        callback: impl FnOnce(Array) + 'static,
    ) -> Result<()> {
        let output = self.step(inputs)?;
        self.later = Some((output, Box::new(callback)));
        Ok(())
    }

    /// Fetches the result that a callback still waits for. All ranks call this.
    ///
    /// # Errors
    /// A collective fails.
    pub fn wait(&mut self) -> Result<()> {
        if let Some((output, callback)) = self.later.take() {
            callback(self.result(output)?);
        }
        Ok(())
    }

    /// Writes the variables, whole, into a safetensors file: rank 0 does, all ranks call this. The
    /// file fits jobs of both views, and `VarStore::load`.
    ///
    /// # Errors
    /// The file cannot be written, or a collective fails.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        variables::save(self.variables, &self.group, path.as_ref())
    }

    /// Reads variables that a job of any view, placement and SBP has saved. Each rank reads the
    /// file.
    ///
    /// # Errors
    /// The file cannot be read, lacks a variable, or has one of another shape.
    pub fn load(&mut self, path: impl AsRef<Path>) -> Result<()> {
        variables::load(self.variables, path.as_ref())
    }

    fn step<I: Into<Array>>(&mut self, inputs: impl IntoIterator<Item = I>) -> Result<Output> {
        self.wait()?;
        let inputs = self.checked(inputs.into_iter().map(Into::into).collect())?;
        if self.training.is_none() {
            let tensor = tch::no_grad(|| (self.model)(&inputs))?;
            return self.output(tensor);
        }
        let loss = (self.model)(&inputs)?;
        // A copy: the model may return a variable, which the step changes.
        let output = self.output(loss.detach().copy())?;
        if let Some(training) = &mut self.training {
            let elements = output.elements.max(1) as f64;
            training.optimizer.zero_grad();
            (loss.f_sum(loss.kind())? / elements).f_backward()?;
            if self.view == View::Mirrored {
                let weights = training.optimizer.trainable_variables();
                let gradients = weights.iter().map(Tensor::grad).filter(Tensor::defined);
                let mut gradients: Vec<Tensor> = gradients.collect();
                self.group.all_reduce_coalesced(&mut gradients, ReduceOp::Sum)?;
            }
            if let Some(scheduler) = &training.lr_scheduler {
                training.optimizer.set_lr(scheduler.at(training.step));
            }
            training.optimizer.step();
            training.step += 1;
        }
        Ok(output)
    }

    /// Returns the inputs for this rank's model, after they are checked.
    fn checked(&self, inputs: Vec<Array>) -> Result<Vec<Tensor>> {
        if inputs.len() != self.inputs.len() {
            let declared: Vec<&str> = self.inputs.iter().map(|input| &*input.name).collect();
            return Err(Error::Unsupported {
                operation: "a job".to_owned(),
                reason: format!(
                    "it declares {} inputs ({}), but got {}",
                    declared.len(),
                    declared.join(", "),
                    inputs.len()
                ),
            });
        }
        for (declared, input) in self.inputs.iter().zip(&inputs) {
            declared.check(self.view, input, self.placement.ranks().len())?;
        }
        let device = self.group.device();
        let mut own = Vec::new();
        for input in inputs {
            own.push(match input {
                Array::Whole(tensor) => {
                    let sbp = self.rows_split(&tensor);
                    distribute_tensor(&tensor.to_device(device), &self.placement, sbp)?
                }
                Array::List(mut list) => list.swap_remove(self.group.rank()).to_device(device),
            });
        }
        Ok(own)
    }

    /// Rows are split over the placement's first axis.
    fn rows_split(&self, tensor: &Tensor) -> Vec<Sbp> {
        let mut sbp = vec![B; self.placement.axes()];
        if tensor.dim() > 0 {
            sbp[0] = S(0);
        }
        sbp
    }

    /// What the model has returned, and how much all ranks have of it.
    fn output(&self, tensor: Tensor) -> Result<Output> {
        if self.view == View::Consistent {
            return Ok(Output { elements: tensor.numel() as i64, rows: Vec::new(), tensor });
        }
        let rows = tensor.size().first().copied().unwrap_or(1);
        let own = Tensor::from_slice(&[rows, tensor.numel() as i64]);
        let all = Vec::<Vec<i64>>::try_from(self.group.all_gather_tensor(&own)?)?;
        let elements = all.iter().map(|rank| rank[1]).sum();
        Ok(Output { elements, rows: all.iter().map(|rank| rank[0]).collect(), tensor })
    }

    fn result(&self, output: Output) -> Result<Array> {
        let Output { tensor, rows, .. } = output;
        if self.view == View::Consistent {
            return Ok(Array::Whole(tensor.full()?));
        }
        let sizes = tensor.size();
        let is_scalar = sizes.is_empty();
        let own = if is_scalar { tensor.f_view([1])? } else { tensor.f_contiguous()? };
        let counts: Vec<usize> = rows.iter().map(|&rows| rows as usize).collect();
        let all = self.group.all_gather_v_tensor(&own, &counts)?;
        let mut list = all.f_split_with_sizes(&rows[..], 0)?;
        if is_scalar {
            for one in &mut list {
                *one = one.f_squeeze_dim(0)?;
            }
        }
        Ok(Array::List(list))
    }
}
