//! ZeRO, stage 1 (Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter
//! Models, 2020): ranks share the state of the optimizer.
//!
//! | file | what |
//! |---|---|
//! | `mod.rs` | [`ZeroRedundancyOptimizer`] |
//! | `partition.rs` | which rank has which elements |
//! | `sharded_parameter.rs` | a parameter, and this rank's part with its optimizers |
//! | `shards.rs` | all of them |
//! | `kept.rs` | gradients of which each rank keeps its parts only |
//! | `gather.rs` | how ranks get what others have stepped |
//! | `state.rs` | the state as a whole: gathered on a rank, and loaded |
//! | `loaded.rs` | what a rank reads of it |
//! | `setting.rs` | learning rates and the like |
//! | `error.rs` | errors that name the optimizer |
//! | `parts.rs` | what a [`Ddp`](crate::Ddp) steps in backward |
//! | `join.rs` | uneven inputs |
//! | `scaled.rs` | steps under a [`GradScaler`](crate::GradScaler) |

mod error;
mod gather;
mod join;
pub(crate) mod kept;
mod loaded;
pub(crate) mod partition;
mod parts;
mod scaled;
mod setting;
pub(crate) mod sharded_parameter;
mod shards;
mod state;

use std::cell::RefCell;
use std::fmt;
use std::sync::{Arc, Mutex};

use flow_comm::{ProcessGroup, trace};
use tch::Tensor;
use tch::nn::{OptimizerConfig, VarStore, Variables};

use self::error::{agree, failed};
use self::gather::Gather;
use self::kept::KeptGradients;
pub(crate) use self::parts::{Parts, ZeroInBackward};
use self::setting::{Hyperparameter, JoinedSteps, Setting};
use self::sharded_parameter::ShardedParameter;
use self::shards::Shards;
use crate::error::{Error, Result, job_rank};
use crate::model_check::{describe, device_kind, first_mismatch};
use crate::optimizer::TryBackwardStep;
use crate::optimizer_choice::OptimizerChoice;
use crate::steps::last_step;

/// An optimizer whose state is shared by all ranks, each of which keeps its part: PyTorch's
/// `ZeroRedundancyOptimizer`. It is used beside [`Ddp`](crate::Ddp) as tch's optimizers are.
///
/// ```no_run
/// use flow_ddp::{Ddp, ProcessGroup, TensorCollectives, ZeroRedundancyOptimizer};
/// use tch::nn::{self, ModuleT};
///
/// # fn main() -> anyhow::Result<()> {
/// # let group = ProcessGroup::from_env()?;
/// # let vs = nn::VarStore::new(group.device());
/// # let net = nn::linear(vs.root(), 784, 10, Default::default());
/// # let (images, labels) = (tch::Tensor::new(), tch::Tensor::new());
/// let model = Ddp::new(net, &vs, &group)?;
/// let optimizer = ZeroRedundancyOptimizer::new(&vs, &group, nn::Adam::default(), 1e-3)?;
/// let loss = model.forward_t(&images, true).cross_entropy_for_logits(&labels);
/// optimizer.backward_step(&loss)?;
/// # Ok(()) }
/// ```
///
/// A step changes this rank's parts of the parameters, and then gathers all ranks'. The weights have
/// the same bits as with `config.build(&vs, learning_rate)`: tch's optimizers compute each element by
/// itself. Parameters of more than 64 KiB are split over all ranks, others are a rank's alone.
///
/// Gradients are equal on all ranks, as [`Ddp`](crate::Ddp) leaves them. Also without it, all ranks call
/// [`step`](Self::step) and the setters at the same places of their programs. An error of a rank in
/// [`step`](Self::step) is one of all, and the optimizer is then of no more use.
///
/// [`Checkpoints`](crate::Checkpoints) save the whole state, as tch's optimizer has it: either can go on
/// from the other's, on any number of ranks. In [`join`](crate::join()) it is given beside the model.
pub struct ZeroRedundancyOptimizer {
    parts: Arc<Parts>,
    joined: RefCell<Option<JoinedSteps>>,
}

impl fmt::Debug for ZeroRedundancyOptimizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ZeroRedundancyOptimizer")
            .field("group", &self.parts.group)
            .finish_non_exhaustive()
    }
}

