//! Gradients that the optimizer applies as soon as they are reduced:
//! [`DdpBuilder::optimizer_in_backward`](crate::DdpBuilder::optimizer_in_backward) and
//! [`DdpBuilder::hook_with_zero_step`](crate::DdpBuilder::hook_with_zero_step).

use flow_comm::trace;

use super::Reducer;
use crate::backward_state::BackwardState;
use crate::error::Result;

impl Reducer {
    /// Applies the buckets that are reduced, in the middle of backward. Waits for all that were
    /// launched but the last: there are then no more gradients than those of one bucket under way,
    /// and of the one that fills. Ranks whose backwards may differ do not wait: one that lacks a
    /// gradient launches its buckets at the end, and what comes before may be waiting for this rank.
    pub(super) fn apply_reduced(&self, state: &mut BackwardState) -> Result<()> {
        if self.optimizer.is_none() {
            return Ok(());
        }
        while state.applied < state.next {
            let index = state.applied;
            let bucket = &mut state.buckets[index];
            // Whether any rank has used all of them is known at the end.
            if bucket.unused.contains(&true) {
                return Ok(());
            }
            let may_wait = !self.options.find_unused && index + 1 < state.next;
            let wait = may_wait.then(|| trace::wait(state.step.into(), index as u32));
            if !bucket.finish_early(may_wait)? {
                return Ok(());
            }
            drop(wait);
            for member in bucket.members.clone() {
                self.hand_back(state, member)?;
            }
            state.applied += 1;
        }
        Ok(())
    }

    /// Makes `.grad` of a parameter the reduced gradient, and has the optimizer apply it, if there is
    /// one.
    pub(super) fn hand_back(&self, state: &BackwardState, index: usize) -> Result<()> {
        state
            .write_back(index, &**self.path, self.options.bucket_view)
            .map_err(|error| self.in_backward(error))?;
        match &self.optimizer {
            Some(optimizer) => optimizer.step(&state.parameters[index]),
            None => Ok(()),
        }
    }
}
