//! Sharding over all ranks, module by module (Zhao et al., PyTorch FSDP: Experiences on Scaling Fully
//! Sharded Data Parallel, 2023).
//!
//! | file | what |
//! |---|---|
//! | `mod.rs` | [`FullyShard`], and the model that it makes |
//! | `module.rs` | [`ShardedModule`]: its forward and backward |
//! | `units.rs` | all modules: when they are gathered, and their gradients reduced |
//! | `events.rs` | what ranks have done together |
//! | `kept.rs` | where an optimizer finds gradients |
//! | `place.rs` | where a parameter is |
//! | `parts.rs` | this rank's elements of parameters, for checkpoints |
//! | `unit.rs` | a module's parameters |
//! | `flat.rs` | those of one kind, in one piece of memory |

mod events;
mod flat;
mod kept;
mod module;
pub(crate) mod parts;
mod place;
mod unit;
mod units;

use std::cell::RefCell;
use std::collections::HashSet;
use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use flow_autograd::{grad_enabled, identity};
use flow_comm::ProcessGroup;
use tch::nn::{Module, ModuleT, OptimizerConfig, VarStore, Variables};
use tch::{Kind, Tensor};

use self::flat::FlatParameters;
pub use self::module::ShardedModule;
use self::unit::Unit;
use self::units::Units;
use crate::buffers::share_untrained;
use crate::error::{Error, Result};
use crate::model_check::{agree, can_be_averaged, describe, first_mismatch};
use crate::optimizer_choice::OptimizerChoice;
use crate::zero::ZeroRedundancyOptimizer;
use crate::zero::kept::KeptGradients;
use crate::zero::sharded_parameter::names;

/// Makes a model of which each rank keeps a part, module by module: PyTorch's `fully_shard` (FSDP2).
///
/// A [`module`](Self::module) is gathered from all ranks for its forward, and again for its backward. It
/// is freed after each, so that a rank has its part of the model, and a few modules whole. While one
/// computes, the next is gathered already. Modules are sharded as soon as they are made: a model need not
/// fit into the memory of one rank.
///
/// ```no_run
/// use flow_ddp::{FullyShard, ProcessGroup, TensorCollectives};
/// use tch::nn::{self, ModuleT};
///
/// # fn main() -> anyhow::Result<()> {
/// # let group = ProcessGroup::from_env()?;
/// # let (images, labels) = (tch::Tensor::new(), tch::Tensor::new());
/// let vs = nn::VarStore::new(group.device());
/// let shard = FullyShard::new(&vs, &group)?;
/// let mut net = nn::seq_t();
/// for layer in 0..24 {
///     let path = vs.root() / layer;
///     net = net.add(shard.module(|| nn::linear(&path, 1024, 1024, Default::default()))?);
/// }
/// net = net.add(nn::linear(vs.root() / "head", 1024, 10, Default::default()));
/// let model = shard.wrap(net)?;
/// let optimizer = model.optimizer(nn::Adam::default(), 1e-3)?;
/// let loss = model.forward_t(&images, true).cross_entropy_for_logits(&labels);
/// optimizer.backward_step(&loss)?;
/// # Ok(()) }
/// ```
///
/// Ranks of one machine with a CPU do better with an [`Fsdp`](crate::Fsdp), which gathers nothing.
pub struct FullyShard {
    group: ProcessGroup,
    store: Arc<Mutex<Variables>>,
    units: Arc<Units>,
    reshard_after_forward: bool,
    /// The parameters that modules have, by identity.
    taken: RefCell<HashSet<usize>>,
}

/// Options of a [`FullyShard`]. All ranks choose the same.
#[derive(Debug)]
pub struct FullyShardBuilder {
    group: ProcessGroup,
    reshard_after_forward: bool,
    prefetch: usize,
}