impl ZeroRedundancyOptimizer {
    /// Makes an optimizer of the trainable variables of `vs`, which are the same on all ranks. All ranks
    /// call this. `config` is one of tch's optimizers.
    ///
    /// # Errors
    ///
    /// On all ranks: models or optimizers that differ between them; a learning rate or a variable that
    /// cannot be used; a failure of the group.
    pub fn new(
        vs: &VarStore,
        group: &ProcessGroup,
        config: impl OptimizerConfig + Send + 'static,
        learning_rate: f64,
    ) -> Result<Self> {
        Self::with(&vs.variables_, group, OptimizerChoice::new(config, learning_rate), None)
    }

    /// Makes an optimizer as [`ZeroRedundancyOptimizer::new`] does. `kept`: where the gradients are, if each
    /// rank keeps its parts only. The ranks that part the parameters then share all of the state.
    pub(crate) fn with(
        store: &Arc<Mutex<Variables>>,
        group: &ProcessGroup,
        choice: OptimizerChoice,
        kept: Option<Arc<dyn KeptGradients>>,
    ) -> Result<Self> {
        let rank = job_rank(group);
        let chosen = choice.describe();
        let made = chosen.and_then(|chosen| {
            let shards = Shards::new(store, &choice, group, kept)?;
            Ok((shards, chosen))
        });
        let lines = match &made {
            Ok((shards, chosen)) => lines(&shards.parameters, chosen),
            Err(reason) => vec![format!("an optimizer that cannot be made: {reason}")],
        };
        if let Some(difference) = first_mismatch(group, &lines)? {
            return Err(failed(rank, format!("the model differs between ranks: {difference}")));
        }
        let (shards, chosen) = made.map_err(|reason| failed(rank, reason))?;
        let own = group.duplicate()?;
        let gather = match &shards.kept {
            None => Some(agree(&own, Gather::new(&own, &shards.parameters))?),
            Some(_) => None,
        };
        let parts = Arc::new(Parts::new(own, chosen, shards, gather));
        Ok(Self { parts, joined: RefCell::default() })
    }

    /// Drops the gradients.
    ///
    /// # Errors
    ///
    /// Of libtorch.
    pub fn zero_grad(&self) -> Result<()> {
        let dropped = self.parts.shards().zero_grad();
        dropped.map_err(|reason| self.parts.failed(reason))
    }

    /// Changes the parameters by their gradients, where they have any. All ranks call this.
    ///
    /// # Errors
    ///
    /// On all ranks: the `VarStore` has got variables since, or one has other memory; a gradient is
    /// sparse; a failure of this rank or another, a rank that does not come in time. On GPUs the host
    /// does not wait: another rank's error comes from a later step. A `Ddp` steps the optimizer in
    /// backward.
    pub fn step(&self) -> Result<()> {
        self.parts.group.check("step")?;
        if self.parts.is_in_backward() {
            return Err(self.parts.failed(
                "a Ddp steps it in backward: leave step out, or build the Ddp without \
                 hook_with_zero_step",
            ));
        }
        let _phase = trace::phase(trace::Phase::Optimizer, last_step().into());
        self.with_ended_ranks()?;
        self.take_step(Shards::step)
    }

    /// Runs a step, whose own part is `step`.
    fn take_step(&self, step: impl FnOnce(&mut Shards) -> Result<(), String>) -> Result<()> {
        self.parts.consolidated().take();
        let shards = &mut *self.parts.shards();
        let checked = shards.check().map_err(|reason| self.parts.failed(reason));
        let begun = checked.and_then(|()| {
            shards.kept.as_ref().map_or(Ok(()), |kept| kept.begin_step(&self.parts.group))
        });
        let stepped = begun.and_then(|()| step(shards).map_err(|reason| self.parts.failed(reason)));
        let gathered = stepped.and_then(|()| match &shards.kept {
            Some(kept) => kept.end_step(&self.parts.group),
            None => self.parts.gather(),
        });
        gathered.inspect_err(|error| {
            // The others wait for this rank's parts, or in their next backward.
            self.parts.group.abort(&error.to_string());
            if let Some(kept) = &shards.kept {
                kept.abort(&error.to_string());
            }
        })
    }

    /// Drops the gradients, runs backward from `loss`, and steps, unless a `Ddp` steps in backward.
    ///
    /// # Errors
    ///
    /// That of backward, as [`Error::from_backward`] gives it: the parameters are then as they were.
    /// Those of [`ZeroRedundancyOptimizer::step`].
    pub fn backward_step(&self, loss: &Tensor) -> Result<()> {
        if self.parts.is_in_backward() {
            // It frees the gradients; those of earlier backwards under no_sync are to stay until then.
            return loss.f_backward().map_err(Error::from_backward);
        }
        self.zero_grad()?;
        loss.f_backward().map_err(Error::from_backward)?;
        self.step()
    }

