//! How a model is wrapped: checks on all ranks, rank 0's weights, hooks.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use flow_autograd::GradHook;
use flow_comm::ProcessGroup;
use flow_tensor::{ArenaAllocatorGuard, CoalescedBroadcast, cuda_group};
use tch::Tensor;
use tch::nn::{VarStore, Variables};

use crate::bucket::ReducePath;
use crate::bucket::cpu::CpuPath;
use crate::bucket::cuda::CudaPath;
use crate::buffers::{Buffers, HeldBuffer, broadcast_all};
use crate::builder::DdpBuilder;
use crate::comm_hooks::AllReduce;
use crate::ddp::Ddp;
use crate::error::{Error, Result, job_rank};
use crate::fsdp::builder as fsdp;
use crate::fsdp::grad_shards::GradShards;
use crate::fsdp::shared_parameters::is_fully_sharded;
use crate::in_backward::InBackward;
use crate::low_precision::LowPrecision;
use crate::mixed_precision::MixedPrecision;
use crate::model_check::{agree, check, check_hooks, describe, device_kind, first_mismatch};
use crate::optimizer_choice::OptimizerChoice;
use crate::optimizer_in_backward::{self, OptimizerInBackward};
use crate::options::Options;
use crate::parameter::{by_training, numbered};
use crate::reducer::{Reducer, Reduction};
use crate::settings::Settings;
use crate::sync_batchnorm;
use crate::zero::ZeroInBackward;

impl<M> Ddp<M> {
    /// Wraps `model`, whose variables are in `vs`, with the default options of [`DdpBuilder`].
    ///
    /// Errors: models that differ between ranks, no parameter to train, parameters that cannot be
    /// reduced or that another `Ddp` has, failing communication. The error of models that differ
    /// comes on every rank, and names the parameter and both ranks.
    pub fn new(model: M, vs: &VarStore, group: &ProcessGroup) -> Result<Self> {
        Ddp::builder(group).wrap(model, vs)
    }

    /// Wraps a model that keeps no `VarStore`: its parameters by name, in the order of their use in
    /// forward, and its buffers (running statistics). Parameters that do not require gradients are
    /// frozen. Errors are those of [`Ddp::new`].
    pub fn from_tensors(
        model: M,
        parameters: Vec<(String, Tensor)>,
        buffers: Vec<(String, Tensor)>,
        group: &ProcessGroup,
    ) -> Result<Self> {
        Ddp::builder(group).wrap_tensors(model, parameters, buffers)
    }
}

impl DdpBuilder {
    /// Wraps a model whose variables are in `vs`: see [`Ddp::new`].
    pub fn wrap<M>(mut self, model: M, vs: &VarStore) -> Result<Ddp<M>> {
        let variables = vs.variables_.lock().unwrap_or_else(PoisonError::into_inner);
        // Parameters in the order of their creation, which is that of their use in forward as a
        // rule; the map of names has no order of its own.
        let mut named: Vec<(String, Tensor)> = variables
            .named_variables
            .iter()
            .map(|(name, tensor)| (name.clone(), tensor.shallow_clone()))
            .collect();
        let created: Vec<usize> = variables
            .trainable_variables
            .iter()
            .map(|v| flow_autograd::identity(&v.tensor))
            .collect();
        if let Some(optimizer) = &mut self.optimizer {
            let trained = variables.trainable_variables.iter();
            optimizer.groups =
                trained.map(|v| (flow_autograd::identity(&v.tensor), v.group)).collect();
        }
        drop(variables);
        let ignored = self.ignored.identities();
        named.retain(|(_, tensor)| !ignored.contains(&flow_autograd::identity(tensor)));
        named.sort_by_cached_key(|(name, tensor)| {
            (position(&created, tensor).unwrap_or(usize::MAX), name.clone())
        });
        // A parameter stays one when it is frozen; only what was made as not trainable is a buffer.
        let (parameters, buffers) =
            named.into_iter().partition(|(_, tensor)| position(&created, tensor).is_some());
        let mut ddp = self.wrap_tensors(model, parameters, buffers)?;
        let held = &mut ddp.buffers.get_mut().unwrap_or_else(PoisonError::into_inner).held;
        for buffer in held.iter_mut() {
            buffer.others += 1; // the store has one handle, too
        }
        held.retain(HeldBuffer::is_held);
        if let Some(reducer) = &ddp.reducer {
            let store = Arc::clone(&vs.variables_);
            let known = created.len();
            reducer.watch_for(Box::new(move || {
                let store = store.try_lock().ok()?;
                added(&store, known)
            }));
        }
        Ok(ddp)
    }

