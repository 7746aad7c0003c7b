//! Gradients that are taken as soon as they are reduced. The optimizer applies them:
//! [`DdpBuilder::optimizer_in_backward`](crate::DdpBuilder::optimizer_in_backward) and
//! [`DdpBuilder::hook_with_zero_step`](crate::DdpBuilder::hook_with_zero_step). Or this rank keeps its
//! parts of them: [`Fsdp`](crate::Fsdp).

use flow_comm::trace;

use super::backward::Backward;
use crate::error::Result;

impl Backward<'_> {
    /// Applies the buckets that are reduced, in the middle of backward. Waits for all that were
    /// launched but the last, unless that is [large](Self::is_large_and_kept): there are then no more
    /// gradients than those of one bucket under way, and of the one that fills. Ranks whose backwards may
    /// differ do not wait: one that lacks a gradient launches its buckets at the end, and what comes before
    /// may be waiting for this rank.
    pub fn apply_reduced(&mut self) -> Result<()> {
        if self.reducer.optimizer.is_none() && self.reducer.kept.is_none() {
            return Ok(());
        }
        while self.state.applied < self.state.next {
            let index = self.state.applied;
            let bytes = self.state.buckets[index].memory.bytes();
            let is_last = index + 1 == self.state.next;
            let waits = !is_last || self.is_large_and_kept(bytes);
            let bucket = &mut self.state.buckets[index];
            // Whether any rank has used all of them is known at the end.
            if bucket.unused.contains(&true) {
                return Ok(());
            }
            let may_wait = waits && !self.reducer.options.find_unused;
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

    /// Whether a bucket of so many bytes has a large gradient of an [`Fsdp`](crate::Fsdp) on one machine. Beside the
    /// next bucket it would take much of the memory that all ranks save, and it is reduced in a short time.
    fn is_large_and_kept(&self, bytes: usize) -> bool {
        let group = &self.reducer.group;
        let is_on_machine = group.local_world_size() == group.world_size();
        self.reducer.kept.is_some()
            && is_on_machine
            && bytes > 2 * self.reducer.options.caps.largest()
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
