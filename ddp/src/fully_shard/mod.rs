//! Sharding over all ranks, module by module (Zhao et al., PyTorch FSDP: Experiences on Scaling Fully
//! Sharded Data Parallel, 2023).
//!
//! | file | what |
//! |---|---|
//! | `mod.rs` | [`FullyShard`], which makes a model |
//! | `options.rs` | [`ShardOptions`] of a module |
//! | `model.rs` | [`FullySharded`]: the model |
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
mod model;
mod module;
mod options;
pub(crate) mod parts;
mod place;
mod unit;
mod units;

use std::cell::RefCell;
use std::collections::HashSet;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use flow_autograd::identity;
use flow_comm::ProcessGroup;
use tch::nn::{VarStore, Variables};
use tch::{Kind, Tensor};

use self::flat::FlatParameters;
use self::model::Model;
pub use self::model::{FullySharded, Unsynchronized};
pub use self::module::ShardedModule;
pub use self::options::ShardOptions;
use self::unit::Unit;
use self::units::Units;
use crate::buffers::{share_untrained, untrained};
use crate::error::{Error, Result};
use crate::mixed_precision::MixedPrecision;
use crate::model_check::{agree, can_be_averaged, describe, first_mismatch};
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
    options: ShardOptions,
    /// The parameters that modules have, by identity.
    taken: RefCell<HashSet<usize>>,
}

/// Options of a [`FullyShard`]. All ranks choose the same.
#[derive(Debug)]
pub struct FullyShardBuilder {
    group: ProcessGroup,
    options: ShardOptions,
    prefetch: usize,
    replicas: usize,
}

impl FullyShardBuilder {
    /// Sets [`ShardOptions::reshard_after_forward`] of modules that say nothing else.
    pub fn reshard_after_forward(mut self, reshard: bool) -> Self {
        self.options.reshard_after_forward = reshard;
        self
    }

    /// Sets [`ShardOptions::mixed_precision`] of modules that say nothing else, and the type of the model's
    /// buffers.
    pub fn mixed_precision(mut self, mixed_precision: MixedPrecision) -> Self {
        self.options.mixed_precision = mixed_precision;
        self
    }

    /// Sets how often the ranks have the model (default: once): PyTorch's HSDP, a mesh of two axes. With 2
    /// replicas, ranks 0 to 3 of 8 have parts of one, and ranks 4 to 7 of the other. Gradients are averaged
    /// within a replica, and then each part over the replicas. It must be a divisor of the number of ranks.
    pub fn replicas(mut self, replicas: usize) -> Self {
        self.replicas = replicas;
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
    /// Those of [`FullyShard::new`]; a number of replicas that does not fit.
    pub fn begin(self, vs: &VarStore) -> Result<FullyShard> {
        let lines = [format!("options {:?}", (&self.options, self.prefetch, self.replicas))];
        if let Some(difference) = first_mismatch(&self.group, &lines)? {
            let reason = format!("FullyShard differs between ranks: {difference}");
            return Err(Error::fully_shard(&self.group, reason));
        }
        let units = Arc::new(Units::new(&self.group, self.prefetch, self.replicas)?);
        parts::remember(&units);
        Ok(FullyShard {
            units,
            group: self.group,
            store: Arc::clone(&vs.variables_),
            options: self.options,
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
        FullyShardBuilder {
            group: group.clone(),
            options: ShardOptions::default(),
            prefetch: 1,
            replicas: 1,
        }
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
        self.module_with(self.options, make)
    }

    /// Returns the options of modules that say nothing else, those of the builder.
    pub fn options(&self) -> ShardOptions {
        self.options
    }

    /// Shards a module as [`module`](Self::module) does, with options of its own.
    ///
    /// # Errors
    ///
    /// Those of [`FullyShard::module`]; types of a mixed precision that do not fit the module.
    pub fn module_with<M>(
        &self,
        options: ShardOptions,
        make: impl FnOnce() -> M,
    ) -> Result<ShardedModule<M>> {
        let before = self.variables().trainable_variables.len();
        let module = make();
        let parameters = self.new_parameters(before);
        let unit = self.shard(parameters, options, false)?;
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
        let options = ShardOptions { reshard_after_forward: false, ..self.options };
        let root = self.shard(self.new_parameters(0), options, true)?;
        if !self.units.all().iter().any(|unit| unit.lock().flats.iter().any(|flat| flat.is_trained))
        {
            let reason =
                "no variable of the VarStore requires a gradient: there is nothing to train";
            return Err(Error::fully_shard(&self.group, reason));
        }
        share_untrained(&self.group, &self.store)?;
        self.options.mixed_precision.cast_buffers(&mut untrained(&self.store));
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
        options: ShardOptions,
        is_root: bool,
    ) -> Result<Option<Arc<Unit>>> {
        let mut lines = describe(&parameters, &[]);
        lines.push(format!("{options:?}"));
        if let Some(difference) = first_mismatch(&self.group, &lines)? {
            let reason = format!("a module differs between ranks: {difference}");
            return Err(Error::fully_shard(&self.group, reason));
        }
        let checked =
            check(&parameters).and_then(|()| options.mixed_precision.check(&parameters, None));
        agree(&self.group, checked.map_err(|reason| Error::fully_shard(&self.group, reason)))?;
        let Some(name) = parameters.first().map(|(name, _)| name.clone()) else { return Ok(None) };
        self.taken.borrow_mut().extend(parameters.iter().map(|(_, tensor)| identity(tensor)));
        let mut flats = Vec::new();
        for (is_trained, parameters) in by_kind(parameters) {
            let flat = FlatParameters::new(
                self.units.replica(),
                &name,
                parameters,
                is_trained,
                options.mixed_precision,
            );
            let flat = flat.map_err(|error| Error::fully_shard(&self.group, error));
            let mut flat = agree(&self.group, flat)?;
            flat.take_over(self.units.group())?;
            flat.free().map_err(|error| Error::fully_shard(&self.group, error))?;
            flats.push(flat);
        }
        Ok(Some(self.units.add(&name, options, is_root, flats)))
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

impl fmt::Debug for FullyShard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FullyShard").field("group", &self.group).finish_non_exhaustive()
    }
}