impl FullyShardBuilder {
    /// Sets whether a module is freed after its forward (default: yes). Otherwise it stays until its
    /// backward, and ranks need memory for the whole model (ZeRO's stage 2).
    pub fn reshard_after_forward(mut self, reshard: bool) -> Self {
        self.reshard_after_forward = reshard;
        self
    }

    /// Sets how many modules are gathered before they are needed (default: 1). 0 gathers each when it is
    /// needed, in less memory.
    pub fn prefetch(mut self, modules: usize) -> Self {
        self.prefetch = modules;
        self
    }

    /// Begins a model whose variables will be in `vs`: see [`FullyShard::new`].
    ///
    /// # Errors
    ///
    /// Those of [`FullyShard::new`].
    pub fn begin(self, vs: &VarStore) -> Result<FullyShard> {
        let units = Arc::new(Units::new(&self.group, self.prefetch)?);
        parts::remember(&units);
        Ok(FullyShard {
            units,
            group: self.group,
            store: Arc::clone(&vs.variables_),
            reshard_after_forward: self.reshard_after_forward,
            taken: RefCell::default(),
        })
    }
}

impl FullyShard {
    /// Begins a model whose variables will be in `vs`, with the default options of [`FullyShardBuilder`].
    /// All ranks call this.
    ///
    /// # Errors
    ///
    /// A failure of the group.
    pub fn new(vs: &VarStore, group: &ProcessGroup) -> Result<Self> {
        Self::builder(group).begin(vs)
    }

    /// Options to choose before.
    pub fn builder(group: &ProcessGroup) -> FullyShardBuilder {
        FullyShardBuilder { group: group.clone(), reshard_after_forward: true, prefetch: 1 }
    }

    /// Shards the module that `make` makes: the trainable variables that come to the `VarStore` meanwhile,
    /// but those of modules inside of it that are sharded by themselves. Rank 0's values are taken. All
    /// ranks call this.
    ///
    /// Outside of the module's forward and backward these variables have a shape, but no elements: to use
    /// them there is an error of libtorch.
    ///
    /// # Errors
    ///
    /// On all ranks: modules that differ; one without trainable variables; a failure of the group.
    pub fn module<M>(&self, make: impl FnOnce() -> M) -> Result<ShardedModule<M>> {
        let before = self.variables().trainable_variables.len();
        let module = make();
        let parameters = self.new_parameters(before);
        let unit = self.shard(parameters, self.reshard_after_forward, false)?;
        let Some(unit) = unit else {
            let reason = "a module has got no trainable variable of the VarStore: make its variables \
                          inside of FullyShard::module";
            return Err(Error::fully_shard(&self.group, reason));
        };
        Ok(ShardedModule { module, unit, units: Arc::clone(&self.units) })
    }

    /// Ends the model: shards the trainable variables that are in no module, and gives all ranks rank 0's
    /// buffers. All ranks call this.
    ///
    /// # Errors
    ///
    /// Those of [`FullyShard::module`]; no variable that requires a gradient.
    pub fn wrap<M>(self, model: M) -> Result<FullySharded<M>> {
        // It is needed again as soon as its forward is over.
        let root = self.shard(self.new_parameters(0), false, true)?;
        if !self.units.all().iter().any(|unit| unit.lock().flats.iter().any(|flat| flat.is_trained))
        {
            let reason =
                "no variable of the VarStore requires a gradient: there is nothing to train";
            return Err(Error::fully_shard(&self.group, reason));
        }
        share_untrained(&self.group, &self.store)?;
        let model = match root {
            Some(unit) => Model::Sharded(ShardedModule {
                module: model,
                unit,
                units: Arc::clone(&self.units),
            }),
            None => Model::Bare(model),
        };
        Ok(FullySharded { model, group: self.group, store: self.store, units: self.units })
    }

