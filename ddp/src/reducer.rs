//! A gradient's way from hook to optimizer.
//!
//! The hook of a parameter hands its gradient to its bucket. A bucket that has all its gradients is
//! ready; ready buckets are launched strictly in order, so that every rank issues the same
//! collectives in the same order whatever its backward order was. The callback at the end of
//! backward finishes what is under way and writes back what was copied. After the first backward
//! the buckets are built anew, in the order in which rank 0's gradients came.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use flow_autograd::{BoxError, GradHook};
use flow_comm::{trace, ForkSafe, ProcessGroup, ReduceOp};
use flow_tensor::CoalescedBroadcast;
use tch::Tensor;

use crate::backward_state::BackwardState;
use crate::bucket::comm_hook::{CommHook, GradBucket};
use crate::bucket::{BackwardEvent, ReducePath};
use crate::error::{job_rank, Error, Result};
use crate::options::Options;
use crate::parameter::Parameter;
use crate::stats::Stats;
use crate::steps::Steps;

/// The name of a parameter that the model has got since it was wrapped, if there is one.
pub(crate) type Added = Box<dyn Fn() -> Option<String> + Send + Sync>;

/// The state of one wrapped model, shared by its hooks.
pub(crate) struct Reducer {
    group: ProcessGroup,
    options: Options,
    path: ForkSafe<Arc<dyn ReducePath>>,
    steps: Arc<Steps>,
    added: OnceLock<Added>,
    state: ForkSafe<Mutex<BackwardState>>,
    comm_hook: ForkSafe<Mutex<Box<dyn CommHook>>>,
}

impl Reducer {
    /// `group` and `path` are the reducer's own: nothing else uses them.
    pub fn new(
        group: ProcessGroup,
        path: Arc<dyn ReducePath>,
        parameters: Vec<Parameter>,
        frozen: Vec<Parameter>,
        options: Options,
        comm_hook: Box<dyn CommHook>,
    ) -> Result<Arc<Self>> {
        let order: Vec<usize> = (0..parameters.len()).rev().collect();
        let mut state = BackwardState::new(parameters, frozen);
        state.build(&*path, &options, &order)?;
        Ok(Arc::new(Self {
            group,
            options,
            path: ForkSafe::new(path),
            steps: Arc::new(Steps::new()),
            added: OnceLock::new(),
            state: ForkSafe::new(Mutex::new(state)),
            comm_hook: ForkSafe::new(Mutex::new(comm_hook)),
        }))
    }

    /// Hooks of all parameters: dropped, they are gone from the model.
    pub fn install_hooks(self: &Arc<Self>) -> Result<Vec<GradHook>> {
        let state = self.state();
        let install = |(index, parameter): (usize, &Parameter)| {
            let reducer = Arc::clone(self);
            let hook = move |tensor: &Tensor| {
                // First of all: in a forked child the state may be locked for ever.
                reducer.check_process("backward").map_err(Error::end_backward)?;
                // Backward may read memory that others use again: it must stay as it is.
                let exclusive = flow_autograd::grad_is_exclusive(tensor);
                reducer.on_gradient(index, &tensor.grad(), exclusive)
            };
            GradHook::install(&parameter.tensor, hook)
                .map_err(|e| self.torch("installing a hook", format!("{}: {e}", parameter.name)))
        };
        state.parameters.iter().enumerate().map(install).collect()
    }

    /// Backwards reduce no gradients until this has been ended, and every other call.
    pub fn keep_local(&self) {
        if self.state.is_ours() {
            self.state().local += 1;
        }
    }

    pub fn end_local(&self) {
        if self.state.is_ours() {
            self.state().local -= 1;
        }
    }

    pub fn synchronizes(&self) -> bool {
        self.state().local == 0
    }

    /// Has each backward ask `added`.
    pub fn watch_for(&self, added: Added) {
        let _ = self.added.set(added); // once, when the model is wrapped
    }

    /// A forward in training mode has this result.
    pub fn follow(&self, output: &Tensor) -> Result<()> {
        match self.synchronizes() {
            true => self.steps.follow(output).map_err(|e| self.torch("forward", e.to_string())),
            false => Ok(()),
        }
    }

    /// The forward of the next step, in the timeline until the result is dropped.
    pub fn begin_forward(&self) -> trace::Span {
        trace::phase(trace::Phase::Forward, self.steps.next().into())
    }

    /// The error of `operation` in a process that was forked from this rank.
    pub fn check_process(&self, operation: &str) -> Result<()> {
        Ok(self.group.check_process(operation)?)
    }

