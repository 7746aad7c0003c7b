//! Sharded training (Zhao et al., PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel, 2023),
//! where the ranks of a machine share memory: nothing is gathered.
//!
//! | file | what |
//! |---|---|
//! | `mod.rs` | [`Fsdp`] |
//! | `builder.rs` | its options, and how a model is wrapped |
//! | `shared_parameters.rs` | parameters that the ranks of a machine have in common |
//! | `grad_shards.rs` | the gradients that a rank keeps |

mod builder;
pub(crate) mod grad_shards;
pub(crate) mod shared_parameters;

use std::fmt;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use flow_comm::ProcessGroup;
use tch::Tensor;
use tch::nn::{ModuleT, OptimizerConfig, VarStore, Variables};

pub use self::builder::FsdpBuilder;
use self::grad_shards::GradShards;
use crate::ddp::Ddp;
use crate::error::{Error, Result, job_rank};
use crate::model_check::agree;
use crate::optimizer_choice::OptimizerChoice;
use crate::zero::ZeroRedundancyOptimizer;

/// A model whose parameters, gradients and optimizer exist once for all ranks of a machine: PyTorch's
/// `FullyShardedDataParallel`, which gathers copies of them, and ZeRO's stage 3.
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
///   `.grad` of a parameter is undefined after backward; the parts are where the optimizer finds them.
/// - **The optimizer** of [`Fsdp::optimizer`] steps this rank's parts, and waits until all ranks have. An
///   optimizer of the `VarStore` finds no gradients: it is an error to train with none but that.
///
/// The weights have the bits of a [`Ddp`]'s: sums are the same. Norms of gradients are summed in another
/// order.
///
/// A change of a parameter is one for all ranks. So it is made in [`Fsdp::write`], by one of them;
/// [`Checkpoint`](crate::Checkpoint)s may be loaded as ever. Any other change is an error of the next
/// forward in training mode, or of the next step.
///
/// An `Fsdp` derefs to a [`Ddp`]: what is said of that one's backward, of buffers, [`Ddp::no_sync`] and
/// failures holds here. All ranks are on one machine, and the model is on the CPU. With one rank it is a
/// `Ddp` with one.
pub struct Fsdp<M> {
    ddp: Ddp<M>,
    store: Arc<Mutex<Variables>>,
    /// None with one rank.
    kept: Option<Arc<GradShards>>,
    has_optimizer: AtomicBool,
}

impl<M> Fsdp<M> {
    /// Wraps `model`, whose variables are in `vs`, with the default options of [`FsdpBuilder`]. All ranks
    /// call this.
    ///
    /// # Errors
    ///
    /// Those of [`Ddp::new`]; ranks on several machines, or a model on a GPU, and more than one rank; no
    /// shared memory for the parameters.
    pub fn new(model: M, vs: &VarStore, group: &ProcessGroup) -> Result<Self> {
        Fsdp::builder(group).wrap(model, vs)
    }

    /// Makes the optimizer of the model, one of tch's, which steps this rank's parts. All ranks call this.
    ///
    /// # Errors
    ///
    /// Those of [`ZeroRedundancyOptimizer::new`].
    pub fn optimizer(
        &self,
        config: impl OptimizerConfig + Send + 'static,
        learning_rate: f64,
    ) -> Result<ZeroRedundancyOptimizer> {
        let choice = OptimizerChoice::new(config, learning_rate);
        let group = self.ddp.group();
        let made = ZeroRedundancyOptimizer::with(&self.store, group, choice, self.kept.clone())?;
        self.has_optimizer.store(true, Ordering::Relaxed);
        Ok(made)
    }

    /// Changes parameters: one rank of each machine runs `change`, without gradients, while the others
    /// wait. All ranks call this.
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
    /// On all ranks, that of `change`; a failure of the group.
    pub fn write<E: fmt::Display>(&self, change: impl FnOnce() -> Result<(), E>) -> Result<()> {
        let group = self.ddp.group();
        let of_change = |error: E| self.error(format!("writing into parameters: {error}"));
        let Some(kept) = &self.kept else {
            return tch::no_grad(change).map_err(of_change);
        };
        group.barrier()?;
        let changed =
            if group.local_index() == 0 { tch::no_grad(change).map_err(of_change) } else { Ok(()) };
        let changed = agree(group, changed);
        kept.shared.accept_writes();
        changed
    }

    /// Drops the gradients.
    ///
    /// # Errors
    ///
    /// Of libtorch.
    pub fn zero_grad(&self) -> Result<()> {
        let cleared = self.kept.as_ref().map_or(Ok(()), |kept| kept.clear());
        cleared.map_err(|error| self.error(error.to_string()))
    }

    /// Trains those parameters that require gradients now, as [`Ddp::refresh`] does.
    ///
    /// # Errors
    ///
    /// Those of [`Ddp::refresh`].
    pub fn refresh(&mut self) -> Result<()> {
        let refreshed = self.ddp.refresh();
        if let Some(kept) = &self.kept {
            kept.shared.accept_writes();
        }
        refreshed
    }

    /// Returns the model, without its hooks and with parameters of this process's own.
    pub fn into_inner(self) -> M {
        if let Some(kept) = &self.kept {
            kept.shared.part();
        }
        self.ddp.into_inner()
    }

    /// Checks that this rank may go on to train.
    fn check(&self) -> Result<()> {
        let Some(kept) = &self.kept else { return Ok(()) };
        kept.shared.check().map_err(|reason| self.error(reason))?;
        if !self.has_optimizer.load(Ordering::Relaxed) && kept.has_gradients() {
            return Err(self.error(
                "the gradients of the last backward were not used: make the optimizer by \
                 Fsdp::optimizer, as one of the VarStore finds none; without an optimizer call \
                 Fsdp::zero_grad"
                    .to_owned(),
            ));
        }
        Ok(())
    }

    fn error(&self, reason: String) -> Error {
        Error::Fsdp { rank: job_rank(self.ddp.group()), reason }
    }
}

impl<M: ModuleT> Fsdp<M> {
    /// Runs `forward_t`. The error is that of [`Ddp::try_forward_t`], or that parameters were changed.
    pub fn try_forward_t(&self, input: &Tensor, train: bool) -> Result<Tensor> {
        if train {
            self.check()?;
        }
        self.ddp.try_forward_t(input, train)
    }
}

impl<M: ModuleT> ModuleT for Fsdp<M> {
    /// An error is returned by the backward that follows, on all ranks; use [`Fsdp::try_forward_t`] to have
    /// it here.
    fn forward_t(&self, input: &Tensor, train: bool) -> Tensor {
        if train && let Err(error) = self.check() {
            log::error!("{error}");
            self.ddp.abort(&error.to_string());
        }
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
        f.debug_struct("Fsdp")
            .field("model", &*self.ddp)
            .field("group", self.ddp.group())
            .finish_non_exhaustive()
    }
}
