//! The wrapper that makes a model train on many processes.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};

use flow_autograd::{GradHook, Replacements, grad_enabled};
use flow_comm::ProcessGroup;
use flow_tensor::ArenaAllocatorGuard;
use tch::Tensor;
use tch::nn::{Module, ModuleT};

use crate::buffers::{BufferCommHookLocation, Buffers};
use crate::error::{Error, Result};
use crate::fsdp::ignored::Ignored;
use crate::low_precision::LowPrecision;
use crate::optimizer_in_backward::OptimizerInBackward;
use crate::reducer::Reducer;
use crate::stats::Stats;

/// A model whose gradients are averaged over all ranks of a process group, inside `backward`.
///
/// Made once, it needs no further call: train the model as if it were alone. At construction all
/// ranks compare their models and take over rank 0's parameters and buffers (these not with
/// [`broadcast_buffers(false)`](crate::DdpBuilder::broadcast_buffers)). Each `backward` leaves in
/// every parameter's `.grad` the mean of all ranks' gradients; reductions run while backward still
/// does. In training mode, `forward_t` first gives all ranks rank 0's buffers (running statistics).
///
/// `Ddp` implements [`ModuleT`] for models that do, and thereby for every [`Module`]; it derefs to
/// the model for its other methods. (It cannot implement `Module` too: tch implements `ModuleT` for
/// all `Module`s, so that Rust would see two implementations.)
///
/// The model is on the CPU or, on each rank, on that rank's GPU. There, reductions run over NCCL on
/// a stream of their own, and the host waits for none of them. Each `.grad` is a view of its
/// bucket, to be used in the order of libtorch's stream. An error of another rank comes from the
/// next backward at the latest.
///
/// All ranks run the same number of backwards. A *step* is a backward that reduces gradients, or a
/// [`Ddp::forward_t`] in training mode that none follows. Its loss was then thrown away, or did not
/// depend on it, or its backward failed. If only some ranks have such a step, the next backward
/// fails on all. The error says which rank is in which step; with buffers, who is in forward and
/// who in backward. Gradients of different steps would else be averaged. While something still
/// holds the forward's graph (a loss that is kept for later: keep `loss.detach()`), the backward
/// after that one fails. So evaluate with `forward_t(.., false)`, or under `no_grad`.
///
/// Two mistakes are found by the time-out only. A rank that leaves out the forward as well, or
/// calls other methods of the model, has one backward less at the end. The others then wait for it.
/// Ranks on GPUs do not wait for each other's hosts; their time-outs name the steps.
///
/// A backward that fails on one rank, once gradients have come, fails on all. The `Ddp` is then
/// unusable, and each later backward returns the cause. If the failed backward ran another inside
/// it, this holds once its graph is freed. If all ranks are still alive, they may drop their `Ddp`
/// and wrap the model anew. [`Error::from_backward`] gives the error that ended a backward. A
/// backward may run inside another one, as in checkpointing, if each parameter gets its gradient in
/// one of them.
///
/// `Ddp` reduces gradients and broadcasts buffers in a group of its own, so that they do not mix
/// with the program's collectives in `group`. The cost: if ranks are out of step (one in backward,
/// another in a collective of `group`), this is detected by the timeout, not immediately.
///
/// Parameters are those that require gradients when the model is wrapped. Freeze and unfreeze
/// before, or call [`Ddp::refresh`] after. One that the `VarStore` gets later is an error of the
/// next backward. One tensor under several names (tied weights) is one parameter, of the first
/// name. Buffers are the tensors that they are when the model is wrapped: write into them. One that
/// the model has replaced
/// (`model.norm.running_mean = ...`) is an error of the next forward that would broadcast it. It is
/// none where something else still holds the old tensor. Where one backward goes through several
/// wrapped models, all ranks must go through them in the same order. With one rank nothing is
/// installed and nothing costs, but for an
/// [optimizer in backward](crate::DdpBuilder::optimizer_in_backward) or
/// [`hook_with_zero_step`](crate::DdpBuilder::hook_with_zero_step),
/// [sparse gradients](crate::DdpBuilder::sparse_gradients) and
/// [mixed precision](crate::DdpBuilder::mixed_precision).
///
/// A process that is forked from a rank can use the model to infer (`forward_t` with `train`
/// false). Forward in training mode and backward are errors there.
pub struct Ddp<M> {
    pub(crate) model: M,
    pub(crate) group: ProcessGroup,
    /// The reducer of gradients; None with one rank.
    pub(crate) reducer: Option<Arc<Reducer>>,
    /// Dropped with the wrapper, so that the bare model is left as it was.
    pub(crate) hooks: Vec<GradHook>,
    pub(crate) _allocator: Option<Arc<ArenaAllocatorGuard>>,
    /// Whether each forward in training mode shares the buffers.
    pub(crate) forward_sync_buffers: bool,
    pub(crate) buffers: Mutex<Buffers>,
    /// All buffers, also those that are not shared.
    pub(crate) all_buffers: Mutex<Vec<Tensor>>,
    /// The parameters that forward and backward compute with, if these are others.
    pub(crate) low_precision: Option<LowPrecision>,
    /// The parameters that are each rank's own.
    pub(crate) ignored: Ignored,
}

