//! Options of an [`Fsdp`], and how a model is wrapped.

use std::collections::HashSet;
use std::fmt;
use std::sync::{Arc, Mutex};

use flow_autograd::data_ptr;
use flow_comm::ProcessGroup;
use tch::Device;
use tch::nn::{OptimizerConfig, VarStore, Variables};

use super::Fsdp;
use super::grad_shards::GradShards;
use super::ignored::Ignored;
use super::plan::{BUCKET_CAPS, MemoryPlan, PlanError, check_wrapping};
use super::shared_parameters::{SharedParameters, bytes_of};
use crate::builder::DdpBuilder;
use crate::ddp::Ddp;
use crate::error::{Error, Result};
use crate::mixed_precision::MixedPrecision;
use crate::model_check::agree;
use crate::optimizer_choice::OptimizerChoice;
use crate::zero::sharded_parameter::{ShardedParameter, sharded_parameters};

impl Fsdp<()> {
    /// Options to choose before wrapping a model, of whatever type.
    pub fn builder(group: &ProcessGroup) -> FsdpBuilder {
        let ddp = Ddp::builder(group).bucket_cap_mb_list(&BUCKET_CAPS);
        FsdpBuilder { ddp, ignored: Vec::new() }
    }

    /// Returns the memory that `ranks` ranks of a machine need to train the variables of `vs`, which
    /// nothing has wrapped yet.
    ///
    /// ```
    /// use flow_ddp::Fsdp;
    /// use tch::nn::{self, OptimizerConfig};
    ///
    /// let vs = nn::VarStore::new(tch::Device::Cpu);
    /// let config = nn::LinearConfig { bias: false, ..Default::default() };
    /// let net = nn::linear(vs.root(), 1000, 250, config);
    /// let plan = Fsdp::plan(&vs, nn::Adam::default(), 8)?;
    /// assert_eq!(plan.parameters, 1_000_000);
    /// assert_eq!(plan.optimizer, 2_000_000);
    /// # Ok::<(), flow_ddp::PlanError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The optimizer cannot be made, or is none of tch's.
    pub fn plan(
        vs: &VarStore,
        config: impl OptimizerConfig + Send + 'static,
        ranks: usize,
    ) -> Result<MemoryPlan, PlanError> {
        MemoryPlan::new(&vs.variables_, &OptimizerChoice::new(config, 1e-3), ranks)
    }
}

/// Options of an [`Fsdp`]. All ranks choose the same. Those of [`DdpBuilder`] are explained there.
pub struct FsdpBuilder {
    ddp: DdpBuilder,
    /// Names of the parameters that are left to each rank.
    ignored: Vec<String>,
}

impl fmt::Debug for FsdpBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FsdpBuilder")
            .field("ddp", &self.ddp)
            .field("ignored_parameters", &self.ignored)
            .finish()
    }
}

impl FsdpBuilder {
    /// Sets the cap of all buckets, in MiB (default: 1 for the first, 4 for the others). Each rank has the
    /// whole gradients of one or two buckets in memory.
    pub fn bucket_cap_mb(mut self, cap: f64) -> Self {
        self.ddp = self.ddp.bucket_cap_mb(cap);
        self
    }

    /// Sets whether ranks take over rank 0's buffers: see [`DdpBuilder::broadcast_buffers`].
    pub fn broadcast_buffers(mut self, broadcast: bool) -> Self {
        self.ddp = self.ddp.broadcast_buffers(broadcast);
        self
    }

    /// Sets whether a backward may leave parameters out: see [`DdpBuilder::find_unused_parameters`]. One
    /// that no rank used gets no gradient, and no step.
    pub fn find_unused_parameters(mut self, find: bool) -> Self {
        self.ddp = self.ddp.find_unused_parameters(find);
        self
    }

    /// Sets whether each backward has the same graph: see [`DdpBuilder::static_graph`].
    pub fn static_graph(mut self, is_static: bool) -> Self {
        self.ddp = self.ddp.static_graph(is_static);
        self
    }

    /// Sets whether sparse gradients become dense: see [`DdpBuilder::sparse_as_dense`].
    pub fn sparse_as_dense(mut self, as_dense: bool) -> Self {
        self.ddp = self.ddp.sparse_as_dense(as_dense);
        self
    }

    /// Has forward and backward compute in half precision: see [`DdpBuilder::mixed_precision`]. The
    /// parameters in half precision exist once for each machine, too.
    pub fn mixed_precision(mut self, mixed_precision: MixedPrecision) -> Self {
        self.ddp = self.ddp.mixed_precision(mixed_precision);
        self
    }

