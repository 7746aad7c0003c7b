//! ZeRO, stage 1 (Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter
//! Models, 2020): ranks that have the same parameters share the state of the optimizer.

use std::collections::{HashMap, HashSet};
use std::sync::PoisonError;

use flow_autograd::identity;
use flow_comm::{ProcessGroup, ReduceOp};
use flow_ddp::checkpoint::Result as CheckpointResult;
use flow_ddp::{ScaledOptimizer, is_fully_sharded};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tch::nn::{Optimizer, OptimizerConfig, VarStore};
use tch::{Kind, Tensor};

use crate::checkpoint::{ShardedCheckpoint, ShardedCheckpoints};
use crate::clip::clip_grad_norm;
use crate::deferred::Deferred;
use crate::error::{Error, Result};
use crate::handle::{local_of, spec_of, wrap};
use crate::sbp::{B, NdSbp, S, Sbp};
use crate::shared_parameters::{SharedParameters, fail};
use crate::spec::Spec;
use crate::tensor::GlobalTensor;

/// An optimizer whose state is split over an axis of the parameters' placement. Each rank there
/// keeps a part of each parameter, its shard. It changes that only, and gives it to the others.
/// PyTorch's word is `ZeroRedundancyOptimizer`.
///
/// Gradients of parameters that are B stay partial in backward, also over several backwards, and
/// are reduce-scattered once, in [`step`](Self::step). Weights are those that the optimizer alone
/// would make, bit for bit where sums have the same order: one backward a step, without clipping.
///
/// A shard is split by the largest dimension that no other axis of several ranks splits and that has an
/// element for each rank. A parameter without one stays whole. Shards of `bf16` and `f16` parameters are `f32`:
/// the optimizer works in full precision, and the parameters are rounded from that. Train in `f16`
/// with a [`GradScaler`](crate::GradScaler), which takes this optimizer as others.
///
/// What else changes the parameters, as `VarStore::load` does, changes the shards at the next step.
///
/// ```
/// use flow_global::{self as global, Placement, ShardedOptimizer, B, S};
/// use flow_tensor::{ProcessGroup, TensorCollectives};
/// use tch::{nn, nn::Module, Kind};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let group = ProcessGroup::from_env()?;
/// let placement = Placement::all(&group)?;
/// let vs = nn::VarStore::new(group.device());
/// let layer = nn::linear(vs.root(), 5, 8, Default::default());
/// global::distribute(&vs, &placement, |_, _| [B])?;
/// let mut optimizer = ShardedOptimizer::new(&vs, 0, nn::Adam::default(), 1e-3)?;
/// let x = global::randn([4, 5], Kind::Float, &placement, [S(0)])?;
/// layer.forward(&x).sum(Kind::Float).backward();
/// let norm = optimizer.clip_grad_norm(1.0, true)?;
/// optimizer.step()?;
/// # assert!(norm > 0.0);
/// # Ok(()) }
/// ```
pub struct ShardedOptimizer {
    /// The parameters, which modules compute with, and the shards, which the optimizer changes.
    pairs: Vec<(Tensor, Tensor)>,
    shared: SharedParameters,
    /// The group of all ranks, if there are ranks that some parameter is not on.
    world: Option<ProcessGroup>,
    /// The shards, and what else the model's store has, by the model's names.
    shards: VarStore,
    optimizer: Optimizer,
    _deferred: Deferred,
}

impl ShardedOptimizer {
    /// Makes an optimizer of the trainable variables of `vs`, which are global, as they are now.
    /// Its state is split over this axis of their placements.
    ///
    /// # Errors
    /// A variable is plain, or its placement has no such axis.
    pub fn new(
        vs: &VarStore,
        axis: usize,
        config: impl OptimizerConfig,
        learning_rate: f64,
    ) -> Result<Self> {
        let parameters = trained(vs);
        let shared = parameters.iter().filter_map(local_of).any(|local| is_fully_sharded(&local));
        if shared {
            return Err(fail(
                "the ranks of a machine have parameters in common, which an optimizer of \
                 ShardedOptimizer::fully_sharded has left so: each would change them; make that one anew"
                    .to_owned(),
            ));
        }
        Self::with(vs, &parameters, axis, SharedParameters::default(), (config, learning_rate))
    }

