//! A gradient's way from hook to optimizer.
//!
//! The hook of a parameter hands its gradient to its bucket. A bucket that has all its gradients is
//! ready. Ready buckets are launched strictly in order. So every rank issues the same collectives
//! in the same order, whatever its backward order was. The callback at the end of backward finishes
//! what is under way and writes back what was copied. After the first backward the buckets are
//! built anew, in the order in which rank 0's gradients came.

mod apply;
mod backward;
mod finish;
mod join;
mod ready;
mod tune;

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use flow_autograd::{BoxError, GradHook};
use flow_comm::{ForkSafe, ProcessGroup, trace};
use tch::Tensor;

use crate::apart::Apart;
use crate::backward_state::BackwardState;
use crate::bucket::ReducePath;
use crate::bucket::comm_hook::CommHook;
use crate::error::{Error, Result};
use crate::fsdp::grad_shards::GradShards;
use crate::in_backward::InBackward;
use crate::optimizer_in_backward::OptimizerInBackward;
use crate::options::Options;
use crate::parameter::Parameter;
use crate::stats::Stats;
use crate::steps::Steps;
use crate::sync_batchnorm;
use crate::virtual_ranks::own::OwnVirtualRanks;

/// Returns the name of a parameter that the model has got since it was wrapped, if there is one.
pub(crate) type Added = Box<dyn Fn() -> Option<String> + Send + Sync>;

/// How gradients are reduced, and what then becomes of them.
pub(crate) struct Reduction {
    pub options: Options,
    pub comm_hook: Box<dyn CommHook>,
    /// Applies the gradients in backward.
    pub optimizer: Option<InBackward>,
    /// Keeps this rank's parts of the gradients.
    pub kept: Option<Arc<GradShards>>,
    /// The model's buffers, by identity: those of layers that communicate.
    pub buffers: Vec<usize>,
}

/// The state of one wrapped model, shared by its hooks.
pub(crate) struct Reducer {
    group: ProcessGroup,
    options: Options,
    path: ForkSafe<Arc<dyn ReducePath>>,
    steps: Arc<Steps>,
    added: OnceLock<Added>,
    /// The state has a join.
    is_joined: AtomicBool,
    state: ForkSafe<Mutex<BackwardState>>,
    comm_hook: ForkSafe<Mutex<Box<dyn CommHook>>>,
    /// The hook waits for other ranks.
    launches_at_end: bool,
    /// Groups of the hook's own.
    hook_groups: Vec<ProcessGroup>,
    /// The model's, by identity.
    buffers: Vec<usize>,
    optimizer: Option<InBackward>,
    kept: Option<Arc<GradShards>>,
    /// The hook gives ranks gradients of their own.
    apart: Option<Apart>,
    virtual_ranks: Option<OwnVirtualRanks>,
}

impl Reducer {
    /// Makes a reducer. `group` and `path` are its own: nothing else uses them.
    pub fn new(
        group: ProcessGroup,
        path: Arc<dyn ReducePath>,
        parameters: Vec<Parameter>,
        frozen: Vec<Parameter>,
        reduction: Reduction,
    ) -> Result<Arc<Self>> {
        let Reduction { options, comm_hook, optimizer, kept, buffers } = reduction;
        let order: Vec<usize> = (0..parameters.len()).rev().collect();
        let tensors = parameters.iter().chain(&frozen).map(|parameter| &parameter.tensor);
        let apart = (!comm_hook.is_same_on_all_ranks()).then(|| Apart::new(tensors));
        let virtual_ranks = options.virtual_ranks;
        let virtual_ranks = virtual_ranks.map(|count| OwnVirtualRanks::new(count, &group));
        let virtual_ranks =
            virtual_ranks.transpose().map_err(|reason| Error::model(&group, reason))?;
        let mut state = BackwardState::new(parameters, frozen, &options);
        state.build(&*path, &options, &order, &options.caps)?;
        Ok(Arc::new(Self {
            group,
            options,
            path: ForkSafe::new(path),
            steps: Arc::new(Steps::new()),
            added: OnceLock::new(),
            is_joined: AtomicBool::new(false),
            state: ForkSafe::new(Mutex::new(state)),
            launches_at_end: comm_hook.waits_for_ranks(),
            hook_groups: comm_hook.groups(),
            comm_hook: ForkSafe::new(Mutex::new(comm_hook)),
            buffers,
            optimizer,
            kept,
            apart,
            virtual_ranks,
        }))
    }