    /// Leaves these parameters, and those of earlier calls, to each rank: PyTorch's `ignored_params`. Each rank begins with its own values
    /// of them, and backward leaves its own gradients in `.grad`. The optimizer of [`Fsdp::optimizer`] neither
    /// steps nor clips them, nor drops their gradients. Another optimizer of these parameters alone does:
    ///
    /// ```no_run
    /// # fn main() -> anyhow::Result<()> {
    /// use flow_ddp::{Fsdp, ProcessGroup, TensorCollectives};
    /// use tch::nn::{self, ModuleT, OptimizerConfig};
    ///
    /// let group = ProcessGroup::from_env()?;
    /// let vs = nn::VarStore::new(group.device());
    /// let net = nn::seq_t()
    ///     .add(nn::linear(vs.root() / "common", 784, 100, Default::default()))
    ///     .add(nn::linear(vs.root() / "own", 100, 10, Default::default()));
    /// let builder = Fsdp::builder(&group).ignored_parameters(&["own.weight", "own.bias"]);
    /// let model = builder.wrap(net, &vs)?;
    /// let optimizer = model.optimizer(nn::Adam::default(), 1e-3)?;
    /// let mut own_optimizer = nn::Sgd::default().build_copt(0.1)?;
    /// for name in ["own.weight", "own.bias"] {
    ///     own_optimizer.add_parameters(&vs.variables()[name], 0)?;
    /// }
    /// # let (images, labels) = (tch::Tensor::new(), tch::Tensor::new());
    /// let loss = model.forward_t(&images, true).cross_entropy_for_logits(&labels);
    /// model.zero_grad()?;
    /// loss.f_backward()?;
    /// optimizer.step()?;
    /// own_optimizer.step()?;
    /// # Ok(()) }
    /// ```
    ///
    /// - A parameter of several names is ignored if one of them is given.
    /// - Each backward must reach a parameter that is not ignored. The other ranks wait for that.
    /// - In mixed precision, ignored parameters keep their kind in forward.
    /// - With several ranks an optimizer of the whole `VarStore` finds the gradients of ignored parameters
    ///   only. With one rank it finds all, and would step the others twice.
    /// - [`Checkpoints`](crate::Checkpoints) keep one value of each parameter. If ranks have other values in an
    ///   ignored one, saving is an error: what is each rank's own belongs into another `VarStore`, which the
    ///   `Fsdp` leaves alone, too.
    pub fn ignored_parameters(mut self, names: &[&str]) -> Self {
        self.ignored.extend(names.iter().map(|&name| name.into()));
        self
    }

    /// Returns the memory of a training with these options and default buckets: see [`Fsdp::plan`].
    ///
    /// # Errors
    ///
    /// Those of [`Fsdp::plan`]; an ignored parameter that is none of the model's.
    pub fn plan(
        &self,
        vs: &VarStore,
        config: impl OptimizerConfig + Send + 'static,
        ranks: usize,
    ) -> Result<MemoryPlan, PlanError> {
        let mut choice = OptimizerChoice::new(config, 1e-3);
        let ignored = Ignored::of(&self.ignored, &vs.variables_);
        ignored.check().map_err(PlanError)?;
        choice.ignored = ignored.identities();
        MemoryPlan::new(&vs.variables_, &choice, ranks)
    }

    /// Wraps a model whose variables are in `vs`: see [`Fsdp::new`].
    pub fn wrap<M>(mut self, model: M, vs: &VarStore) -> Result<Fsdp<M>> {
        let store = Arc::clone(&vs.variables_);
        self.ddp.sharded = Some(Arc::clone(&store));
        self.ddp.ignored = Ignored::of(&self.ignored, &store);
        Ok(Fsdp { ddp: self.ddp.wrap(model, vs)?, store })
    }
}

/// Puts the parameters of a machine's ranks into one memory, and makes room for this rank's gradients. All
/// ranks call this, of whose models [`check`] has found nothing wrong.
pub(crate) fn share(
    group: &ProcessGroup,
    store: &Mutex<Variables>,
    ignored: &HashSet<usize>,
) -> Result<Arc<GradShards>> {
    let parameters = sharded_parameters(store, ignored, group.local_world_size());
    let parameters = agree(group, parameters.map_err(|reason| Error::fsdp(group, reason)))?;
    check_wrapping(group, store, ignored)?;
    let shared = SharedParameters::new(group, &parameters)?;
    let shards = shared.spread().and_then(|()| {
        let shards = GradShards::new(Arc::clone(&shared), &parameters, group.local_index());
        shards.map_err(|error| Error::fsdp(group, error.to_string()))
    });
    Ok(Arc::new(agree(group, shards).inspect_err(|_| shared.unshare())?))
}

/// Returns what is wrong with the device, or the parameters.
pub(crate) fn check(store: &Mutex<Variables>, ignored: &Ignored) -> Result<(), String> {
    let parameters = sharded_parameters(store, &ignored.identities(), 1)?;
    if let Some(parameter) = parameters.iter().find(|each| each.tensor.device() != Device::Cpu) {
        return Err(format!(
            "Fsdp: {} is on {:?}, and must be on the CPU: use Ddp and a ZeroRedundancyOptimizer on GPUs",
            parameter.name,
            parameter.tensor.device()
        ));
    }
    let mut by_address: Vec<&ShardedParameter> = parameters.iter().collect();
    by_address.retain(|parameter| parameter.tensor.numel() > 0);
    by_address.sort_by_key(|parameter| parameter.address);
    for pair in by_address.windows(2) {
        if pair[0].address + bytes_of(&pair[0].tensor) > pair[1].address {
            return Err(format!(
                "Fsdp: {} and {} lie in the same memory, and would not any more: make one of them a \
                 shallow_clone of the other",
                pair[0].name, pair[1].name
            ));
        }
    }
    for (name, tensor) in &ignored.parameters {
        let start = data_ptr(tensor).addr();
        let end = start + bytes_of(tensor);
        let common = by_address.iter().find(|parameter| {
            let address = parameter.address;
            address < end && start < address + bytes_of(&parameter.tensor)
        });
        if let Some(common) = common {
            return Err(format!(
                "Fsdp: the ignored {name} lies in the memory of {}, and would not any more: ignore both, or \
                 none",
                common.name
            ));
        }
    }
    Ok(())
}