    /// Makes an optimizer as [`new`](Self::new) does, and puts the parameters into memory that the
    /// ranks of a machine along the axis have in common: PyTorch's FSDP, where nothing is gathered
    /// within a machine. Each machine has all parameters, as in its hybrid sharding (HSDP). All ranks
    /// call this, and [`step`](Self::step).
    ///
    /// Weights have the bits that they have with [`new`](Self::new). A parameter whose shard is not
    /// split stays as it is. Where a shard is contiguous in a parameter of its own kind, it is that
    /// part of the parameter, and takes no memory.
    ///
    /// A change of a parameter would be one for all ranks. So one that autograd counts, as it does but for
    /// those by way of `data()`, is an error of the next step. Parameters stay in common once the
    /// optimizer is dropped.
    ///
    /// # Errors
    /// Those of [`new`](Self::new); a parameter on a GPU; no shared memory for the parameters.
    pub fn fully_sharded(
        vs: &VarStore,
        axis: usize,
        config: impl OptimizerConfig,
        learning_rate: f64,
    ) -> Result<Self> {
        let parameters = trained(vs);
        let mut sbps = Vec::new();
        for parameter in &parameters {
            sbps.push(sharded(parameter, axis)?);
        }
        let shared = SharedParameters::new(&parameters, &sbps, axis)?;
        Self::with(vs, &parameters, axis, shared, (config, learning_rate))
    }

    /// Makes an optimizer of these parameters, some of which ranks have in common.
    fn with(
        vs: &VarStore,
        parameters: &[Tensor],
        axis: usize,
        shared: SharedParameters,
        (config, learning_rate): (impl OptimizerConfig, f64),
    ) -> Result<Self> {
        let mut pairs = Vec::new();
        for parameter in parameters {
            let shard = shard(parameter, axis, shared.part(parameter))?;
            pairs.push((parameter.shallow_clone(), shard));
        }
        let shards = with_shards(vs, &pairs);
        let optimizer = config.build(&shards, learning_rate)?;
        let deferred = Deferred::new(parameters)?;
        let world = world(parameters)?;
        Ok(Self { world, pairs, shared, shards, optimizer, _deferred: deferred })
    }

    /// Returns the shards as variables, by the names of the model's. Of several names the first in
    /// alphabetical order. Change the model's variables instead.
    pub fn shards(&self) -> &VarStore {
        &self.shards
    }

    /// Sets the learning rate of all parameters.
    pub fn set_lr(&mut self, learning_rate: f64) {
        self.optimizer.set_lr(learning_rate);
    }

    /// Drops the gradients: [`step`](Self::step) has done so already.
    ///
    /// # Errors
    /// Of `libtorch`.
    pub fn zero_grad(&mut self) -> Result<()> {
        for (parameter, shard) in &self.pairs {
            flow_autograd::set_grad(parameter, None)?;
            flow_autograd::set_grad(shard, None)?;
        }
        Ok(())
    }

    /// Clips the gradients, as [`clip_grad_norm`](crate::clip_grad_norm) of order 2 does, and
    /// returns the norm before: that of all ranks' parameters, also of those on other placements.
    /// Nothing is reduced twice: the gradients go to the shards first.
    ///
    /// # Errors
    /// The norm is infinite or not a number and `error_if_nonfinite` is set, or a collective fails.
    /// The gradients are dropped then. With a [`GradScaler`](crate::GradScaler), which skips such a
    /// step, leave it unset.
    pub fn clip_grad_norm(&mut self, max_norm: f64, error_if_nonfinite: bool) -> Result<f64> {
        self.reduce_gradients()?;
        let variables = self.shards.trainable_variables();
        let norm = clip_grad_norm(&variables, max_norm, 2.0, error_if_nonfinite);
        if norm.is_err() {
            self.zero_grad()?;
        }
        norm
    }

    /// Reduce-scatters the gradients, has the optimizer change the shards, and gathers the
    /// parameters of them. The parameters then have no gradients.
    ///
    /// # Errors
    /// A collective fails.
    pub fn step(&mut self) -> Result<()> {
        self.reduce_gradients()?;
        self.renew_shards()?;
        self.shared.begin_writes()?;
        self.optimizer.step();
        self.zero_grad()?;
        self.gather_parameters()
    }

    /// Saves the shards and the optimizer's state as a checkpoint of the model, in the shards'
    /// precision: see [`ShardedCheckpoints::save`].
    ///
    /// # Errors
    /// As of [`ShardedCheckpoints::save`].
    pub fn save<T: Serialize + DeserializeOwned>(
        &self,
        checkpoints: &mut ShardedCheckpoints,
        step: usize,
        state: &T,
    ) -> CheckpointResult<()> {
        self.renew_shards()?;
        checkpoints.save(step, &self.shards, Some(&self.optimizer), state)
    }