    /// Clips the norm of all gradients together to `max`, between backward and
    /// [`step`](Self::step). Returns the norm before: 0 where there are no gradients. All ranks of an
    /// [`Fsdp`](crate::Fsdp) or a [`FullySharded`](crate::FullySharded) call this.
    ///
    /// # Errors
    ///
    /// Of libtorch; a failure of the group; a `Ddp` steps in backward, where the norm is not known yet.
    pub fn clip_grad_norm(&self, max: f64) -> Result<f64> {
        if self.parts.is_in_backward() {
            return Err(self.parts.failed(format!(
                "gradients cannot be clipped to the norm {max} of all of them: each bucket is applied \
                 and freed before the last gradient has come; build the Ddp without \
                 hook_with_zero_step, and clip before step"
            )));
        }
        let shards = self.parts.shards();
        if let Some(kept) = &shards.kept {
            let clipped = kept.clip_grad_norm(&self.parts.group, max);
            // The others wait for this rank's norm.
            return clipped.inspect_err(|error| self.parts.group.abort(&error.to_string()));
        }
        let clipped = shards.clip_grad_norm(max);
        clipped.map_err(|reason| self.parts.failed(reason))
    }

    /// Sets the learning rate of the steps to come.
    ///
    /// # Errors
    ///
    /// Of libtorch.
    pub fn set_lr(&self, learning_rate: f64) -> Result<()> {
        self.set(Hyperparameter::LearningRate, None, learning_rate)
    }

    /// Sets the learning rate of a group of parameters: see [`tch::nn::Path::set_group`].
    ///
    /// # Errors
    ///
    /// No parameter is in the group.
    pub fn set_lr_group(&self, group: usize, learning_rate: f64) -> Result<()> {
        self.set(Hyperparameter::LearningRate, Some(group), learning_rate)
    }

    /// Sets the momentum; of Adam and AdamW, their first beta.
    ///
    /// # Errors
    ///
    /// Of libtorch.
    pub fn set_momentum(&self, momentum: f64) -> Result<()> {
        self.set(Hyperparameter::Momentum, None, momentum)
    }

    /// Sets the momentum of a group of parameters.
    ///
    /// # Errors
    ///
    /// No parameter is in the group.
    pub fn set_momentum_group(&self, group: usize, momentum: f64) -> Result<()> {
        self.set(Hyperparameter::Momentum, Some(group), momentum)
    }

    /// Sets the weight decay.
    ///
    /// # Errors
    ///
    /// Of libtorch.
    pub fn set_weight_decay(&self, weight_decay: f64) -> Result<()> {
        self.set(Hyperparameter::WeightDecay, None, weight_decay)
    }

    /// Sets the weight decay of a group of parameters.
    ///
    /// # Errors
    ///
    /// No parameter is in the group.
    pub fn set_weight_decay_group(&self, group: usize, weight_decay: f64) -> Result<()> {
        self.set(Hyperparameter::WeightDecay, Some(group), weight_decay)
    }

    fn set(&self, parameter: Hyperparameter, group: Option<usize>, value: f64) -> Result<()> {
        let setting = Setting { parameter, group, value };
        let applied = setting.apply(&mut self.parts.shards());
        applied.map_err(|reason| self.parts.failed(reason))?;
        if let Some(joined) = &mut *self.joined.borrow_mut() {
            joined.settings.push(setting);
        }
        Ok(())
    }

    /// Returns what a `Ddp` steps in backward.
    pub(crate) fn parts(&self) -> &Arc<Parts> {
        &self.parts
    }
}

impl TryBackwardStep for ZeroRedundancyOptimizer {
    fn try_backward_step(&mut self, loss: &Tensor) -> Result<()> {
        self.backward_step(loss)
    }
}

/// Describes what must be equal on all ranks, in lines.
fn lines(parameters: &[ShardedParameter], chosen: &str) -> Vec<String> {
    let mut lines = vec![
        chosen.to_owned(),
        format!("a model on {}", device_kind(parameters[0].tensor.device())),
    ];
    let named: Vec<(String, Tensor)> = parameters
        .iter()
        .map(|parameter| (parameter.name.clone(), parameter.tensor.shallow_clone()))
        .collect();
    for (line, parameter) in describe(&named, &[]).into_iter().zip(parameters) {
        lines.push(format!("{line} group={}", parameter.group));
    }
    lines
}