    /// Makes the next backward fail, on all ranks.
    pub fn abort(&self, cause: &str) {
        self.group.abort(cause);
        self.path.abort(cause);
    }

    /// Gives all ranks rank 0's buffers: in the group in which gradients are reduced, so that a
    /// rank that is out of step finds others in backward.
    pub fn broadcast(&self, buffers: &mut CoalescedBroadcast) -> Result<()> {
        Ok(buffers.run(&self.group, 0)?)
    }

    pub fn grads_are_views(&self) -> bool {
        self.path.grads_are_views()
    }

    /// Waits until the reductions of the last backward are over.
    pub fn synchronize(&self) -> Result<()> {
        self.path.synchronize()
    }

    pub fn stats(&self) -> Stats {
        if !self.state.is_ours() {
            return Stats::default();
        }
        self.state().timed_stats(&**self.path)
    }

    /// In backward: `.grad` of a parameter is final. `exclusive`: nothing else uses its memory.
    pub fn on_gradient(
        self: &Arc<Self>,
        index: usize,
        gradient: &Tensor,
        exclusive: bool,
    ) -> Result<(), BoxError> {
        self.mark_ready(index, gradient, exclusive).map_err(|error| self.fail(error))
    }

    fn mark_ready(
        self: &Arc<Self>,
        index: usize,
        gradient: &Tensor,
        exclusive: bool,
    ) -> Result<()> {
        let mut state = self.state();
        state.used[index] = true;
        if state.local > 0 {
            return Ok(());
        }
        if state.unusable {
            self.group.check("backward")?;
        }
        if !state.in_backward {
            state.begin();
            let step = self.steps.begin();
            state.step = step;
            state.buckets.iter_mut().for_each(|bucket| bucket.memory.set_step(step));
            // Unlocked: if the callback is refused it is dropped, and locks the state for that.
            drop(state);
            let end = EndOfBackward {
                reducer: Arc::clone(self),
                reached: false,
                _phase: trace::phase(trace::Phase::Backward, step.into()),
            };
            flow_autograd::at_end_of_backward(move || end.run())
                .map_err(|e| self.in_backward(e))?;
            state = self.state();
            // From here on an error of this rank alone reaches the others.
            self.path.record(BackwardEvent::FirstGradient)?;
            if let Some(parameter) = state.frozen.iter().find(|p| p.tensor.requires_grad()) {
                let name = &parameter.name;
                let reason = format!(
                    "{name} was frozen when the model was wrapped and is not now: wrap it again"
                );
                return Err(Error::Model { rank: job_rank(&self.group), reason });
            }
            if let Some(name) = self.added.get().and_then(|added| added()) {
                let reason = format!(
                    "{name} was added after the model was wrapped: wrap it again, or, if it is \
                     another model's, keep that in a VarStore of its own"
                );
                return Err(Error::Model { rank: job_rank(&self.group), reason });
            }
        }
        let state = &mut *state;
        if std::mem::replace(&mut state.arrived[index], true) {
            let reason = format!(
                "{} got its gradient twice in one backward (a nested backward, as in \
                 checkpointing): its first part was already being reduced; run the parts under \
                 no_sync, or wrap the whole",
                state.parameters[index].name
            );
            return Err(Error::Model { rank: job_rank(&self.group), reason });
        }
        state.ready_order.push(index);
        if let Some(reason) = flow_autograd::unsendable(gradient) {
            let reason = format!("the gradient of {} {reason}", state.parameters[index].name);
            return Err(Error::Model { rank: job_rank(&self.group), reason });
        }
        let (bucket, slot) = state.slots[index];
        let in_place = state.buckets[bucket].mark_ready(slot, gradient, exclusive)?;
        if !in_place && self.options.bucket_view && !self.path.grads_are_views() {
            state.alias_grad_to_bucket(index).map_err(|e| self.in_backward(e))?;
        }
        self.defer_missing_grads(state, |reducer, state| {
            reducer.launch(state)?;
            Ok(reducer.path.progress()?)
        })
    }

    /// Launches the ready buckets whose turn it is.
    fn launch(&self, state: &mut BackwardState) -> Result<()> {
        let last = state.buckets.len() - 1;
        while let Some(scheduled) = state.buckets.get_mut(state.next).filter(|b| b.missing == 0) {
            let mut bucket = GradBucket {
                index: state.next,
                is_last: state.next == last,
                memory: &mut *scheduled.memory,
                members: &scheduled.members,
                parameters: &state.parameters,
                path: &**self.path,
                group: &self.group,
            };
            let mut hook = self.comm_hook.lock().unwrap_or_else(PoisonError::into_inner);
            let pending = hook.launch(&mut bucket).map_err(|e| self.hook_error(state.next, e))?;
            scheduled.pending = Some(pending);
            state.next += 1;
        }
        Ok(())
    }

