//! How a backward begins and ends. Its end waits for the buckets, gives the reduced gradients to the
//! parameters, and after the first backward builds the buckets anew.

use std::sync::{Arc, MutexGuard};
use std::time::Instant;

use flow_autograd::BoxError;
use flow_comm::{ReduceOp, trace};

use super::Reducer;
use crate::backward_state::BackwardState;
use crate::bucket::BackwardEvent;
use crate::bucket::assignment::Caps;
use crate::error::{Error, Result, job_rank};
use crate::join::joining::Joining;
use crate::parameter::names_of;
use crate::static_graph::StaticGraph;

/// A callback at the end of a backward, queued in its first hook. If backward fails before its end,
/// the group fails too.
struct EndOfBackward {
    reducer: Arc<Reducer>,
    reached: bool,
    /// In the timeline, from the first gradient until this is dropped.
    _phase: trace::Span,
}

impl EndOfBackward {
    /// Queues the callback, in the first hook of the backward of `step`.
    fn queue(reducer: &Arc<Reducer>, step: u32) -> Result<(), flow_autograd::Error> {
        let end = Self {
            reducer: Arc::clone(reducer),
            reached: false,
            _phase: trace::phase(trace::Phase::Backward, step.into()),
        };
        flow_autograd::at_end_of_backward(move || end.run())
    }

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
            if !state.unusable {
                self.reducer.fail_groups(
                    "its backward failed before all gradients were there, see its own error; to \
                     go on, all ranks drop their Ddp and wrap the model again",
                );
            }
            state.unusable = true;
            state.in_backward = false;
            self.reducer.drop_grads(&mut state, false);
        }
    }
}

