//! A model's reducer in a join: it says what it is about to communicate, and reduces zeros where
//! this rank has ended.

use std::sync::atomic::Ordering;

use flow_tensor::CoalescedBroadcast;

use super::Reducer;
use crate::backward_state::BackwardState;
use crate::error::{Error, Result, job_rank};
use crate::join::JoinContext;

/// What a reducer is about to do, as the code of a notice. The code of a backward is its step.
pub(crate) const FORWARD: i64 = -1;
pub(crate) const BUFFERS: i64 = 0;

/// A join under way.
pub(crate) struct Joining {
    context: JoinContext,
    /// All ranks, those that have ended too.
    ranks: usize,
    /// A backward begins with waiting for the other ranks to begin it.
    waits: bool,
    /// A backward is under way whose notice is not complete.
    is_announced: bool,
    /// The last step that has begun.
    step: u32,
    /// The rank whose buffers, and whose order of gradients, are all ranks': the last one that has
    /// not ended.
    root: usize,
    /// The factor that makes a mean over all ranks one over those that have not ended.
    scale: Option<f64>,
    /// Gradients are no views of buckets, which reduce zeros.
    grads_are_apart: bool,
}

impl Joining {
    /// Tells the ranks that have ended that a backward begins.
    pub fn begin_backward(&mut self, step: u32) -> Result<()> {
        self.context.begin_backward(step.into())?;
        self.is_announced = true;
        if self.waits {
            self.wait_for_ranks()?;
        }
        self.step = step;
        Ok(())
    }

    /// Waits for the other ranks to begin the backward, at whose end this is called.
    pub fn end_backward(&mut self) -> Result<()> {
        self.wait_for_ranks()?;
        self.context.end_backward();
        Ok(())
    }

    fn wait_for_ranks(&mut self) -> Result<()> {
        if !std::mem::take(&mut self.is_announced) {
            return Ok(());
        }
        let active = self.context.complete()?;
        self.root = root_of(&active);
        self.scale = None;
        if !self.context.options().divide_by_initial_world_size && active.len() < self.ranks {
            self.scale = Some(self.ranks as f64 / active.len() as f64);
        }
        Ok(())
    }

    /// Returns the rank whose order of gradients is all ranks'.
    pub fn root(&self) -> usize {
        self.root
    }

    /// Returns the factor of gradients that are averaged over all ranks, if it is not 1.
    pub fn scale(&self) -> Option<f64> {
        self.scale
    }
}

/// Returns the rank whose values are all ranks': as in PyTorch the last one.
pub(crate) fn root_of(active: &[usize]) -> usize {
    active.last().copied().unwrap_or_default()
}

impl Reducer {
    /// Begins a join.
    pub fn begin_join(&self, context: JoinContext) -> Result<()> {
        if self.options.static_graph {
            return Err(self.not_joined(
                "build without static_graph(true): the first backward shows the graph, which ranks \
                 that have ended do not run",
            ));
        }
        let mut state = self.state();
        if state.join.is_some() {
            return Err(self.not_joined("the model is in a join already: give it to one, once"));
        }
        // Notices come with the buckets if the host reduces both in one group. Elsewhere a hook that
        // waits for ranks would keep them from coming.
        let waits = context.options().throw_on_early_termination
            || self.path.grads_are_views()
            || *context.group() != self.group;
        let step = self.steps.close();
        state.join = Some(Joining {
            ranks: self.group.world_size(),
            waits,
            context,
            is_announced: false,
            step,
            root: 0,
            scale: None,
            grads_are_apart: false,
        });
        self.is_joined.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Ends a join. The steps of all ranks are equal again.
    pub fn end_join(&self) {
        if self.state.is_ours()
            && let Some(join) = self.state().join.take()
        {
            self.is_joined.store(false, Ordering::Relaxed);
            self.steps.go_on_after(join.step);
        }
    }

    /// Finds ranks that have ended early before a forward in training mode, whose own collectives
    /// they would leave out.
    pub fn announce_forward(&self) -> Result<()> {
        let context = self.join_context();
        if let Some(context) = context
            && context.options().throw_on_early_termination
        {
            context.notify(FORWARD)?;
        }
        Ok(())
    }

    /// Tells the ranks that have ended that buffers are broadcast. Returns the rank whose buffers
    /// are all ranks'.
    pub fn announce_buffers(&self) -> Result<usize> {
        let context = self.join_context();
        context.map_or(Ok(0), |context| Ok(root_of(&context.notify(BUFFERS)?)))
    }

    fn join_context(&self) -> Option<JoinContext> {
        if !self.is_joined.load(Ordering::Relaxed) {
            return None;
        }
        self.state().join.as_ref().map(|join| join.context.clone())
    }

    /// Takes part in a backward of the ranks in `active`: with zeros, which no parameter gets.
    pub fn shadow_backward(&self, step: u32, active: &[usize]) -> Result<()> {
        let state = &mut *self.state();
        if let Some(join) = &mut state.join {
            join.step = step;
            join.root = root_of(active);
            let were_apart = std::mem::replace(&mut join.grads_are_apart, true);
            if !were_apart && (self.options.bucket_view || self.path.grads_are_views()) {
                state.keep_grads_apart().map_err(|error| self.in_backward(error))?;
            }
        }
        // As long as it has not come to its end: a hook of the user's may panic.
        state.unusable = true;
        state.begin(step);
        let reduced = self.shadow_buckets(state);
        self.end(state, reduced)?;
        state.unusable = false;
        Ok(())
    }

    /// Reduces zeros. Returns the parameters without a gradient: all.
    fn shadow_buckets(&self, state: &mut BackwardState) -> Result<Vec<usize>> {
        for bucket in &mut state.buckets {
            bucket.unused.fill(true);
            for slot in 0..bucket.members.len() {
                bucket.mark_unused(slot)?;
            }
        }
        let mut used = vec![0; state.parameters.len()];
        self.reduce(state, &[], self.options.find_unused.then_some(&mut used))?;
        Ok((0..state.parameters.len()).collect())
    }

    /// Gives all ranks the parameters and buffers of the last of these.
    pub fn broadcast_model(
        &self,
        last_joiners: &[usize],
        buffers: &mut CoalescedBroadcast,
    ) -> Result<()> {
        let root = root_of(last_joiners);
        CoalescedBroadcast::new(&self.group, self.named_parameters())?.run(&self.group, root)?;
        if !buffers.is_empty() {
            self.broadcast(buffers, root)?;
        }
        Ok(())
    }

    fn not_joined(&self, reason: &str) -> Error {
        Error::Join { rank: job_rank(&self.group), reason: reason.to_owned() }
    }
}