    /// Installs a hook on each parameter. A hook that is dropped is gone from the model.
    pub fn install_hooks(self: &Arc<Self>) -> Result<Vec<GradHook>> {
        let state = self.state();
        let mut hooks = Vec::with_capacity(state.parameters.len());
        for (index, parameter) in state.parameters.iter().enumerate() {
            let reducer = Arc::clone(self);
            let hook = GradHook::install(&parameter.tensor, move |tensor| {
                // First of all: in a forked child the state may be locked for ever.
                reducer.check_process("backward").map_err(Error::end_backward)?;
                // Backward may read memory that others use again: it must stay as it is.
                let exclusive = flow_autograd::grad_is_exclusive(tensor);
                reducer.on_gradient(index, &tensor.grad(), exclusive)
            });
            hooks.push(hook.map_err(|error| {
                let reason = format!("{}: {error}", parameter.name);
                Error::torch(&self.group, "installing a hook", reason)
            })?);
        }
        Ok(hooks)
    }

    /// Returns the state that trains the parameters that require gradients now.
    pub fn trained_anew(&self) -> Result<BackwardState> {
        let state = self.state();
        if self.path.grads_are_views() || self.options.bucket_view {
            state.keep_grads_apart().map_err(|error| self.torch_error(error))?;
        }
        state.trained_anew(&**self.path, &self.options)
    }

    /// Goes on with another state. Returns its hooks; the caller has dropped the old ones.
    pub fn go_on(self: &Arc<Self>, state: BackwardState) -> Result<Vec<GradHook>> {
        *self.state() = state;
        self.install_hooks()
    }

    /// Returns the parameters that require gradients now, and did not before.
    pub fn unfrozen(&self) -> Vec<(String, Tensor)> {
        let state = self.state();
        let unfrozen = state.frozen.iter().filter(|parameter| parameter.tensor.requires_grad());
        unfrozen
            .map(|parameter| (parameter.name.clone(), parameter.tensor.shallow_clone()))
            .collect()
    }

    /// Returns all parameters of the model, in its order.
    pub fn named_parameters(&self) -> Vec<(String, Tensor)> {
        self.state().named()
    }

    /// Checks that no step of virtual ranks is under way, and that no parameter is frozen that has a
    /// gradient which is not reduced yet.
    pub fn check_reduced(&self) -> Result<(), String> {
        if self.virtual_ranks.as_ref().is_some_and(|own| !own.is_between_steps()) {
            return Err("refresh between two steps, not between virtual ranks of one".into());
        }
        let state = self.state();
        match state.used().find(|parameter| !parameter.tensor.requires_grad()) {
            None => Ok(()),
            Some(parameter) => Err(format!(
                "{} was frozen with a gradient that is not reduced yet: freeze it after the backward \
                 that ends no_sync",
                parameter.name
            )),
        }
    }

    /// Returns the options that all ranks have.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// Returns the optimizer that steps in backward, if it is the model's own.
    pub fn optimizer(&self) -> Option<&OptimizerInBackward> {
        match &self.optimizer {
            Some(InBackward::Whole(optimizer)) => Some(optimizer),
            Some(InBackward::Sharded(_)) | None => None,
        }
    }

    /// Returns where this rank's parts of the gradients are, if it keeps no others.
    pub fn kept(&self) -> Option<&Arc<GradShards>> {
        self.kept.as_ref()
    }

    /// Returns the virtual ranks of this rank, if the model has virtual ranks.
    pub fn virtual_ranks(&self) -> Option<&OwnVirtualRanks> {
        self.virtual_ranks.as_ref()
    }

    /// Calls `look` with the parameters that are trained.
    pub fn with_parameters<T>(&self, look: impl FnOnce(&[Parameter]) -> T) -> T {
        look(&self.state().parameters)
    }