impl Reducer {
    /// Begins a backward with its first gradient, and queues what is done at its end.
    pub(super) fn begin_backward<'a>(
        self: &'a Arc<Self>,
        mut state: MutexGuard<'a, BackwardState>,
    ) -> Result<MutexGuard<'a, BackwardState>> {
        let step = self.steps.begin();
        if let Some(join) = &mut state.join {
            join.begin_backward(step)?;
        }
        state.begin(step);
        // Unlocked: if the callback is refused it is dropped, and locks the state for that.
        drop(state);
        EndOfBackward::queue(self, step).map_err(|error| self.in_backward(error))?;
        let mut state = self.state();
        // From here on an error of this rank alone reaches the others.
        self.path.record(BackwardEvent::FirstGradient)?;
        if let Some(optimizer) = &self.optimizer {
            optimizer.begin()?;
        }
        if let Some(parameter) = state.frozen.iter().find(|p| p.tensor.requires_grad()) {
            return Err(self.model_error(format!(
                "{} was frozen when the model was wrapped and is not now: call refresh, or wrap it \
                 again",
                parameter.name
            )));
        }
        if let Some(name) = self.added.get().and_then(|added| added()) {
            return Err(self.model_error(format!(
                "{name} was added after the model was wrapped: wrap it again, or, if it is \
                 another model's, keep that in a VarStore of its own"
            )));
        }
        let unused = state.graph.as_ref().map(StaticGraph::unused_here).unwrap_or_default();
        self.fill_in(&mut state, &unused)?;
        Ok(state)
    }

    /// Ends a backward: all gradients of this rank are there, or will not come.
    fn finish(&self) -> Result<()> {
        let mut state = self.state();
        let reduced = self.finish_buckets(&mut state);
        self.end(&mut state, reduced)
    }

    /// Ends a backward whose buckets are `reduced`: with the parameters without a gradient.
    pub(super) fn end(&self, state: &mut BackwardState, reduced: Result<Vec<usize>>) -> Result<()> {
        state.in_backward = false;
        // Also after an error: gradients must not be kept alive.
        self.drop_grads(state, reduced.is_ok());
        let missing = reduced?;
        self.steps.end();
        if !state.rebuilt {
            state.rebuilt = true;
            self.rebuild(state, missing)?;
            self.begin_tuning(state);
            return Ok(());
        }
        self.tune(state)
    }

    /// Waits for all buckets and gives the reduced gradients to the parameters. Returns the
    /// parameters without a gradient.
    fn finish_buckets(&self, state: &mut BackwardState) -> Result<Vec<usize>> {
        let backward_end = Instant::now();
        self.path.record(BackwardEvent::EndOfBackward)?;
        self.defer_missing_grads(state, |state| {
            state.join.as_mut().map_or(Ok(()), Joining::end_backward)
        })?;
        let learns = state.graph.as_ref().is_some_and(|graph| !graph.is_learnt());
        if learns {
            self.take_all(state)?;
        }
        self.take_waiting(state)?;
        let missing = match state.graph.as_ref().filter(|graph| graph.is_learnt()) {
            Some(graph) => graph.lacking(),
            None => (0..state.arrived.len()).filter(|&i| !state.arrived[i]).collect(),
        };
        let finds_unused = learns || (self.options.find_unused && state.graph.is_none());
        if finds_unused {
            self.fill_in(state, &missing)?;
        } else if !missing.is_empty() {
            state.peer_misses_grads = true;
        }
        let mut used = Vec::with_capacity(state.parameters.len());
        for (index, &arrived) in state.arrived.iter().enumerate() {
            used.push(u8::from(arrived || state.is_used(index)));
        }
        self.reduce(state, &missing, finds_unused.then_some(&mut used))?;
        self.scatter(state)?;
        let mut used: Vec<bool> = used.into_iter().map(|used| used != 0).collect();
        if let Some(graph) = &mut state.graph {
            used = graph.learn(used).to_vec();
        }
        for (index, &used) in used.iter().enumerate() {
            if used && !state.is_applied(index) {
                self.hand_back(state, index)?;
                if let Some(scale) = state.join.as_ref().and_then(Joining::scale) {
                    let _ = tch::no_grad(|| state.parameters[index].grad().g_mul_scalar_(scale));
                }
            }
        }
        state.used.fill(false);
        if let Some(optimizer) = &self.optimizer {
            self.defer_missing_grads(state, |_| optimizer.finish())?;
            // On a GPU, a rank may learn only here that another has failed in this backward.
            if state.peer_misses_grads {
                return Err(self.missing_gradients(state, &missing));
            }
        }
        self.path.record(BackwardEvent::EndOfReduction)?;
        state.record(backward_end);
        if trace::is_on() && state.is_described() {
            let buckets = state.bucket_tensors(&self.options, backward_end);
            self.group.trace_buckets(state.step.into(), buckets);
        }
        Ok(missing)
    }

    /// Launches the remaining buckets, and waits until all are reduced. `used`: which parameters this
    /// rank uses, and then some rank. `missing`: parameters whose gradients this rank lacks.
    pub(super) fn reduce(
        &self,
        state: &mut BackwardState,
        missing: &[usize],
        used: Option<&mut Vec<u8>>,
    ) -> Result<()> {
        self.defer_missing_grads(state, |state| {
            self.launch(state)?;
            self.wait(state)?;
            if let Some(used) = used {
                let _wait = trace::wait(state.step.into(), None);
                self.group.all_reduce(used, ReduceOp::Max)?;
            }
            Ok(())
        })?;
        if state.peer_misses_grads {
            return Err(self.missing_gradients(state, missing));
        }
        self.path.join()
    }

    /// Waits until all launched buckets are reduced.
    fn wait(&self, state: &mut BackwardState) -> Result<()> {
        for (index, bucket) in state.buckets.iter_mut().enumerate() {
            let _wait = trace::wait(state.step.into(), index as u32);
            let waited = bucket.wait(&**self.path, &self.group);
            waited.map_err(|error| Error::of_hook(&self.group, index, error))?;
        }
        Ok(())
    }

    /// Puts what the communication hook has made of buckets where reduced gradients are.
    fn scatter(&self, state: &mut BackwardState) -> Result<()> {
        for (bucket, scheduled) in state.buckets.iter_mut().enumerate() {
            scheduled.scatter(&state.parameters).map_err(|expected| Error::CommHook {
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

    /// Collects the parameters without a gradient of all ranks, which all call this, into an error.
    pub(super) fn missing_gradients(&self, state: &BackwardState, missing: &[usize]) -> Error {
        let of_this_rank = names_of(&state.parameters, missing);
        let operation = "parameters got no gradient";
        self.group.await_error_details(operation, &of_this_rank);
        // Only now, so that whoever waits there finds out why. On another machine it may not know yet.
        self.fail_other_groups(&format!("{operation}: {of_this_rank}"));
        let of_ranks = self.group.collect_error_details();
        let lines: Vec<String> =
            of_ranks.iter().map(|(rank, names)| format!("rank {rank}: {names}")).collect();
        let advice = if state.graph.is_some() {
            "the graph is not that of the first backward: build without static_graph(true), or call \
             refresh where parameters were frozen"
        } else {
            "use every parameter in computing the loss, or freeze those parameters before wrapping \
             or call refresh after, or build with find_unused_parameters(true)"
        };
        Error::MissingGradients { rank: job_rank(&self.group), missing: lines.join("; "), advice }
    }

    /// Makes the buckets anew, in the order in which rank 0's gradients came, or in a join those of a
    /// rank that has not ended; unused parameters are last.
    fn rebuild(&self, state: &mut BackwardState, missing: Vec<usize>) -> Result<()> {
        let mut order: Vec<i32> = Vec::with_capacity(state.parameters.len());
        for &index in state.ready_order.iter().chain(&missing) {
            if !state.graph.as_ref().is_some_and(|graph| graph.is_left_out(index)) {
                order.push(index as i32);
            }
        }
        self.defer_missing_grads(state, |state| {
            let _wait = trace::wait(state.step.into(), None);
            let root = state.join.as_ref().map_or(0, Joining::root);
            self.group.broadcast(&mut order, root)?;
            // A rank that went on and failed would else take from slower ones what this backward
            // has done.
            Ok(self.group.barrier()?)
        })?;
        // On a GPU, a rank learns only here that another has failed in this backward.
        if state.peer_misses_grads {
            return Err(self.missing_gradients(state, &missing));
        }
        state.order = order.into_iter().map(|i| i as usize).collect();
        self.build(state, &self.options.caps)
    }

    /// Makes the buckets anew, with these caps.
    pub(super) fn build(&self, state: &mut BackwardState, caps: &Caps) -> Result<()> {
        if self.path.grads_are_views() {
            state.keep_grads_apart().map_err(|error| self.in_backward(error))?;
        }
        let order = std::mem::take(&mut state.order);
        let built = state.build(&**self.path, &self.options, &order, caps);
        state.order = order;
        built
    }

    /// Drops the buckets' gradients. libtorch may use their memory again once its stream waits for
    /// everything that reads it: `stream_joined`.
    fn drop_grads(&self, state: &mut BackwardState, stream_joined: bool) {
        let stream_joined = stream_joined || self.path.join().is_ok();
        state.buckets.iter_mut().for_each(|bucket| bucket.reset(stream_joined));
    }
}
