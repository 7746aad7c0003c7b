//! ZeRO, stage 1 (Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter
//! Models, 2020): ranks that have the same parameters share the state of the optimizer.

use std::collections::{HashMap, HashSet};
use std::sync::PoisonError;

use flow_autograd::identity;
use flow_ddp::checkpoint::Result as CheckpointResult;
use serde::de::DeserializeOwned;
use serde::Serialize;
use tch::nn::{Optimizer, OptimizerConfig, VarStore};
use tch::{Kind, Tensor};

use crate::checkpoint::{Checkpoint, Checkpoints};
use crate::clip::clip_grad_norm;
use crate::deferred::Deferred;
use crate::error::{Error, Result};
use crate::handle::spec_of;
use crate::sbp::{NdSbp, B, S};
use crate::spec::Spec;
use crate::tensor::GlobalTensor;

/// An optimizer whose state is split over an axis of the parameters' placement: each rank there
/// keeps a part of each parameter, its shard, changes that only, and gives it to the others.
/// PyTorch's word is `ZeroRedundancyOptimizer`.
///
/// Gradients of parameters that are B stay partial in backward, also over several backwards, and
/// are reduce-scattered once, in [`step`](Self::step). Weights are those that the optimizer alone
/// would make, bit for bit where sums have the same order: one backward a step, without clipping.
///
/// A shard is split by the first dimension that no other axis splits; a parameter without one stays
/// whole. Shards of parameters in half precision are `f32`: the optimizer works in full precision,
/// and the parameters are rounded from that.
///
/// ```
/// use flow_global::{self as global, Placement, ZeroRedundancyOptimizer, B, S};
/// use flow_tensor::{ProcessGroup, TensorCollectives};
/// use tch::{nn, nn::Module, Kind};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let group = ProcessGroup::from_env()?;
/// let placement = Placement::all(&group)?;
/// let vs = nn::VarStore::new(group.device());
/// let layer = nn::linear(vs.root(), 5, 8, Default::default());
/// global::distribute(&vs, &placement, |_, _| [B])?;
/// let mut optimizer = ZeroRedundancyOptimizer::new(&vs, 0, nn::Adam::default(), 1e-3)?;
/// let x = global::randn([4, 5], Kind::Float, &placement, [S(0)])?;
/// layer.forward(&x).sum(Kind::Float).backward();
/// let norm = optimizer.clip_grad_norm(1.0)?;
/// optimizer.step()?;
/// # assert!(norm > 0.0);
/// # Ok(()) }
/// ```
pub struct ZeroRedundancyOptimizer {
    /// What modules compute with, and what the optimizer changes.
    pairs: Vec<(Tensor, Tensor)>,
    /// The shards, and what else the model's store has, by the model's names.
    shards: VarStore,
    optimizer: Optimizer,
    _deferred: Deferred,
}

impl ZeroRedundancyOptimizer {
    /// An optimizer of the trainable variables of `vs`, which are global, as they are now. Its state
    /// is split over this axis of their placements.
    ///
    /// # Errors
    /// A variable is plain, or its placement has no such axis.
    pub fn new(
        vs: &VarStore,
        axis: usize,
        config: impl OptimizerConfig,
        learning_rate: f64,
    ) -> Result<Self> {
        let parameters = vs.trainable_variables();
        let sharded = |parameter: &Tensor| Ok((parameter.shallow_clone(), shard(parameter, axis)?));
        let pairs: Vec<_> = parameters.iter().map(sharded).collect::<Result<_>>()?;
        let shards = with_shards(vs, &pairs);
        let optimizer = config.build(&shards, learning_rate)?;
        Ok(Self { pairs, shards, optimizer, _deferred: Deferred::new(&parameters)? })
    }

    /// The shards as variables, by the names of the model's.
    pub fn shards(&self) -> &VarStore {
        &self.shards
    }

    /// The optimizer of the shards.
    pub fn optimizer(&mut self) -> &mut Optimizer {
        &mut self.optimizer
    }

    /// Clips the gradients, as [`clip_grad_norm`](crate::clip_grad_norm) of order 2 does, and
    /// returns the norm before: that of all ranks' parameters, also of those on other placements.
    /// Nothing is reduced twice: the gradients go to the shards first.
    ///
    /// # Errors
    /// The norm is infinite or not a number, or a collective fails.
    pub fn clip_grad_norm(&mut self, max_norm: f64) -> Result<f64> {
        self.reduce_gradients()?;
        clip_grad_norm(&self.shards.trainable_variables(), max_norm, 2.0, true)
    }

    /// Reduce-scatters the gradients, has the optimizer change the shards, and gathers the
    /// parameters of them. The parameters then have no gradients.
    ///
    /// # Errors
    /// A collective fails.
    pub fn step(&mut self) -> Result<()> {
        self.reduce_gradients()?;
        self.optimizer.step();
        for (_, shard) in &self.pairs {
            flow_autograd::set_grad(shard, None)?;
        }
        self.gather_parameters()
    }