    /// Wraps a model by its named tensors: see [`Ddp::from_tensors`].
    pub fn wrap_tensors<M>(
        mut self,
        model: M,
        mut parameters: Vec<(String, Tensor)>,
        mut buffers: Vec<(String, Tensor)>,
    ) -> Result<Ddp<M>> {
        let group = self.group.clone();
        let rank = job_rank(&group);
        self.options = self.options.by_first_names(&parameters);
        self.options.communication = self.comm_hook.kind().or(self.mixed_precision.communication());
        let fit = self.check(&parameters, &buffers);
        if group.world_size() == 1 {
            if !self.takes_gradients() {
                fit.map_err(|reason| Error::Model { rank, reason })?;
                return self.wrap_alone(model);
            }
            self.send_nothing();
            self.sharded = None;
        }
        let settings =
            fit.and_then(|()| check_hooks(&parameters)).and_then(|()| Settings::from_env());
        let lines = self.describe(&settings, &parameters, &buffers);
        if let Some(difference) = first_mismatch(&group, &lines)? {
            return Err(Error::Mismatch { rank, difference });
        }
        let settings = settings.map_err(|reason| Error::Model { rank, reason })?;
        let mut seen = HashSet::new();
        parameters.retain(|(_, tensor)| seen.insert(flow_autograd::identity(tensor)));
        buffers.retain(|(_, tensor)| seen.insert(flow_autograd::identity(tensor)));
        self.mixed_precision.cast_buffers(&mut buffers);
        let all_buffers: Vec<Tensor> =
            buffers.iter().map(|(_, tensor)| tensor.shallow_clone()).collect();
        let identities: Vec<usize> = all_buffers.iter().map(flow_autograd::identity).collect();
        if !self.broadcast_buffers {
            buffers.clear();
        }
        // All ranks of an Fsdp will have rank 0's parameters in common.
        let to_broadcast = if self.sharded.is_some() { &[][..] } else { &parameters };
        broadcast_all(&group, to_broadcast.iter().chain(&buffers))?;
        agree(&group, sync_batchnorm::renew(&identities, &group))?;
        // Before the first backward, so that all gradients are allocated in shared memory.
        let allocator = ArenaAllocatorGuard::current().filter(|_| group.cuda_device().is_none());
        let own = group.duplicate_in(allocator.as_ref().map(|allocator| allocator.handle()))?;
        let are_equal = self.comm_hook.is_same_on_all_ranks();
        // Virtual ranks share them after each step.
        let forward_sync_buffers =
            self.forward_sync_buffers && self.options.virtual_ranks.is_none();
        let kept = self.sharded.as_ref();
        let ignored = self.ignored.identities();
        let kept = kept.map(|store| fsdp::share(&own, store, &ignored)).transpose()?;
        let unshare = |_: &Error| kept.iter().for_each(|kept| kept.shared.unshare());
        let optimizer = match (&self.optimizer, &self.zero) {
            (None, None) => Ok(None),
            (Some(choice), _) => OptimizerInBackward::new(choice, &parameters, &own)
                .map(|optimizer| Some(InBackward::Whole(optimizer))),
            (None, Some(parts)) => ZeroInBackward::new(parts, &parameters)
                .map(|optimizer| Some(InBackward::Sharded(optimizer))),
        };
        let made = optimizer.and_then(|optimizer| {
            let reduction = Reduction {
                options: self.options,
                comm_hook: self.comm_hook,
                optimizer,
                kept: kept.clone(),
                buffers: identities,
            };
            WrappedParts::new(own.clone(), &settings, reduction, parameters, buffers)
        });
        // Also so that a rank whose first backward fails does not fail the group while nodes are
        // still being linked.
        let WrappedParts { reducer, hooks, allocator, broadcast, held } =
            agree(&own, made).inspect_err(unshare)?;
        let low_precision = self
            .mixed_precision
            .param
            .map(|kind| LowPrecision::new(&own, kind, reducer.named_parameters(), are_equal))
            .transpose();
        let low_precision = agree(&own, low_precision).inspect_err(unshare)?;
        Ok(Ddp {
            model,
            group,
            reducer: Some(reducer),
            hooks,
            _allocator: allocator,
            forward_sync_buffers,
            buffers: Mutex::new(Buffers { broadcast, held, hook: self.buffer_comm_hook }),
            all_buffers: Mutex::new(all_buffers),
            low_precision,
            ignored: self.ignored,
        })
    }