    /// Makes a unit of parameters, if there are any.
    fn shard(
        &self,
        parameters: Vec<(String, Tensor)>,
        reshard_after_forward: bool,
        is_root: bool,
    ) -> Result<Option<Arc<Unit>>> {
        let lines = describe(&parameters, &[]);
        if let Some(difference) = first_mismatch(&self.group, &lines)? {
            let reason = format!("a module differs between ranks: {difference}");
            return Err(Error::fully_shard(&self.group, reason));
        }
        let checked = check(&parameters);
        agree(&self.group, checked.map_err(|reason| Error::fully_shard(&self.group, reason)))?;
        let Some(name) = parameters.first().map(|(name, _)| name.clone()) else { return Ok(None) };
        self.taken.borrow_mut().extend(parameters.iter().map(|(_, tensor)| identity(tensor)));
        let mut flats = Vec::new();
        for (is_trained, parameters) in by_kind(parameters) {
            let flat = FlatParameters::new(&self.group, &name, parameters, is_trained);
            let flat = flat.map_err(|error| Error::fully_shard(&self.group, error));
            let mut flat = agree(&self.group, flat)?;
            flat.take_over(self.units.group())?;
            flat.free().map_err(|error| Error::fully_shard(&self.group, error))?;
            flats.push(flat);
        }
        Ok(Some(self.units.add(&name, reshard_after_forward, is_root, flats)))
    }

    /// Returns the trainable variables from a place on that no module has, by name.
    fn new_parameters(&self, start: usize) -> Vec<(String, Tensor)> {
        let mut taken = self.taken.borrow().clone();
        let variables = self.variables();
        let names = names(&variables);
        let mut parameters = Vec::new();
        for variable in &variables.trainable_variables[start..] {
            let identity = identity(&variable.tensor);
            if taken.insert(identity) {
                let name = names.get(&identity).map_or("a parameter", |name| name.as_str());
                parameters.push((name.to_owned(), variable.tensor.shallow_clone()));
            }
        }
        parameters
    }

    fn variables(&self) -> MutexGuard<'_, Variables> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Parts parameters by kind, and by whether they require gradients.
fn by_kind(parameters: Vec<(String, Tensor)>) -> Vec<(bool, Vec<(String, Tensor)>)> {
    let mut kinds: Vec<(Kind, bool)> = Vec::new();
    let mut flats: Vec<(bool, Vec<(String, Tensor)>)> = Vec::new();
    for (name, tensor) in parameters {
        let is_trained = tensor.requires_grad();
        let kind = (tensor.kind(), is_trained);
        let place = kinds.iter().position(|&other| other == kind).unwrap_or(kinds.len());
        if place == kinds.len() {
            kinds.push(kind);
            flats.push((is_trained, Vec::new()));
        }
        flats[place].1.push((name, tensor));
    }
    flats
}

/// Returns what is wrong with parameters.
fn check(parameters: &[(String, Tensor)]) -> Result<(), String> {
    for (name, tensor) in parameters {
        if let Some(reason) = flow_autograd::unsendable(tensor) {
            return Err(format!("{name} {reason}"));
        }
        if !can_be_averaged(tensor.kind()) {
            return Err(format!(
                "{name} is {:?}: it must be Float, Double, Half or BFloat16",
                tensor.kind()
            ));
        }
        if tensor.device() != parameters[0].1.device() {
            return Err(format!("{name} and {} are on two devices", parameters[0].0));
        }
    }
    Ok(())
}

/// A model of which each rank keeps a part: what [`FullyShard::wrap`] makes. It derefs to the model.
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
    model: Model<M>,
    group: ProcessGroup,
    store: Arc<Mutex<Variables>>,
    units: Arc<Units>,
}

/// A model with parameters outside of its sharded modules, or without.
enum Model<M> {
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

    /// Waits until the last backward's gradients are averaged.
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

impl fmt::Debug for FullyShard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FullyShard").field("group", &self.group).finish_non_exhaustive()
    }
}

/// Keeps gradients local while it lives: see [`FullySharded::no_sync`].
pub struct Unsynchronized(Arc<Units>);

impl Drop for Unsynchronized {
    fn drop(&mut self) {
        self.0.end_unsynchronized();
    }
}