impl<M> Ddp<M> {
    /// Returns the group that gradients are averaged over.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Makes backward only accumulate this rank's gradients, until this guard and every other one is
    /// dropped. The first backward after that reduces what has been accumulated.
    #[must_use = "gradients are reduced again as soon as the guard is dropped"]
    pub fn no_sync(&self) -> NoSync {
        let reducer = self.reducer.clone();
        if let Some(reducer) = &reducer {
            reducer.keep_local();
        }
        NoSync { reducer }
    }

    /// Runs `accumulate` under [`Ddp::no_sync`].
    pub fn without_sync<T>(&self, accumulate: impl FnOnce(&Self) -> T) -> T {
        let _guard = self.no_sync();
        accumulate(self)
    }

    /// Returns the optimizer that steps in backward.
    ///
    /// # Errors
    /// The model was wrapped without one.
    pub fn optimizer_in_backward(&self) -> Result<OptimizerInBackward> {
        let optimizer = self.reducer.as_ref().and_then(|reducer| reducer.optimizer()).cloned();
        let reason = "no optimizer steps in backward: build with optimizer_in_backward(config, \
                      learning_rate)";
        optimizer.ok_or_else(|| Error::model(&self.group, reason.to_owned()))
    }

    /// Waits until the last backward's gradients are averaged, which on a GPU may be after
    /// `backward` has returned. Call this before you keep what was trained, as in a checkpoint.
    /// Gradients, and what the optimizer made of them, are of no use after a failure.
    ///
    /// Errors: a failure of this rank or another, a rank that does not come in time.
    pub fn synchronize(&self) -> Result<()> {
        self.reducer.as_ref().map_or(Ok(()), |reducer| reducer.synchronize())
    }

    /// Makes this `Ddp` unusable on all ranks: whoever waits in a backward or a forward, or comes to
    /// one, gets an error with `cause`. For a rank that fails where the others cannot see it.
    pub fn abort(&self, cause: &str) {
        if let Some(reducer) = &self.reducer {
            reducer.abort(cause);
        }
    }

    /// Times and bytes of the last backward's communication.
    pub fn stats(&self) -> Stats {
        self.reducer.as_ref().map(|r| r.stats()).unwrap_or_default()
    }

    /// Returns the model, without its hooks.
    pub fn into_inner(self) -> M {
        self.model
    }

