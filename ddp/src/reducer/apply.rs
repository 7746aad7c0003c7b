//! Gradients that are taken as soon as they are reduced. The optimizer applies them:
//! [`DdpBuilder::optimizer_in_backward`](crate::DdpBuilder::optimizer_in_backward) and
//! [`DdpBuilder::hook_with_zero_step`](crate::DdpBuilder::hook_with_zero_step). Or this rank keeps its
//! parts of them: [`Fsdp`](crate::Fsdp).

use flow_comm::trace;

use super::backward::Backward;
use crate::error::Result;

impl Backward<'_> {
    /// Applies the buckets that are reduced, in the middle of backward. Waits for all that were
    /// launched but the last: there are then no more gradients than those of one bucket under way,
    /// and of the one that fills. Ranks whose backwards may differ do not wait: one that lacks a
    /// gradient launches its buckets at the end, and what comes before may be waiting for this rank.
    pub fn apply_reduced(&mut self) -> Result<()> {
        if self.reducer.optimizer.is_none() && self.reducer.kept.is_none() {
            return Ok(());
        }
        while self.state.applied < self.state.next {
            let index = self.state.applied;
            let bucket = &mut self.state.buckets[index];
            // Whether any rank has used all of them is known at the end.
            if bucket.unused.contains(&true) {
                return Ok(());
            }
            let may_wait = !self.reducer.options.find_unused && index + 1 < self.state.next;
            let wait = may_wait.then(|| trace::wait(self.state.step.into(), index as u32));
            if !bucket.finish_early(may_wait)? {
                return Ok(());
            }
            drop(wait);
            for &member in &self.state.buckets[index].members {
                self.hand_back(member)?;
            }
            self.state.applied += 1;
        }
        Ok(())
    }

    /// Makes `.grad` of a parameter the reduced gradient, and has the optimizer apply it, if there is
    /// one; or keeps this rank's part of it.
    pub fn hand_back(&self, index: usize) -> Result<()> {
        if let Some(kept) = &self.reducer.kept {
            let (bucket, slot) = self.state.slots[index];
            let part = self.state.buckets[bucket].memory.reduced_grad(slot);
            let kept = kept.keep(&self.state.parameters[index], part);
            return kept.map_err(|error| self.torch_error(error));
        }
        self.state
            .write_back(index, &**self.reducer.path, self.reducer.options.bucket_view)
            .map_err(|error| self.torch_error(error))?;
        match &self.reducer.optimizer {
            Some(optimizer) => optimizer.step(&self.state.parameters[index]),
            None => Ok(()),
        }
    }
}