    /// Waits until all launched buckets are reduced.
    fn wait(&self, state: &mut BackwardState) -> Result<()> {
        for (index, bucket) in state.buckets.iter_mut().enumerate() {
            let _wait = trace::wait(state.step.into(), index as u32);
            bucket.wait().map_err(|e| self.hook_error(index, e))?;
        }
        Ok(())
    }

    /// Puts what the communication hook has made of buckets where reduced gradients are.
    fn scatter(&self, state: &mut BackwardState) -> Result<()> {
        let BackwardState { buckets, parameters, .. } = state;
        for (bucket, scheduled) in buckets.iter_mut().enumerate() {
            scheduled.scatter(parameters).map_err(|expected| Error::CommHook {
                rank: job_rank(&self.group),
                bucket,
                reason: format!(
                    "it must return a tensor of one dimension and {expected} elements, as \
                     buffer() does"
                ),
            })?;
        }
        Ok(())
    }

    /// An error of the communication hook, or one that passed through it.
    fn hook_error(&self, bucket: usize, error: BoxError) -> Error {
        let rank = job_rank(&self.group);
        error.downcast::<flow_comm::Error>().map_or_else(
            |error| {
                error.downcast::<Error>().map_or_else(
                    |error| Error::CommHook { rank, bucket, reason: error.to_string() },
                    |error| *error,
                )
            },
            |error| Error::Comm(*error),
        )
    }

    /// Runs communication. If it fails because another rank misses gradients, that is noted and
    /// reported at the end of backward, when this rank knows which ones it misses itself.
    fn defer_missing_grads(
        &self,
        state: &mut BackwardState,
        communicate: impl FnOnce(&Self, &mut BackwardState) -> Result<()>,
    ) -> Result<()> {
        if state.peer_misses_grads {
            return Ok(());
        }
        match communicate(self, state) {
            Err(_) if self.group.awaits_error_details() => {
                state.peer_misses_grads = true;
                Ok(())
            }
            other => other,
        }
    }

    /// The end of backward: all gradients of this rank are there, or will not come.
    fn finish(&self) -> Result<()> {
        let mut state = self.state();
        let result = self.finish_buckets(&mut state);
        state.in_backward = false;
        // Also after an error: gradients must not be kept alive.
        self.drop_grads(&mut state, result.is_ok());
        let missing = result?;
        self.steps.end();
        if !std::mem::replace(&mut state.rebuilt, true) {
            self.rebuild(&mut state, missing)?;
        }
        Ok(())
    }

    /// Returns the parameters without a gradient.
    fn finish_buckets(&self, state: &mut BackwardState) -> Result<Vec<usize>> {
        let backward_end = Instant::now();
        self.path.record(BackwardEvent::EndOfBackward)?;
        let missing: Vec<usize> = (0..state.arrived.len()).filter(|&i| !state.arrived[i]).collect();
        if !missing.is_empty() && !self.options.find_unused {
            state.peer_misses_grads = true;
        }
        for &index in missing.iter().filter(|_| self.options.find_unused) {
            let (bucket, slot) = state.slots[index];
            let gradient = state.parameters[index].tensor.grad();
            if gradient.defined() {
                if self.options.bucket_view || self.path.grads_are_views() {
                    let apart = gradient.copy();
                    flow_autograd::set_grad(&state.parameters[index].tensor, Some(&apart))
                        .map_err(|e| self.in_backward(e))?;
                }
                // What earlier backwards under no_sync have left counts; it must not change before
                // all agree.
                state.buckets[bucket].mark_ready(slot, &gradient, false)?;
            } else {
                state.buckets[bucket].mark_unused(slot)?;
            }
        }
        let mut used: Vec<u8> = state.used.iter().map(|&used| u8::from(used)).collect();
        self.defer_missing_grads(state, |reducer, state| {
            reducer.launch(state)?;
            reducer.wait(state)?;
            if reducer.options.find_unused {
                let _wait = trace::wait(state.step.into(), None);
                reducer.group.all_reduce(&mut used, ReduceOp::Max)?;
            }
            Ok(())
        })?;
        if state.peer_misses_grads {
            return Err(self.missing_gradients(state, &missing));
        }
        self.path.join()?;
        self.scatter(state)?;
        for (index, _) in used.iter().enumerate().filter(|(_, used)| **used != 0) {
            state
                .write_back(index, &**self.path, self.options.bucket_view)
                .map_err(|e| self.in_backward(e))?;
        }
        state.used.fill(false);
        self.path.record(BackwardEvent::EndOfReduction)?;
        state.record(backward_end);
        Ok(missing)
    }

