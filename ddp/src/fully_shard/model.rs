//! A model whose modules are sharded.

use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, Mutex};

use flow_autograd::grad_enabled;
use flow_comm::ProcessGroup;
use tch::Tensor;
use tch::nn::{Module, ModuleT, OptimizerConfig, Variables};

use super::module::ShardedModule;
use super::units::Units;
use crate::buffers::share_untrained;
use crate::error::{Error, Result};
use crate::model_check::agree;
use crate::optimizer_choice::OptimizerChoice;
use crate::zero::ZeroRedundancyOptimizer;
use crate::zero::kept::KeptGradients;

/// A model of which each rank keeps a part: what [`FullyShard::wrap`](super::FullyShard::wrap) makes. It derefs to the model.
///
/// - **Parameters** have memory in their module's forward and backward only. So an optimizer of the
///   `VarStore` cannot step them, and `vs.save` is an error: use [`optimizer`](Self::optimizer), and
///   [`with_full_parameters`](Self::with_full_parameters).
/// - **Gradients** are averaged over all ranks, module by module while backward runs, each rank's part for
///   that rank only. `.grad` of a parameter is undefined after backward.
/// - All ranks run the same forwards and backwards, also to evaluate. The next step is an error of all if
///   they have not.
/// - A loss depends on a module by its output only. A tensor that the module leaves elsewhere, as an
///   auxiliary loss in a field of its own, must be computed of its output: its gradient would come when the
///   parameters have no memory.
/// - A backward runs once through each forward, without `create_graph`. Backward after the optimizer has
///   stepped is an error of libtorch: the parameters are others then.
/// - Each rank has buffers of its own after the start.
pub struct FullySharded<M> {
    pub(super) model: Model<M>,
    pub(super) group: ProcessGroup,
    pub(super) store: Arc<Mutex<Variables>>,
    pub(super) units: Arc<Units>,
}

/// A model with parameters outside of its sharded modules, or without.
pub(super) enum Model<M> {
    Sharded(ShardedModule<M>),
    Bare(M),
}

impl<M> FullySharded<M> {
    /// Makes the optimizer, one of tch's, which steps this rank's part of each module. All ranks call
    /// this.
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
        let kept = Arc::clone(&self.units) as Arc<dyn KeptGradients>;
        ZeroRedundancyOptimizer::with(&self.store, &self.group, choice, Some(kept))
    }

    /// Returns the group that the model is sharded over.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Waits until the last backward's gradients are averaged. All ranks call this.
    ///
    /// # Errors
    ///
    /// A failure of this rank or another.
    pub fn synchronize(&self) -> Result<()> {
        self.units.synchronize()
    }

    /// Makes backward only accumulate this rank's gradients, whole, until this guard and every other one
    /// is dropped. The first backward after that reduces them.
    #[must_use = "gradients are reduced again as soon as the guard is dropped"]
    pub fn no_sync(&self) -> Unsynchronized {
        self.units.begin_unsynchronized();
        Unsynchronized(Arc::clone(&self.units))
    }

    /// Runs `read` while all parameters have memory, as for `vs.save`: PyTorch's `summon_full_params`. All
    /// ranks call this. A change of a parameter is lost: see [`write`](Self::write).
    ///
    /// # Errors
    ///
    /// A failure of the group.
    pub fn with_full_parameters<T>(&self, read: impl FnOnce() -> T) -> Result<T> {
        self.units.with(&self.units.all(), |_| Ok(tch::no_grad(read)))
    }

    /// Changes parameters: rank 0 runs `change`, without gradients, while all have memory. All ranks then
    /// take over its parameters and buffers. All ranks call this.
    ///
    /// # Errors
    ///
    /// On all ranks, that of `change`; a failure of the group.
    pub fn write<E: fmt::Display>(&self, change: impl FnOnce() -> Result<(), E>) -> Result<()> {
        let changed = self.units.with(&self.units.all(), |units| {
            let mut changed = Ok(());
            if self.group.rank() == 0 {
                changed = tch::no_grad(change).map_err(|error| {
                    Error::fully_shard(&self.group, format!("writing into parameters: {error}"))
                });
            }
            for unit in units {
                let flats = &mut unit.lock().flats;
                flats.iter_mut().try_for_each(|flat| flat.take_over(self.units.group()))?;
            }
            Ok(changed)
        })?;
        // Also of a change that has failed half way: ranks must not differ.
        share_untrained(&self.group, &self.store)?;
        agree(&self.group, changed)
    }

    /// Drops the gradients.
    ///
    /// # Errors
    ///
    /// Of libtorch.
    pub fn zero_grad(&self) -> Result<()> {
        let cleared = self.units.clear_gradients();
        cleared.map_err(|error| Error::fully_shard(&self.group, error))
    }
}

impl<M: ModuleT> FullySharded<M> {
    /// Runs the model's `forward_t`. All ranks call this.
    ///
    /// # Errors
    ///
    /// Those of [`ShardedModule::try_forward_t`] of what is outside of modules; gradients of the last
    /// backward that no optimizer has used. A module inside panics with its own.
    pub fn try_forward_t(&self, input: &Tensor, train: bool) -> Result<Tensor> {
        self.units.begin_forward(grad_enabled())?;
        let output = match &self.model {
            Model::Sharded(model) => model.try_forward_t(input, train)?,
            Model::Bare(model) => model.forward_t(input, train),
        };
        self.units.end_forward();
        Ok(output)
    }
}

impl<M: Module> FullySharded<M> {
    /// Runs the model's `forward`, as [`ModuleT::forward_t`] does in training. All ranks call this.
    pub fn forward(&self, input: &Tensor) -> Tensor {
        self.forward_t(input, true)
    }
}

impl<M: ModuleT> ModuleT for FullySharded<M> {
    /// Runs [`FullySharded::try_forward_t`]. Panics with its error, as tch's modules do.
    fn forward_t(&self, input: &Tensor, train: bool) -> Tensor {
        self.try_forward_t(input, train).unwrap_or_else(|error| panic!("{error}"))
    }
}

impl<M> Deref for FullySharded<M> {
    type Target = M;

    fn deref(&self) -> &M {
        match &self.model {
            Model::Sharded(model) => model,
            Model::Bare(model) => model,
        }
    }
}

impl<M> fmt::Debug for FullySharded<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FullySharded").field("group", &self.group).finish_non_exhaustive()
    }
}

/// Keeps gradients local while it lives: see [`FullySharded::no_sync`].
pub struct Unsynchronized(Arc<Units>);

impl Drop for Unsynchronized {
    fn drop(&mut self) {
        self.0.end_unsynchronized();
    }
}