    /// Returns what is wrong with the options for this model.
    fn check(
        &self,
        parameters: &[(String, Tensor)],
        buffers: &[(String, Tensor)],
    ) -> Result<(), String> {
        self.ignored.check()?;
        self.mixed_precision.check(parameters, self.comm_hook.kind())?;
        check(parameters, buffers, &self.options, self.broadcast_buffers)?;
        self.described_optimizer()?;
        self.check_zero()?;
        self.check_virtual_ranks(parameters, buffers)?;
        let store = self.sharded.as_ref().filter(|_| self.group.world_size() > 1);
        if let Some(store) = store {
            fsdp::check(store, &self.ignored)?;
        }
        let mut own = parameters.iter().filter(|_| store.is_none()).chain(&self.ignored.parameters);
        if let Some((name, _)) = own.find(|(_, tensor)| is_fully_sharded(tensor)) {
            return Err(format!(
                "the ranks of a machine have {name} in common, which an Fsdp has left so: each would step \
                 it; call into_inner of the Fsdp first"
            ));
        }
        if self.buffer_comm_hook.is_some() && !self.broadcast_buffers {
            return Err(
                "buffer_comm_hook: ranks share no buffers: leave broadcast_buffers on".into()
            );
        }
        Ok(())
    }

    /// Checks that the optimizer of `hook_with_zero_step` is the only one in backward, and has the
    /// ranks of the model.
    fn check_zero(&self) -> Result<(), String> {
        let Some(zero) = &self.zero else { return Ok(()) };
        if self.optimizer.is_some() {
            return Err(
                "hook_with_zero_step: two optimizers cannot step in backward: build without \
                        optimizer_in_backward"
                    .into(),
            );
        }
        zero.group.check("hook_with_zero_step").map_err(|error| {
            format!("{error}; make the optimizer anew, and give it the state of a checkpoint")
        })?;
        if self.group.world_size() > 1 && !self.comm_hook.is_same_on_all_ranks() {
            return Err("hook_with_zero_step: a ZeroRedundancyOptimizer takes the same gradients on all \
                        ranks, and the communication hook gives them their own, as PostLocalSgd does: \
                        use tch's optimizer, or another hook"
                .into());
        }
        if !self.options.sparse.is_empty() {
            return Err(
                "hook_with_zero_step: a ZeroRedundancyOptimizer takes no sparse gradients: build \
                        with sparse_as_dense(true), and without sparse_gradients"
                    .into(),
            );
        }
        if zero.group.ranks() != self.group.ranks() {
            return Err(format!(
                "hook_with_zero_step: the optimizer is of the ranks {:?}, and the Ddp of {:?}: make \
                 both with one group",
                zero.group.ranks(),
                self.group.ranks()
            ));
        }
        Ok(())
    }

    /// Describes the optimizer in backward, in a line.
    fn described_optimizer(&self) -> Result<Option<String>, String> {
        let described = self.optimizer.as_ref().map(OptimizerChoice::describe).transpose();
        described.map_err(|reason| format!("{}: {reason}", optimizer_in_backward::OPERATION))
    }

    /// Whether gradients are taken from backward with one rank too.
    fn takes_gradients(&self) -> bool {
        self.optimizer.is_some()
            || self.zero.is_some()
            || self.options.takes_sparse_gradients()
            || self.options.virtual_ranks.is_some()
            || self.mixed_precision != MixedPrecision::default()
    }

    /// Wraps a model of one rank, to which nothing is to be done.
    fn wrap_alone<M>(self, model: M) -> Result<Ddp<M>> {
        let broadcast = CoalescedBroadcast::new(&self.group, Vec::new())?;
        Ok(Ddp {
            model,
            group: self.group,
            reducer: None,
            hooks: Vec::new(),
            _allocator: None,
            forward_sync_buffers: self.forward_sync_buffers,
            buffers: Mutex::new(Buffers { broadcast, held: Vec::new(), hook: None }),
            all_buffers: Mutex::default(),
            low_precision: None,
            ignored: self.ignored,
        })
    }

    /// Turns everything off that is about sending.
    fn send_nothing(&mut self) {
        self.options.communication = None;
        self.comm_hook = Box::new(AllReduce);
        self.buffer_comm_hook = None;
    }