    /// Saves as [`save`](Self::save) does, beside the training: see [`ShardedCheckpoints::async_save`].
    ///
    /// # Errors
    /// As of [`ShardedCheckpoints::async_save`].
    pub fn async_save<T: Serialize + DeserializeOwned>(
        &self,
        checkpoints: &mut ShardedCheckpoints,
        step: usize,
        state: &T,
    ) -> CheckpointResult<()> {
        self.renew_shards()?;
        checkpoints.async_save(step, &self.shards, Some(&self.optimizer), state)
    }

    /// Goes on from a checkpoint, which any layout may have saved, with this optimizer or without
    /// shards: see [`ShardedCheckpoint::resume`].
    ///
    /// # Errors
    /// As of [`ShardedCheckpoint::resume`].
    pub fn resume<T>(&mut self, checkpoint: &ShardedCheckpoint<T>) -> CheckpointResult<()> {
        self.shared.begin_writes()?;
        checkpoint.resume(&self.shards, Some(&mut self.optimizer))?;
        Ok(self.gather_parameters()?)
    }

    /// Moves the gradients of the parameters to the shards.
    fn reduce_gradients(&self) -> Result<()> {
        let is_trained = self.is_trained()?;
        tch::no_grad(|| {
            for ((parameter, shard), is_trained) in self.pairs.iter().zip(is_trained) {
                let gradient = parameter.grad();
                let reduced = shard.grad();
                if gradient.defined() {
                    let gradient = gradient.f_to_kind(shard.kind())?.to_sbp(shard.sbp()?)?;
                    flow_autograd::set_grad(parameter, None)?;
                    let sum = if reduced.defined() { reduced.f_add(&gradient)? } else { gradient };
                    flow_autograd::set_grad(shard, Some(&sum))?;
                } else if !reduced.defined() && is_trained {
                    // All ranks have the same state, for checkpoints: here without elements.
                    flow_autograd::set_grad(shard, Some(&shard.detach().f_zeros_like()?))?;
                }
            }
            Ok(())
        })
    }

    /// Returns whether a rank has a gradient, for each parameter.
    fn is_trained(&self) -> Result<Vec<bool>> {
        let mut trained = Vec::new();
        for (parameter, shard) in &self.pairs {
            trained.push(i64::from(parameter.grad().defined() || shard.grad().defined()));
        }
        if let Some(world) = &self.world {
            world.all_reduce(&mut trained, ReduceOp::Max)?;
        }
        Ok(trained.into_iter().map(|trained| trained > 0).collect())
    }

    /// Makes the shards of the parameters, where these are not what they were made of the shards.
    fn renew_shards(&self) -> Result<()> {
        tch::no_grad(|| {
            for (parameter, shard) in &self.pairs {
                let part = parameter.detach().to_sbp(shard.sbp()?)?;
                if self.shared.is_own_part(parameter, shard) {
                    continue;
                }
                let (Some(part), Some(mut shard)) = (local_of(&part), local_of(shard)) else {
                    continue;
                };
                if part.kind() == shard.kind() {
                    shard.f_copy_(&part)?;
                } else {
                    let is_same = shard.f_to_kind(part.kind())?.f_eq_tensor(&part)?;
                    let renewed = shard.f_where_self(&is_same, &part.f_to_kind(shard.kind())?)?;
                    shard.f_copy_(&renewed)?;
                }
            }
            Ok(())
        })
    }

    /// Makes the parameters of the shards.
    fn gather_parameters(&mut self) -> Result<()> {
        tch::no_grad(|| {
            for (parameter, shard) in &mut self.pairs {
                if !self.shared.write(parameter, shard)? {
                    let whole = shard.f_to_kind(parameter.kind())?.to_sbp(parameter.sbp()?)?;
                    parameter.f_copy_(&whole)?;
                }
            }
            self.shared.end_writes()
        })
    }
}

impl ScaledOptimizer for ShardedOptimizer {
    type Error = Error;

    fn variables_to_step(&self) -> Result<Vec<Tensor>> {
        self.reduce_gradients()?;
        Ok(self.shards.trainable_variables())
    }

    fn take_step(&mut self) -> Result<()> {
        self.step()
    }

    /// Drops the gradients, as the step does.
    fn skip_step(&mut self) -> Result<()> {
        self.zero_grad()
    }
}

