//! How a backward begins and ends. Its first gradient queues a callback, which libtorch calls at its
//! end.

use std::sync::{Arc, MutexGuard};

use flow_autograd::BoxError;
use flow_comm::trace;
use tch::Tensor;

use super::Reducer;
use crate::backward_state::BackwardState;
use crate::bucket::BackwardEvent;
use crate::error::{Error, Result};
use crate::static_graph::StaticGraph;
use crate::virtual_ranks::own::OwnVirtualRanks;

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
        let finished = Backward::new(&self.reducer, &mut self.reducer.state()).finish();
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
            Backward::new(&self.reducer, &mut state).drop_grads(false);
        }
    }
}

impl Reducer {
    /// Takes a gradient that is ready. The first one of a backward begins the backward.
    pub(super) fn mark_ready(
        self: &Arc<Self>,
        index: usize,
        gradient: &Tensor,
        exclusive: bool,
    ) -> Result<()> {
        if self.virtual_ranks.as_ref().is_some_and(|own| !own.is_running()) {
            let reason = "a backward outside of in_virtual_rank, with virtual_ranks".to_owned();
            return Err(Error::model(&self.group, reason));
        }
        let mut state = self.state();
        state.used[index] = true;
        if state.graph.as_ref().is_some_and(|graph| graph.is_left_out(index)) {
            let change = "has got a gradient, and got none on any rank before the first reduction";
            return Err(Backward::new(self, &mut state).graph_changed(index, change));
        }
        if state.local > 0 {
            if self.virtual_ranks.as_ref().is_some_and(OwnVirtualRanks::has_reduced) {
                drop(state);
                let reason =
                    "a backward under no_sync after the one that reduces, with virtual_ranks";
                return Err(Error::model(&self.group, reason.to_owned()));
            }
            return Ok(());
        }
        if state.unusable {
            self.group.check("backward")?;
        }
        if !state.in_backward {
            state = self.begin_backward(state)?;
        }
        let sum = self.virtual_ranks.as_ref().and_then(|own| own.sum(index, gradient));
        let Some(sum) = sum else {
            return Backward::new(self, &mut state).mark_ready(index, gradient, exclusive);
        };
        flow_autograd::set_grad(&state.parameters[index].tensor, Some(&sum))
            .map_err(|error| self.torch_error(error))?;
        Backward::new(self, &mut state).mark_ready(index, &sum, true)
    }

    /// Begins a backward with its first gradient, and queues what is done at its end.
    fn begin_backward<'a>(
        self: &'a Arc<Self>,
        mut state: MutexGuard<'a, BackwardState>,
    ) -> Result<MutexGuard<'a, BackwardState>> {
        let begun = self.virtual_ranks.as_ref().map_or(Ok(()), |own| own.begin_backward());
        begun.map_err(|reason| Error::model(&self.group, reason))?;
        let step = self.steps.begin();
        if let Some(join) = &mut state.join {
            join.begin_backward(step)?;
        }
        state.begin(step);
        // Unlocked: if the callback is refused it is dropped, and locks the state for that.
        drop(state);
        EndOfBackward::queue(self, step).map_err(|error| self.torch_error(error))?;
        let mut state = self.state();
        Backward::new(self, &mut state).begin()?;
        Ok(state)
    }
}

/// One backward of a reducer, which has locked its state for it.
pub(super) struct Backward<'a> {
    pub reducer: &'a Reducer,
    pub state: &'a mut BackwardState,
}

impl<'a> Backward<'a> {
    pub fn new(reducer: &'a Reducer, state: &'a mut BackwardState) -> Self {
        Self { reducer, state }
    }

    /// Begins: the first gradient has come, and the end is queued.
    fn begin(&mut self) -> Result<()> {
        // From here on an error of this rank alone reaches the others.
        self.reducer.path.record(BackwardEvent::FirstGradient)?;
        if let Some(optimizer) = &self.reducer.optimizer {
            optimizer.begin()?;
        }
        if let Some(kept) = &self.reducer.kept {
            kept.check_use().map_err(|reason| Error::fsdp(&self.reducer.group, reason))?;
        }
        if let Some(parameter) = self.state.frozen.iter().find(|p| p.tensor.requires_grad()) {
            return Err(self.model_error(format!(
                "{} was frozen when the model was wrapped and is not now: call refresh, or wrap it \
                 again",
                parameter.name
            )));
        }
        if let Some(name) = self.reducer.added.get().and_then(|added| added()) {
            return Err(self.model_error(format!(
                "{name} was added after the model was wrapped: wrap it again, or, if it is \
                 another model's, keep that in a VarStore of its own"
            )));
        }
        let unused = self.state.graph.as_ref().map(StaticGraph::unused_here).unwrap_or_default();
        self.fill_in(&unused)
    }

    /// Ends: all gradients of this rank are there, or will not come.
    fn finish(&mut self) -> Result<()> {
        let reduced = self.finish_buckets();
        self.end(reduced)
    }

    /// Ends a backward whose buckets are `reduced`: with the parameters without a gradient.
    pub fn end(&mut self, reduced: Result<Vec<usize>>) -> Result<()> {
        self.state.in_backward = false;
        // Also after an error: gradients must not be kept alive.
        self.drop_grads(reduced.is_ok());
        let missing = reduced?;
        self.reducer.steps.end();
        if !self.state.rebuilt {
            self.state.rebuilt = true;
            self.rebuild(missing)?;
            self.begin_tuning();
            return Ok(());
        }
        self.tune()
    }

    /// Drops the buckets' gradients. libtorch may use their memory again once its stream waits for
    /// everything that reads it: `stream_joined`.
    fn drop_grads(&mut self, stream_joined: bool) {
        let stream_joined = stream_joined || self.reducer.path.join().is_ok();
        self.state.buckets.iter_mut().for_each(|bucket| bucket.reset(stream_joined));
    }

    /// Makes an error of a parameter whose gradients are not those of the first backward.
    pub fn graph_changed(&self, index: usize, change: &str) -> Error {
        let name = &self.state.parameters[index].name;
        self.model_error(format!(
            "{name} {change}: static_graph(true) is for models that use the same parameters as often \
             in each backward; build without it"
        ))
    }

    pub fn model_error(&self, reason: String) -> Error {
        Error::model(&self.reducer.group, reason)
    }

    pub fn torch_error(&self, error: flow_autograd::Error) -> Error {
        self.reducer.torch_error(error)
    }
}
