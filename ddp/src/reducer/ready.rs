//! A gradient that is ready goes to its bucket. A bucket that has all its gradients is launched when
//! its turn comes.

use std::sync::PoisonError;
use std::time::Instant;

use flow_comm::trace;
use tch::Tensor;

use super::backward::Backward;
use crate::bucket::comm_hook::GradBucket;
use crate::error::{Error, Result};

impl Backward<'_> {
    /// Takes the `.grad` of parameter `index`. `exclusive`: nothing else uses its memory.
    pub fn mark_ready(&mut self, index: usize, gradient: &Tensor, exclusive: bool) -> Result<()> {
        let counted = self.state.graph.as_mut().map_or(Ok(true), |graph| graph.count(index));
        let is_final = counted.map_err(|change| self.graph_changed(index, &change))?;
        if self.state.arrived[index] {
            return Err(self.model_error(format!(
                "{} got its gradient twice in one backward (a nested backward, as in \
                 checkpointing): its first part was already being reduced; build with \
                 static_graph(true), or run the parts under no_sync",
                self.state.parameters[index].name
            )));
        }
        if self.state.delayed[index] && is_final {
            self.state.waiting.insert(index);
            return Ok(());
        }
        self.state.ready_order.push(index);
        if !is_final {
            return Ok(());
        }
        self.take(index, gradient, exclusive)?;
        if self.state.delayed_until == Some(index) {
            self.take_waiting()?;
        }
        self.defer_missing_grads(|backward| {
            if !backward.reducer.launches_at_end {
                backward.launch()?;
            }
            backward.reducer.path.progress()?;
            backward.apply_reduced()
        })
    }

    /// Gives a final gradient to its bucket.
    fn take(&mut self, index: usize, gradient: &Tensor, exclusive: bool) -> Result<()> {
        self.state.arrived[index] = true;
        if trace::is_on() {
            self.state.came[index] = Some(Instant::now());
        }
        let resolved = self.state.parameters[index].resolved(gradient);
        let (gradient, stays) = resolved.map_err(|reason| self.model_error(reason))?;
        let (bucket, slot) = self.state.slots[index];
        let in_place =
            self.state.buckets[bucket].mark_ready(slot, &gradient, exclusive && stays)?;
        let is_view = self.reducer.path.grads_are_views();
        if !in_place && self.reducer.options.bucket_view && !is_view {
            self.state.alias_grad_to_bucket(index).map_err(|error| self.torch_error(error))?;
        }
        Ok(())
    }

    /// Gives the delayed gradients that have come to their buckets.
    pub fn take_waiting(&mut self) -> Result<()> {
        for index in std::mem::take(&mut self.state.waiting) {
            let gradient = self.state.parameters[index].tensor.grad();
            self.take(index, &gradient, false)?;
            self.state.ready_order.push(index);
        }
        Ok(())
    }

    /// Gives all gradients that have come to their buckets, in the order in which they came last.
    pub fn take_all(&mut self) -> Result<()> {
        let mut order = Vec::with_capacity(self.state.parameters.len());
        for index in std::mem::take(&mut self.state.ready_order).into_iter().rev() {
            if !self.state.arrived[index] {
                let gradient = self.state.parameters[index].tensor.grad();
                self.take(index, &gradient, false)?;
                order.push(index);
            }
        }
        order.reverse();
        self.state.ready_order = order;
        Ok(())
    }

    /// Marks parameters ready that got no gradient in this backward: with what earlier backwards
    /// under `no_sync` have left, or with zeros.
    pub fn fill_in(&mut self, missing: &[usize]) -> Result<()> {
        let grads_are_views =
            self.reducer.options.bucket_view || self.reducer.path.grads_are_views();
        for &index in missing {
            let (bucket, slot) = self.state.slots[index];
            self.state.buckets[bucket].unused[slot] = !self.state.is_used(index);
            let parameter = &self.state.parameters[index];
            let gradient = parameter.tensor.grad();
            if !gradient.defined() {
                self.state.buckets[bucket].mark_unused(slot)?;
                continue;
            }
            let resolved = parameter.resolved(&gradient);
            let (gradient, _) = resolved.map_err(|reason| self.model_error(reason))?;
            if !parameter.is_sparse && grads_are_views {
                let apart = gradient.copy();
                parameter.set_grad(&apart).map_err(|error| self.torch_error(error))?;
            }
            // Not in place: `.grad` must not change before all ranks agree which were used.
            self.state.buckets[bucket].mark_ready(slot, &gradient, false)?;
        }
        Ok(())
    }

    /// Launches the ready buckets whose turn it is.
    pub fn launch(&mut self) -> Result<()> {
        let Self { reducer, state } = self;
        let last = state.buckets.iter().rposition(|bucket| !bucket.memory.waits_for_ranks());
        while let Some(scheduled) = state.buckets.get_mut(state.next).filter(|b| b.missing == 0) {
            if scheduled.memory.waits_for_ranks() {
                scheduled.pending = Some(scheduled.memory.launch()?);
                state.next += 1;
                continue;
            }
            let mut bucket = GradBucket {
                index: state.next,
                is_last: Some(state.next) == last,
                memory: &mut *scheduled.memory,
                members: &scheduled.members,
                unused: &scheduled.unused,
                parameters: &state.parameters,
                path: &**reducer.path,
                group: &reducer.group,
            };
            let mut hook = reducer.comm_hook.lock().unwrap_or_else(PoisonError::into_inner);
            let pending = hook.launch(&mut bucket);
            scheduled.pending =
                Some(pending.map_err(|error| Error::of_hook(&reducer.group, state.next, error))?);
            state.next += 1;
        }
        Ok(())
    }

    /// Runs `communicate`. If it fails because another rank misses gradients, that is noted and
    /// reported at the end of backward. This rank knows by then which ones it misses itself.
    pub fn defer_missing_grads(
        &mut self,
        communicate: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<()> {
        if self.state.peer_misses_grads {
            return Ok(());
        }
        let result = communicate(self);
        if result.is_err() && self.reducer.group.awaits_error_details() {
            self.state.peer_misses_grads = true;
            return Ok(());
        }
        result
    }
}