    /// Returns this wrapper around another model of the same variables.
    pub(crate) fn with_model<N>(self, model: N) -> Ddp<N> {
        Ddp {
            model,
            group: self.group,
            reducer: self.reducer,
            hooks: self.hooks,
            _allocator: self._allocator,
            forward_sync_buffers: self.forward_sync_buffers,
            buffers: self.buffers,
            all_buffers: self.all_buffers,
            low_precision: self.low_precision,
            ignored: self.ignored,
        }
    }

    /// Gives all ranks rank 0's buffers, or in [`Ddp::join_with`] another rank's, as `forward_t` does
    /// in training mode; or calls the [hook](crate::DdpBuilder::buffer_comm_hook) that shares them. A
    /// step with several forwards under [`Ddp::no_sync`], which leave buffers alone, calls this once
    /// before them. So does whoever has turned
    /// [`forward_sync_buffers`](crate::DdpBuilder::forward_sync_buffers) off. All ranks call this.
    ///
    /// # Errors
    /// A failure of this rank or another; a buffer that the model has replaced; the hook's.
    pub fn sync_buffers(&self) -> Result<()> {
        let Some(reducer) = &self.reducer else { return Ok(()) };
        reducer.check_process("forward")?;
        if !reducer.synchronizes() {
            return Ok(());
        }
        // The others wait for this rank's buffers: an error in them must reach all ranks, also that of
        // another group, in which a hook has communicated.
        self.share_buffers(reducer).inspect_err(|error| fail_with(reducer, error))
    }

    /// Casts the parameters of [`DdpBuilder::mixed_precision`](crate::DdpBuilder::mixed_precision), on a
    /// CPU once for all ranks of the machine, as `forward_t` does in training mode. Elsewhere a forward
    /// after an optimizer's step casts them for its rank alone: under [`Ddp::no_sync`], in a join, in
    /// evaluation. Who has several of these calls this once before them. All ranks call this.
    ///
    /// # Errors
    /// A failure of this rank or another; parameters that are not the same on all ranks of a machine.
    pub fn cast_parameters(&self) -> Result<()> {
        let (Some(low), Some(reducer)) = (&self.low_precision, &self.reducer) else {
            return Ok(());
        };
        reducer.check_process("cast_parameters")?;
        low.cast_together().inspect_err(|error| fail_with(reducer, error))
    }

    /// Returns whether forwards compute with parameters in half precision.
    pub fn has_mixed_precision(&self) -> bool {
        self.low_precision.is_some()
    }

    /// Returns what operations of a forward take in place of the parameters.
    fn replacements(&self, low: &LowPrecision, train: bool) -> Result<Replacements> {
        let all_ranks_come = train
            && grad_enabled()
            && self.reducer.as_ref().is_some_and(|r| r.synchronizes() && !r.is_joined());
        if all_ranks_come {
            self.cast_parameters()?;
        }
        low.replacements(all_ranks_come)
    }

    fn share_buffers(&self, reducer: &Reducer) -> Result<()> {
        let mut buffers = self.buffers.lock().unwrap_or_else(PoisonError::into_inner);
        if buffers.broadcast.is_empty() {
            return Ok(());
        }
        buffers.check(&self.group)?;
        let root = reducer.announce_buffers()?;
        buffers.share(reducer.group(), root)
    }

    /// Returns copies of all buffers.
    pub(crate) fn copies_of_buffers(&self) -> Vec<Tensor> {
        let buffers = self.all_buffers.lock().unwrap_or_else(PoisonError::into_inner);
        buffers.iter().map(|buffer| buffer.detach().copy()).collect()
    }

    /// Writes `values` into all buffers, which counts as no change for a backward.
    pub(crate) fn set_buffers(&self, values: &[Tensor]) {
        let buffers = self.all_buffers.lock().unwrap_or_else(PoisonError::into_inner);
        for (buffer, value) in buffers.iter().zip(values) {
            buffer.data().copy_(value);
        }
    }

