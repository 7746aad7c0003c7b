//! Options of an [`Fsdp`], and how a model is wrapped.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use flow_comm::ProcessGroup;
use tch::Device;
use tch::nn::VarStore;

use super::Fsdp;
use super::grad_shards::GradShards;
use super::shared_parameters::SharedParameters;
use crate::builder::DdpBuilder;
use crate::ddp::Ddp;
use crate::error::{Error, Result, job_rank};
use crate::mixed_precision::MixedPrecision;
use crate::model_check::{agree, first_mismatch};
use crate::zero::lines;
use crate::zero::sharded_parameter::sharded_parameters;

impl Fsdp<()> {
    /// Options to choose before wrapping a model, of whatever type.
    pub fn builder(group: &ProcessGroup) -> FsdpBuilder {
        FsdpBuilder { ddp: Ddp::builder(group) }
    }
}

/// Options of an [`Fsdp`]. All ranks choose the same. Those of [`DdpBuilder`] are explained there.
pub struct FsdpBuilder {
    ddp: DdpBuilder,
}

impl fmt::Debug for FsdpBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FsdpBuilder").field("ddp", &self.ddp).finish()
    }
}

impl FsdpBuilder {
    /// Sets the cap of all buckets, in MiB.
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

    /// Wraps a model whose variables are in `vs`: see [`Fsdp::new`].
    pub fn wrap<M>(mut self, model: M, vs: &VarStore) -> Result<Fsdp<M>> {
        if self.ddp.group.world_size() > 1 {
            self.ddp.kept = Some(self.share(vs)?);
        }
        let kept = self.ddp.kept.clone();
        let ddp = self.ddp.wrap(model, vs)?;
        let store = Arc::clone(&vs.variables_);
        Ok(Fsdp { ddp, store, kept, has_optimizer: AtomicBool::new(false) })
    }

    /// Puts the parameters of all ranks into one memory, and makes room for this rank's gradients.
    fn share(&self, vs: &VarStore) -> Result<Arc<GradShards>> {
        let group = &self.ddp.group;
        let rank = job_rank(group);
        let error = |reason: String| Error::Fsdp { rank, reason };
        let parameters = self.fit(vs).and_then(|()| {
            let store = &vs.variables_;
            sharded_parameters(store, group.world_size())
        });
        let described = match &parameters {
            Ok(parameters) => lines(parameters, "Fsdp"),
            Err(reason) => vec![format!("a model that cannot be wrapped: {reason}")],
        };
        if let Some(difference) = first_mismatch(group, &described)? {
            return Err(Error::Mismatch { rank, difference });
        }
        let parameters = parameters.map_err(error)?;
        let shared = SharedParameters::new(group, &parameters)?;
        let shards = GradShards::new(shared, &parameters, group.rank());
        let shards = shards.map_err(|reason| error(reason.to_string()));
        Ok(Arc::new(agree(group, shards)?))
    }

    /// Returns what is wrong with the ranks or the device.
    fn fit(&self, vs: &VarStore) -> Result<(), String> {
        let group = &self.ddp.group;
        if group.local_world_size() != group.world_size() {
            return Err(format!(
                "{} of the {} ranks are on this machine: all must be on one; use Ddp and a \
                 ZeroRedundancyOptimizer between machines",
                group.local_world_size(),
                group.world_size()
            ));
        }
        if vs.device() != Device::Cpu {
            return Err(format!(
                "the model is on {:?}: it must be on the CPU; use Ddp and a ZeroRedundancyOptimizer on \
                 GPUs",
                vs.device()
            ));
        }
        Ok(())
    }
}