    /// Drops the buckets' gradients. libtorch may use their memory again once its stream waits for
    /// everything that reads it: `stream_joined`.
    fn drop_grads(&self, state: &mut BackwardState, stream_joined: bool) {
        let stream_joined = stream_joined || self.path.join().is_ok();
        state.buckets.iter_mut().for_each(|bucket| bucket.reset(stream_joined));
    }

    /// A backward of this rank fails, and with it the group: no rank is to wait for gradients that
    /// will not come.
    fn fail(&self, error: Error) -> BoxError {
        self.state().unusable = true;
        // All ranks know what each of them misses. If the group has failed for anything else, that
        // remains the cause.
        if !matches!(error, Error::MissingGradients { .. }) {
            self.group.abort(&error.to_string());
        }
        error.end_backward()
    }

    /// The error that lists the parameters without a gradient on all ranks, which all take part.
    fn missing_gradients(&self, state: &mut BackwardState, missing: &[usize]) -> Error {
        let name = |&index: &usize| {
            let parameter = &state.parameters[index];
            let frozen =
                if parameter.tensor.requires_grad() { "" } else { " (frozen after wrapping)" };
            format!("{}{frozen}", parameter.name)
        };
        let mut own = missing.iter().take(20).map(name).collect::<Vec<_>>().join(", ");
        if missing.len() > 20 {
            own += &format!(" and {} more", missing.len() - 20);
        }
        let missing = self.group.fail_and_collect("parameters got no gradient", &own);
        let missing: Vec<String> =
            missing.iter().map(|(rank, names)| format!("rank {rank}: {names}")).collect();
        Error::MissingGradients { rank: job_rank(&self.group), missing: missing.join("; ") }
    }

    /// Buckets in the order in which rank 0's gradients came; unused parameters last.
    fn rebuild(&self, state: &mut BackwardState, missing: Vec<usize>) -> Result<()> {
        let mut order: Vec<i32> =
            state.ready_order.iter().chain(&missing).map(|&i| i as i32).collect();
        self.defer_missing_grads(state, |reducer, state| {
            let _wait = trace::wait(state.step.into(), None);
            reducer.group.broadcast(&mut order, 0)?;
            // A rank that went on and failed would else take from slower ones what this backward
            // has done.
            Ok(reducer.group.barrier()?)
        })?;
        // On a GPU, a rank learns only here that another has failed in this backward.
        if state.peer_misses_grads {
            return Err(self.missing_gradients(state, &missing));
        }
        let order: Vec<usize> = order.into_iter().map(|i| i as usize).collect();
        if self.path.grads_are_views() {
            state.keep_grads_apart().map_err(|e| self.in_backward(e))?;
        }
        state.build(&**self.path, &self.options, &order)
    }

    fn state(&self) -> MutexGuard<'_, BackwardState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn in_backward(&self, error: flow_autograd::Error) -> Error {
        self.torch("backward", error.to_string())
    }

    fn torch(&self, operation: &'static str, reason: String) -> Error {
        Error::Torch { rank: job_rank(&self.group), operation, reason }
    }
}

/// Queued in the first hook of a backward. If backward fails before its end, the group is failed
/// with it.
struct EndOfBackward {
    reducer: Arc<Reducer>,
    reached: bool,
    /// In the timeline, from the first gradient until this is dropped.
    _phase: trace::Span,
}

impl EndOfBackward {
    fn run(mut self) -> Result<(), BoxError> {
        let finished = self.reducer.finish();
        // Not if that panics, in a hook of the user's for instance: then the group fails.
        self.reached = true;
        finished.map_err(|error| self.reducer.fail(error))
    }
}

impl Drop for EndOfBackward {
    fn drop(&mut self) {
        if !self.reached {
            let mut state = self.reducer.state();
            // If a hook of ours has failed, the group knows why. Any other error of a backward is
            // known to its caller alone.
            if !std::mem::replace(&mut state.unusable, true) {
                self.reducer.group.abort(
                    "its backward failed before all gradients were there, see its own error; to \
                     go on, all ranks drop their Ddp and wrap the model again",
                );
            }
            state.in_backward = false;
            self.reducer.drop_grads(&mut state, false);
        }
    }
}