    /// Saves the shards and the optimizer's state as a checkpoint of the model, in the shards'
    /// precision: see [`Checkpoints::save`].
    ///
    /// # Errors
    /// As of [`Checkpoints::save`].
    pub fn save<T: Serialize + DeserializeOwned>(
        &self,
        checkpoints: &mut Checkpoints,
        step: usize,
        state: &T,
    ) -> CheckpointResult<()> {
        checkpoints.save(step, &self.shards, Some(&self.optimizer), state)
    }

    /// Goes on from a checkpoint, which any layout may have saved, with this optimizer or without
    /// shards: see [`Checkpoint::resume`].
    ///
    /// # Errors
    /// As of [`Checkpoint::resume`].
    pub fn resume<T>(&mut self, checkpoint: &Checkpoint<T>) -> CheckpointResult<()> {
        checkpoint.resume(&self.shards, Some(&mut self.optimizer))?;
        Ok(self.gather_parameters()?)
    }

    /// Moves the gradients of the parameters to the shards.
    fn reduce_gradients(&mut self) -> Result<()> {
        tch::no_grad(|| {
            for (parameter, shard) in &self.pairs {
                let (gradient, reduced) = (parameter.grad(), shard.grad());
                if gradient.defined() {
                    let gradient = gradient.f_to_kind(shard.kind())?.to_sbp(shard.sbp()?)?;
                    flow_autograd::set_grad(parameter, None)?;
                    let sum = match reduced.defined() {
                        true => reduced.f_add(&gradient)?,
                        false => gradient,
                    };
                    flow_autograd::set_grad(shard, Some(&sum))?;
                } else if !reduced.defined() && is_elsewhere(parameter)? {
                    // All ranks have the same state, for checkpoints: here without elements.
                    flow_autograd::set_grad(shard, Some(&shard.detach().f_zeros_like()?))?;
                }
            }
            Ok(())
        })
    }

    /// Makes the parameters of the shards.
    fn gather_parameters(&mut self) -> Result<()> {
        tch::no_grad(|| {
            for (parameter, shard) in &mut self.pairs {
                let whole = shard.f_to_kind(parameter.kind())?.to_sbp(parameter.sbp()?)?;
                parameter.f_copy_(&whole)?;
            }
            Ok(())
        })
    }
}

/// Whether this rank has nothing of the tensor because the placement is without it.
fn is_elsewhere(tensor: &Tensor) -> Result<bool> {
    let placement = tensor.placement()?;
    Ok(placement.position(placement.runtime()?.rank()).is_none())
}

/// A parameter's shard on this axis: a leaf of its own.
fn shard(parameter: &Tensor, axis: usize) -> Result<Tensor> {
    let spec = spec_of(parameter)?;
    if axis >= spec.sbp().len() {
        return Err(Error::Unsupported {
            operation: "ZeroRedundancyOptimizer".to_owned(),
            reason: format!(
                "the placement {} of a variable has no axis {axis}; axes count from 0",
                spec.placement()
            ),
        });
    }
    tch::no_grad(|| {
        let is_half = matches!(parameter.kind(), Kind::Half | Kind::BFloat16);
        let kind = if is_half { Kind::Float } else { parameter.kind() };
        let part = parameter.detach().to_sbp(sharded(&spec, axis, parameter.dim()))?;
        // Memory of its own, where nothing was moved or converted.
        Ok(part.f_to_kind(kind)?.copy().set_requires_grad(true))
    })
}

/// The SBP of the shard of a parameter.
fn sharded(spec: &Spec, axis: usize, dims: usize) -> NdSbp {
    let mut sbp = spec.sbp().to_vec();
    let free = (0..dims).map(S).find(|split| !sbp.contains(split));
    if let (B, Some(split)) = (sbp[axis], free) {
        sbp[axis] = split;
    }
    sbp
}

/// A store like `vs`, with the shards instead of the parameters.
fn with_shards(vs: &VarStore, pairs: &[(Tensor, Tensor)]) -> VarStore {
    let variables = vs.variables_.lock().unwrap_or_else(PoisonError::into_inner);
    let names: HashMap<usize, &String> =
        variables.named_variables.iter().map(|(name, at)| (identity(at), name)).collect();
    let shards = VarStore::new(vs.device());
    let add = |name: &str, group: usize, tensor: &Tensor, trainable: bool| {
        let mut parts: Vec<&str> = name.split('.').collect();
        let last = parts.pop().unwrap_or_default();
        let path = parts.into_iter().fold(shards.root(), |path, part| path / part);
        let _ = path.set_group(group).add(last, tensor.shallow_clone(), trainable);
    };
    let mut trained = HashSet::new();
    for (variable, (parameter, shard)) in variables.trainable_variables.iter().zip(pairs) {
        if let Some(&name) = names.get(&identity(parameter)) {
            trained.insert(name);
            add(name, variable.group, shard, true);
        }
    }
    for (name, tensor) in &variables.named_variables {
        if !trained.contains(name) {
            add(name, 0, tensor, false);
        }
    }
    drop(variables);
    shards
}