    /// Lets go of all gradients, also of parameters that were frozen since they got one.
    pub fn drop_grads(&self) -> Result<()> {
        let state = self.state();
        for parameter in state.parameters.iter().chain(&state.frozen) {
            flow_autograd::set_grad(&parameter.tensor, None)
                .map_err(|error| self.torch_error(error))?;
        }
        Ok(())
    }

    /// Returns the reducer's own group.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Keeps gradients of backwards on this rank, until [`Reducer::end_local`] was called as often.
    pub fn keep_local(&self) {
        if self.state.is_ours() {
            self.state().local += 1;
        }
    }

    /// Ends one [`Reducer::keep_local`].
    pub fn end_local(&self) {
        if self.state.is_ours() {
            self.state().local -= 1;
        }
    }

    /// Returns whether a backward now reduces gradients.
    pub fn synchronizes(&self) -> bool {
        self.state().local == 0
    }

    /// Calls `added` in each backward; a name that it returns makes the backward fail.
    pub fn watch_for(&self, added: Added) {
        let _ = self.added.set(added); // once, when the model is wrapped
    }

    /// Counts a forward in training mode, whose result is `output`, as a step.
    pub fn follow(&self, output: &Tensor) -> Result<()> {
        if !self.synchronizes() {
            return Ok(());
        }
        let followed = self.steps.follow(output);
        followed.map_err(|error| Error::torch(&self.group, "forward", error))
    }

    /// Begins the next step's forward in the timeline. It ends there when the result is dropped.
    pub fn begin_forward(&self) -> trace::Span {
        trace::phase(trace::Phase::Forward, self.steps.next().into())
    }

    /// Fails `operation` in a process that was forked from this rank.
    pub fn check_process(&self, operation: &str) -> Result<()> {
        Ok(self.group.check_process(operation)?)
    }

    /// Makes the next backward fail, on all ranks.
    pub fn abort(&self, cause: &str) {
        self.fail_groups(cause);
        self.path.abort(cause);
    }

    /// Returns whether `.grad` is a view of its bucket after a backward.
    pub fn grads_are_views(&self) -> bool {
        self.path.grads_are_views()
    }

    /// Waits until the reductions of the last backward are over.
    pub fn synchronize(&self) -> Result<()> {
        self.path.synchronize()?;
        self.optimizer.as_ref().map_or(Ok(()), InBackward::synchronize)
    }

    /// Times and bytes of the last backward.
    pub fn stats(&self) -> Stats {
        if !self.state.is_ours() {
            return Stats::default();
        }
        self.state().timed_stats(&**self.path)
    }

    /// Takes the final `.grad` of parameter `index`, in backward. `exclusive`: nothing else uses its
    /// memory.
    pub fn on_gradient(
        self: &Arc<Self>,
        index: usize,
        gradient: &Tensor,
        exclusive: bool,
    ) -> Result<(), BoxError> {
        self.mark_ready(index, gradient, exclusive).map_err(|error| self.fail(error))
    }

    /// Fails this rank's backward and, with it, the group: no rank is to wait for gradients that
    /// will not come.
    fn fail(&self, error: Error) -> BoxError {
        // Nothing has begun, on any rank.
        if matches!(error, Error::EndedEarly { .. }) {
            return error.end_backward();
        }
        self.state().unusable = true;
        // All ranks know what each of them misses. If the group has failed for anything else, that
        // remains the cause.
        if !matches!(error, Error::MissingGradients { .. }) {
            self.fail_groups(&error.to_string());
        }
        error.end_backward()
    }

    /// Fails the groups in which ranks wait for each other in a backward.
    fn fail_groups(&self, cause: &str) {
        self.group.abort(cause);
        self.fail_other_groups(cause);
    }

    /// Fails those of communication hooks, of layers and of the optimizer.
    fn fail_other_groups(&self, cause: &str) {
        self.hook_groups.iter().for_each(|group| group.abort(cause));
        let optimizers = self.optimizer.as_ref().and_then(InBackward::group);
        optimizers.into_iter().for_each(|group| group.abort(cause));
        sync_batchnorm::abort(&self.buffers, cause);
    }

    fn state(&self) -> MutexGuard<'_, BackwardState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn torch_error(&self, error: flow_autograd::Error) -> Error {
        Error::torch(&self.group, "backward", error)
    }
}
