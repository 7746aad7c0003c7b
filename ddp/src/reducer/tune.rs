//! The trial of sizes of buckets, between backwards.

use flow_comm::{ReduceOp, trace};

use super::Reducer;
use crate::backward_state::BackwardState;
use crate::error::Result;
use crate::tuning::{Next, Tuning};

impl Reducer {
    /// Begins the trial, if there is to be one and there are several sizes to try.
    pub(super) fn begin_tuning(&self, state: &mut BackwardState) {
        if self.options.tune > 0 {
            let sizes = state.sizes_to_try(&self.options);
            state.tuning = Some(Tuning::new(sizes, self.options.tune)).filter(Tuning::has_a_choice);
        }
    }

    /// Goes on with the trial after a backward, on all ranks in the same step.
    pub(super) fn tune(&self, state: &mut BackwardState) -> Result<()> {
        self.defer_missing_grads(state, |state| self.end_trial_step(state))?;
        // On a GPU, a rank may learn only here that another has failed in this backward.
        if state.peer_misses_grads {
            return Err(self.missing_gradients(state, &[]));
        }
        Ok(())
    }

    fn end_trial_step(&self, state: &mut BackwardState) -> Result<()> {
        let Some(tuning) = &mut state.tuning else { return Ok(()) };
        // On a GPU the host is ahead: a step takes as long as what it has enqueued.
        self.path.synchronize()?;
        match tuning.end_step() {
            Next::Stay => Ok(()),
            Next::Try(caps) => {
                // A rank that went on and failed would else take from slower ones what this
                // backward has done.
                let _wait = trace::wait(state.step.into(), None);
                self.group.barrier()?;
                self.build(state, &caps)
            }
            Next::Decide(mut seconds) => {
                let _wait = trace::wait(state.step.into(), None);
                self.group.all_reduce(&mut seconds, ReduceOp::Avg)?;
                let caps = tuning.best(&seconds).clone();
                if self.group.rank() == 0 {
                    let times = seconds.iter().map(|seconds| format!("{:.3}", seconds * 1e3));
                    log::info!(
                        "tune: buckets of {:?} MiB; milliseconds of all sizes: {}",
                        caps.in_mib(),
                        times.collect::<Vec<_>>().join(", ")
                    );
                }
                state.tuning = None;
                self.build(state, &caps)
            }
        }
    }
}
