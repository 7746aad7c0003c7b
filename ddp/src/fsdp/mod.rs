//! Sharded training (Zhao et al., PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel, 2023),
//! where the ranks of a machine share memory: nothing is gathered.
//!
//! | file | what |
//! |---|---|
//! | `mod.rs` | [`Fsdp`] |
//! | `builder.rs` | its options, and how a model is wrapped |
//! | `shared_parameters.rs` | parameters that the ranks of a machine have in common |
//! | `grad_shards.rs` | the gradients that a rank keeps |
//! | `ignored.rs` | parameters that are left to each rank |
//! | `plan.rs` | the memory that all of it needs, and whether the machine has it |
//! | `machine_memory.rs` | the memory of the machine |

pub(crate) mod builder;
pub(crate) mod grad_shards;
pub(crate) mod ignored;
pub(crate) mod machine_memory;
mod plan;
pub(crate) mod shared_parameters;

use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use flow_comm::ProcessGroup;
use tch::Tensor;
use tch::nn::{ModuleT, OptimizerConfig, VarStore, Variables};

pub use self::builder::FsdpBuilder;
use self::grad_shards::GradShards;
pub use self::plan::{MemoryPlan, PlanError};
use crate::buffers::share_untrained;
use crate::ddp::Ddp;
use crate::error::{Error, Result};
use crate::model_check::agree;
use crate::optimizer_choice::OptimizerChoice;
use crate::zero::ZeroRedundancyOptimizer;
use crate::zero::kept::KeptGradients;

/// A model whose parameters, gradients and optimizer exist once for all ranks of a machine: PyTorch's
/// `FullyShardedDataParallel`, which gathers copies of them, and ZeRO's stage 3. Each machine has all of
/// them, as in PyTorch's hybrid sharding (HSDP).
///
/// ```no_run
/// use flow_ddp::{Fsdp, ProcessGroup, TensorCollectives};
/// use tch::nn::{self, ModuleT};
///
/// # fn main() -> anyhow::Result<()> {
/// # let group = ProcessGroup::from_env()?;
/// # let vs = nn::VarStore::new(group.device());
/// # let net = nn::linear(vs.root(), 784, 10, Default::default());
/// # let (images, labels) = (tch::Tensor::new(), tch::Tensor::new());
/// let model = Fsdp::new(net, &vs, &group)?;
/// let optimizer = model.optimizer(nn::Adam::default(), 1e-3)?;
/// let loss = model.forward_t(&images, true).cross_entropy_for_logits(&labels);
/// optimizer.backward_step(&loss)?;
/// # Ok(()) }
/// ```
///
/// - **Parameters** lie in memory that all ranks of the machine map. Each forward and backward reads them
///   there.
/// - **Gradients**: as soon as a bucket has come, each rank adds up its parts of it, and all free the rest.
///   Over several machines, a bucket is first reduced as a [`Ddp`]'s, and each rank then takes its parts.
///   `.grad` of a parameter is undefined after backward; the parts are where the optimizer finds them.
/// - **The optimizer** of [`Fsdp::optimizer`] waits until all ranks have come, steps this rank's parts, and
///   waits until all ranks of the machine have. Those of other machines may find an error of it out in their
///   next backward. An optimizer of the `VarStore` finds no gradients: to train with none but that is an
///   error of the second backward.
///
/// The weights have the bits of a [`Ddp`]'s: sums are the same. Norms of gradients are summed in another
/// order.
///
/// A change of a parameter is one for all ranks. So it is made in [`Fsdp::write`], by rank 0;
/// [`Checkpoint`](crate::Checkpoint)s may be loaded as ever. Any other write that autograd counts, as it
/// does but for those by way of `data()`, is an error of the next backward or step. Ranks share the
/// parameters until [`Fsdp::into_inner`], also once the `Fsdp` is dropped.
///
/// An `Fsdp` derefs to a [`Ddp`]: what is said of that one's backward, of buffers, [`Ddp::no_sync`] and
/// failures holds here. The model is on the CPU. With one rank it is a `Ddp` with one.
pub struct Fsdp<M> {
    ddp: Ddp<M>,
    store: Arc<Mutex<Variables>>,
}

impl<M> Fsdp<M> {
    /// Wraps `model`, whose variables are in `vs`, with the default options of [`FsdpBuilder`]. All ranks
    /// call this.
    ///
    /// # Errors
    ///
    /// Those of [`Ddp::new`]; a model on a GPU, and more than one rank; no shared memory for the
    /// parameters; less memory than they and their gradients need.
    pub fn new(model: M, vs: &VarStore, group: &ProcessGroup) -> Result<Self> {
        Fsdp::builder(group).wrap(model, vs)
    }