    /// Shares the buffers in a forward in training mode that is at this place.
    fn sync_buffers_in_forward(&self, now: BufferCommHookLocation) -> Result<()> {
        let buffers = self.buffers.lock().unwrap_or_else(PoisonError::into_inner);
        let is_now = self.forward_sync_buffers && buffers.location() == now;
        drop(buffers);
        if is_now { self.sync_buffers() } else { Ok(()) }
    }
}

/// Has an error of this rank alone reach all ranks.
fn fail_with(reducer: &Reducer, error: &Error) {
    if !matches!(error, Error::EndedEarly { .. }) {
        reducer.abort(&error.to_string());
    }
}

impl<M: ModuleT> Ddp<M> {
    /// Runs `forward_t`. The error is that of [`Ddp::sync_buffers`] or [`Ddp::cast_parameters`], or
    /// [`Error::EndedEarly`].
    pub fn try_forward_t(&self, input: &Tensor, train: bool) -> Result<Tensor> {
        if train && self.reducer.is_some() && self.hooks.is_empty() {
            let reason = "a refresh has failed half-way: wrap the model again".to_owned();
            return Err(Error::model(&self.group, reason));
        }
        if let Some(reducer) = self.reducer.as_ref().filter(|_| train) {
            if reducer.virtual_ranks().is_some_and(|own| !own.is_running()) {
                let reason =
                    "a forward in training mode outside of in_virtual_rank, with virtual_ranks";
                return Err(Error::model(&self.group, reason.to_owned()));
            }
            reducer.announce_forward()?;
        }
        if train {
            self.sync_buffers_in_forward(BufferCommHookLocation::PreForward)?;
        }
        let _phase = self.reducer.as_ref().filter(|_| train).map(|reducer| reducer.begin_forward());
        let output = match &self.low_precision {
            Some(low) => {
                let replacements = self.replacements(low, train)?;
                replacements.during(|| self.model.forward_t(&low.input(input), train))
            }
            None => self.model.forward_t(input, train),
        };
        if train {
            self.sync_buffers_in_forward(BufferCommHookLocation::PostForward)?;
        }
        if let Some(reducer) = self.reducer.as_ref().filter(|_| train) {
            reducer.follow(&output)?;
        }
        Ok(output)
    }
}

impl<M: Module> Ddp<M> {
    /// Runs the model's `forward`, as in training: all ranks call it. To evaluate on some ranks
    /// only, use `forward_t`.
    pub fn forward(&self, input: &Tensor) -> Tensor {
        self.forward_t(input, true)
    }
}

impl<M: ModuleT> ModuleT for Ddp<M> {
    /// A failure to share the buffers is returned by the backward that follows, on all ranks;
    /// use [`Ddp::try_forward_t`] to have it here.
    fn forward_t(&self, input: &Tensor, train: bool) -> Tensor {
        self.try_forward_t(input, train).unwrap_or_else(|error| {
            if matches!(error, Error::EndedEarly { .. }) {
                // Without the collectives that the model may have in training.
                return self.model.forward_t(input, false);
            }
            log::error!("{error}");
            if let Some(reducer) = &self.reducer {
                reducer.abort(&error.to_string());
            }
            self.model.forward_t(input, train)
        })
    }
}

impl<M> Deref for Ddp<M> {
    type Target = M;

    fn deref(&self) -> &M {
        &self.model
    }
}

impl<M> DerefMut for Ddp<M> {
    fn deref_mut(&mut self) -> &mut M {
        &mut self.model
    }
}

impl<M: fmt::Debug> fmt::Debug for Ddp<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ddp")
            .field("model", &self.model)
            .field("group", &self.group)
            .finish_non_exhaustive()
    }
}

/// Keeps gradients local while it lives: see [`Ddp::no_sync`].
pub struct NoSync {
    reducer: Option<Arc<Reducer>>,
}

impl Drop for NoSync {
    fn drop(&mut self) {
        if let Some(reducer) = &self.reducer {
            reducer.end_local();
        }
    }
}