/// Returns the group of all ranks, if one of these is not on all of them.
fn world(parameters: &[Tensor]) -> Result<Option<ProcessGroup>> {
    for parameter in parameters {
        let placement = parameter.placement()?;
        let world = placement.runtime()?.world();
        if placement.ranks().len() < world.world_size() {
            return Ok(Some(world.clone()));
        }
    }
    Ok(None)
}

/// Returns the parameters that are trained, each once if it has several names.
fn trained(vs: &VarStore) -> Vec<Tensor> {
    let mut seen = HashSet::new();
    let parameters = vs.trainable_variables().into_iter();
    parameters.filter(|parameter| seen.insert(identity(parameter))).collect()
}

/// Returns a parameter's shard on this axis: a leaf of its own. `part` is the shard's place in a
/// parameter that ranks have in common.
fn shard(parameter: &Tensor, axis: usize, part: Option<&Tensor>) -> Result<Tensor> {
    let sbp = sharded(parameter, axis)?;
    let kind = match parameter.kind() {
        Kind::Half | Kind::BFloat16 => Kind::Float,
        kind => kind,
    };
    tch::no_grad(|| {
        if let Some(part) = part.filter(|part| part.kind() == kind && part.is_contiguous()) {
            let spec = Spec::of(spec_of(parameter)?.placement(), &sbp)?;
            let shard = wrap(Some(part), parameter, spec, &parameter.size())?;
            return Ok(shard.set_requires_grad(true));
        }
        let part = parameter.detach().to_sbp(sbp)?;
        // Memory of its own, where nothing was moved or converted.
        Ok(part.f_to_kind(kind)?.copy().set_requires_grad(true))
    })
}

/// Returns the SBP of the shard of a parameter on this axis.
fn sharded(parameter: &Tensor, axis: usize) -> Result<NdSbp> {
    let spec = spec_of(parameter)?;
    let mut sbp = spec.sbp().to_vec();
    if axis >= sbp.len() {
        let placement = spec.placement();
        return Err(fail(format!(
            "the placement {placement} of a variable has no axis {axis}; axes count from 0"
        )));
    }
    let shape = spec.placement().shape();
    let ranks = shape[axis] as i64;
    // Of dimensions as large as each other the first.
    let sizes = parameter.size();
    let dims = sizes.iter().enumerate().rev();
    let free = dims.filter(|&(dim, &size)| size >= ranks && !is_split(&sbp, shape, dim));
    let largest = free.max_by_key(|&(_, size)| size).map(|(dim, _)| S(dim));
    if sbp[axis] == B
        && let Some(split) = largest
    {
        sbp[axis] = split;
    }
    Ok(sbp)
}

/// Returns whether ranks of a placement of this shape split a dimension.
fn is_split(sbp: &[Sbp], shape: &[usize], dim: usize) -> bool {
    sbp.iter().zip(shape).any(|(&sbp, &ranks)| sbp == S(dim) && ranks > 1)
}

/// Returns a store like `vs`, with the shards instead of the parameters.
fn with_shards(vs: &VarStore, pairs: &[(Tensor, Tensor)]) -> VarStore {
    let variables = vs.variables_.lock().unwrap_or_else(PoisonError::into_inner);
    let mut named: Vec<_> = variables.named_variables.iter().collect();
    named.sort_by_key(|&(name, _)| std::cmp::Reverse(name));
    // Of several names the last one inserted.
    let names: HashMap<usize, &String> =
        named.iter().map(|(name, tensor)| (identity(tensor), *name)).collect();
    let of: HashMap<usize, &Tensor> = pairs.iter().map(|(one, of)| (identity(one), of)).collect();
    let shards = VarStore::new(vs.device());
    let mut trained = HashSet::new();
    for variable in &variables.trainable_variables {
        let parameter = identity(&variable.tensor);
        if let Some(&name) = names.get(&parameter)
            && let Some(shard) = of.get(&parameter)
            && trained.insert(name)
        {
            add(&shards, name, variable.group, shard, true);
        }
    }
    for (name, tensor) in named {
        if !trained.contains(name) {
            add(&shards, name, 0, tensor, false);
        }
    }
    drop(variables);
    shards
}

/// Adds a variable by its whole name, `layer.weight`.
fn add(vs: &VarStore, name: &str, group: usize, tensor: &Tensor, trainable: bool) {
    let mut parts: Vec<&str> = name.split('.').collect();
    let last = parts.pop().unwrap_or_default();
    let path = parts.into_iter().fold(vs.root(), |path, part| path / part);
    let _ = path.set_group(group).add(last, tensor.shallow_clone(), trainable);
}