    /// Describes what must be the same on all ranks, in lines.
    fn describe(
        &self,
        settings: &Result<Settings, String>,
        parameters: &[(String, Tensor)],
        buffers: &[(String, Tensor)],
    ) -> Vec<String> {
        let shared_by = self.buffer_comm_hook.as_ref();
        let shared_by = shared_by.map(|hook| format!("{} {:?}", hook.name(), hook.location()));
        let mut lines = vec![format!(
            "options {:?}, broadcast_buffers: {}, forward_sync_buffers: {}, comm_hook: {}, \
             buffer_comm_hook: {}, optimizer_in_backward: {}, hook_with_zero_step: {}, Fsdp: {}, {:?}",
            self.options,
            self.broadcast_buffers,
            self.forward_sync_buffers,
            self.comm_hook.name(),
            shared_by.unwrap_or_else(|| "none".to_owned()),
            self.described_optimizer().ok().flatten().unwrap_or_else(|| "none".to_owned()),
            self.zero.as_ref().map_or("none", |zero| zero.chosen.as_str()),
            self.sharded.is_some(),
            self.mixed_precision,
        )];
        match settings {
            Ok(_) => {
                lines.push(format!("a model on {}", device_kind(parameters[0].1.device())));
                lines.push(self.ignored.describe());
                lines.extend(describe(parameters, buffers));
            }
            Err(reason) => {
                lines.push(format!("a model that cannot be wrapped: {}", reason.replace('\n', " ")))
            }
        }
        lines
    }
}

/// The parts of a wrapped model that each rank makes on its own.
struct WrappedParts {
    reducer: Arc<Reducer>,
    hooks: Vec<GradHook>,
    allocator: Allocator,
    broadcast: CoalescedBroadcast,
    held: Vec<HeldBuffer>,
}

impl WrappedParts {
    /// `own` is the reducer's own group.
    fn new(
        own: ProcessGroup,
        settings: &Settings,
        reduction: Reduction,
        parameters: Vec<(String, Tensor)>,
        buffers: Vec<(String, Tensor)>,
    ) -> Result<Self> {
        let to_broadcast =
            buffers.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone())).collect();
        let mut held: Vec<HeldBuffer> = buffers
            .into_iter()
            // Here, in the broadcast, and in the list of all buffers.
            .map(|(name, tensor)| HeldBuffer { name, tensor, others: 3 })
            .collect();
        let broadcast = CoalescedBroadcast::new(&own, to_broadcast)?;
        held.retain(HeldBuffer::is_held);
        let (path, allocator) = reduce_path(
            &own,
            settings,
            &parameters[0].1,
            &reduction.options,
            reduction.kept.clone(),
        )?;
        let (trained, frozen) = by_training(numbered(parameters));
        let reducer = Reducer::new(own, path, trained, frozen, reduction)?;
        let hooks = reducer.install_hooks()?;
        Ok(Self { reducer, hooks, allocator, broadcast, held })
    }
}

/// Keeps the CPU's gradients in memory that ranks reach; None on GPUs.
pub(crate) type Allocator = Option<Arc<ArenaAllocatorGuard>>;

/// Chooses how gradients are reduced on the device of `like`. On the CPU, gradients are from now on
/// allocated where ranks reach them.
pub(crate) fn reduce_path(
    group: &ProcessGroup,
    settings: &Settings,
    like: &Tensor,
    options: &Options,
    kept: Option<Arc<GradShards>>,
) -> Result<(Arc<dyn ReducePath>, Allocator)> {
    if let Some(cuda) = cuda_group(group, like)? {
        return Ok((Arc::new(CudaPath::new(group, cuda, options.op)), None));
    }
    let path = Arc::new(CpuPath::new(group, settings, options, kept)?);
    Ok((path, ArenaAllocatorGuard::install(group.arena_handle())))
}

/// Returns the place of a tensor among those that a store has made.
fn position(created: &[usize], tensor: &Tensor) -> Option<usize> {
    let identity = flow_autograd::identity(tensor);
    created.iter().position(|&other| other == identity)
}

/// Returns the name of a parameter that a store has got after its first `known` ones.
fn added(store: &Variables, known: usize) -> Option<String> {
    let new = store
        .trainable_variables
        .iter()
        .skip(known)
        .find(|variable| variable.tensor.requires_grad())?;
    let identity = flow_autograd::identity(&new.tensor);
    let named = store.named_variables.iter().find(|(_, t)| flow_autograd::identity(t) == identity);
    Some(named.map_or_else(|| "a parameter".into(), |(name, _)| name.clone()))
}