    /// Makes the optimizer of the model, one of tch's, which steps this rank's parts. All ranks call this.
    ///
    /// # Errors
    ///
    /// Those of [`ZeroRedundancyOptimizer::new`]; less memory than the training needs.
    pub fn optimizer(
        &self,
        config: impl OptimizerConfig + Send + 'static,
        learning_rate: f64,
    ) -> Result<ZeroRedundancyOptimizer> {
        let mut choice = OptimizerChoice::new(config, learning_rate);
        choice.ignored = self.ddp.ignored.identities();
        let group = self.ddp.group();
        if group.cuda_device().is_none() {
            plan::check_optimizer(group, &self.store, &choice)?;
        }
        let kept = self.kept().map(|kept| Arc::clone(kept) as Arc<dyn KeptGradients>);
        ZeroRedundancyOptimizer::with(&self.store, group, choice, kept)
    }

    /// Changes parameters: rank 0 runs `change`, without gradients, while the others wait. They then take
    /// over its parameters and buffers, and what it has changed of ignored parameters. All ranks call this.
    ///
    /// ```no_run
    /// # fn main() -> anyhow::Result<()> {
    /// # use tch::nn;
    /// # let group = flow_ddp::ProcessGroup::from_env()?;
    /// # let mut vs = nn::VarStore::new(tch::Device::Cpu);
    /// # let net = nn::linear(vs.root(), 784, 10, Default::default());
    /// let model = flow_ddp::Fsdp::new(net, &vs, &group)?;
    /// model.write(|| vs.load("pretrained.safetensors"))?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// On all ranks, that of `change`; parameters that were changed before, or that have other memory
    /// after; a failure of the group.
    pub fn write<E: fmt::Display>(&self, change: impl FnOnce() -> Result<(), E>) -> Result<()> {
        let group = self.ddp.group();
        let of_change = |error: E| Error::fsdp(group, format!("writing into parameters: {error}"));
        let Some(kept) = self.kept() else {
            return tch::no_grad(change).map_err(of_change);
        };
        self.check_writes(kept)?;
        let ignored = &self.ddp.ignored;
        let versions = ignored.versions();
        let mut changed = Ok(());
        if group.rank() == 0 {
            changed = tch::no_grad(change).map_err(of_change);
        }
        let is_in_place = kept.shared.check_memory().map_err(|reason| Error::fsdp(group, reason));
        // Also of a change that has failed half way: machines must not differ.
        kept.shared.spread()?;
        ignored.share_changed(group, &versions)?;
        agree(group, changed.and(is_in_place))?;
        share_untrained(group, &self.store)
    }

    /// Drops the gradients, also those of ignored parameters.
    ///
    /// # Errors
    ///
    /// Of libtorch.
    pub fn zero_grad(&self) -> Result<()> {
        let cleared = self
            .variables()
            .trainable_variables
            .iter()
            .try_for_each(|variable| flow_autograd::set_grad(&variable.tensor, None));
        let cleared = cleared.and_then(|()| self.kept().map_or(Ok(()), |kept| kept.clear()));
        cleared.map_err(|error| Error::fsdp(self.ddp.group(), error.to_string()))
    }

    /// Trains those parameters that require gradients now, as [`Ddp::refresh`] does.
    ///
    /// # Errors
    ///
    /// Those of [`Ddp::refresh`]; parameters that were changed.
    pub fn refresh(&mut self) -> Result<()> {
        if let Some(kept) = self.kept() {
            self.check_writes(kept)?;
        }
        self.ddp.refresh()
    }

    /// Returns the model, without its hooks and with parameters of this process's own.
    pub fn into_inner(self) -> M {
        if let Some(kept) = self.kept() {
            kept.shared.unshare();
        }
        self.ddp.into_inner()
    }

    /// Checks on all ranks that nothing was written into the parameters for one of them.
    fn check_writes(&self, kept: &GradShards) -> Result<()> {
        let group = self.ddp.group();
        agree(group, kept.shared.check().map_err(|reason| Error::fsdp(group, reason)))
    }

    /// Returns where this rank's parts of the gradients are; None with one rank.
    fn kept(&self) -> Option<&Arc<GradShards>> {
        self.ddp.reducer.as_ref().and_then(|reducer| reducer.kept())
    }

    fn variables(&self) -> MutexGuard<'_, Variables> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<M: ModuleT> ModuleT for Fsdp<M> {
    /// Runs that of the [`Ddp`].
    fn forward_t(&self, input: &Tensor, train: bool) -> Tensor {
        self.ddp.forward_t(input, train)
    }
}

impl<M> Deref for Fsdp<M> {
    type Target = Ddp<M>;

    fn deref(&self) -> &Ddp<M> {
        &self.ddp
    }
}

impl<M: fmt::Debug> fmt::Debug for Fsdp<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fsdp").field("ddp", &self.ddp).finish_non_exhaustive()
    }
}
