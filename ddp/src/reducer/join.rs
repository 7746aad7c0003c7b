//! A model's reducer in a join: it says what it is about to communicate, and reduces zeros where
//! this rank has ended.

use std::sync::atomic::Ordering;

use flow_tensor::CoalescedBroadcast;

use super::Reducer;
use super::backward::Backward;
use crate::error::{Error, Result, job_rank};
use crate::join::JoinContext;
use crate::join::joining::{BUFFERS, FORWARD, Joining, root_of};

impl Reducer {
    /// Begins a join.
    pub fn begin_join(&self, context: JoinContext) -> Result<()> {
        if self.options.static_graph {
            return Err(self.not_joined(
                "build without static_graph(true): the first backward shows the graph, which ranks \
                 that have ended do not run",
            ));
        }
        if self.virtual_ranks.is_some() {
            return Err(self.not_joined(
                "build without virtual_ranks: all of them take each step, so give all as many inputs",
            ));
        }
        if self.kept.is_some() {
            return Err(self.not_joined(
                "it is that of an Fsdp, whose ranks step parts: give all ranks as many inputs",
            ));
        }
        if let Some(optimizer) = &self.optimizer {
            return Err(self.not_joined(&format!(
                "build without {}: the optimizer of a rank that has ended would take no steps",
                optimizer.option()
            )));
        }
        if self.apart.is_some() && !context.options().divide_by_initial_world_size {
            return Err(self.not_joined(
                "set divide_by_initial_world_size, or build without PostLocalSgd: the communication hook \
                 does not average over all ranks, and nobody knows how many of its ranks have ended",
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
        let ranks = self.group.world_size();
        state.join = Some(Joining::new(context, ranks, waits, step));
        self.is_joined.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Ends a join. The steps of all ranks are equal again.
    pub fn end_join(&self) {
        if self.state.is_ours()
            && let Some(join) = self.state().join.take()
        {
            self.is_joined.store(false, Ordering::Relaxed);
            self.steps.go_on_after(join.step());
            // The join has failed: no rank is to wait for this one.
            if let Err(error) = self.group.check("join") {
                self.fail_other_groups(&error.to_string());
            }
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

    /// Returns whether the model is in a join.
    pub fn is_joined(&self) -> bool {
        self.is_joined.load(Ordering::Relaxed)
    }

    fn join_context(&self) -> Option<JoinContext> {
        if !self.is_joined() {
            return None;
        }
        self.state().join.as_ref().map(|join| join.context().clone())
    }

    /// Takes part in a backward of the ranks in `active`: with zeros, which no parameter gets.
    pub fn shadow_backward(&self, step: u32, active: &[usize]) -> Result<()> {
        let state = &mut *self.state();
        if let Some(join) = &mut state.join {
            let were_apart = join.shadow_backward(step, active);
            if !were_apart && (self.options.bucket_view || self.path.grads_are_views()) {
                state.keep_grads_apart().map_err(|error| self.torch_error(error))?;
            }
        }
        // As long as it has not come to its end: a hook of the user's may panic.
        state.unusable = true;
        state.begin(step);
        let mut backward = Backward::new(self, state);
        let reduced = backward.shadow_buckets();
        backward.end(reduced)?;
        state.unusable = false;
        Ok(())
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
            buffers.run(&self.group, root)?;
        }
        Ok(())
    }

    fn not_joined(&self, reason: &str) -> Error {
        Error::Join { rank: job_rank(&self.group), reason: reason.to_owned() }
    }
}

impl Backward<'_> {
    /// Reduces zeros. Returns the parameters without a gradient: all.
    fn shadow_buckets(&mut self) -> Result<Vec<usize>> {
        for bucket in &mut self.state.buckets {
            bucket.unused.fill(true);
            for slot in 0..bucket.members.len() {
                bucket.mark_unused(slot)?;
            }
        }
        let mut used = vec![0; self.state.parameters.len()];
        self.reduce(&[], self.reducer.options.find_unused.then_some(&mut used))?;
        Ok((0..self.state.parameters.len()).collect())
    }
}
