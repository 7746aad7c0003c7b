//! The trial of sizes of buckets, between backwards.

use flow_comm::{ReduceOp, trace};

use super::backward::Backward;
use crate::error::Result;
use crate::tuning::{Next, Tuning};

impl Backward<'_> {
    /// Begins the trial, if there is to be one and there are several sizes to try.
    pub fn begin_tuning(&mut self) {
        let options = &self.reducer.options;
        if options.tune > 0 {
            let sizes = self.state.sizes_to_try(options);
            self.state.tuning = Some(Tuning::new(sizes, options.tune)).filter(Tuning::has_a_choice);
        }
    }

    /// Goes on with the trial after a backward, on all ranks in the same step.
    pub fn tune(&mut self) -> Result<()> {
        self.defer_missing_grads(Self::end_trial_step)?;
        // On a GPU, a rank may learn only here that another has failed in this backward.
        self.check_gradients(&[])
    }

    fn end_trial_step(&mut self) -> Result<()> {
        let Self { reducer, state } = self;
        let Some(tuning) = &mut state.tuning else { return Ok(()) };
        // On a GPU the host is ahead: a step takes as long as what it has enqueued.
        reducer.path.synchronize()?;
        match tuning.end_step() {
            Next::Stay => Ok(()),
            Next::Try(caps) => {
                // A rank that went on and failed would else take from slower ones what this
                // backward has done.
                let _wait = trace::wait(state.step.into(), None);
                reducer.group.barrier()?;
                self.build(&caps)
            }
            Next::Decide(mut seconds) => {
                let _wait = trace::wait(state.step.into(), None);
                reducer.group.all_reduce(&mut seconds, ReduceOp::Avg)?;
                let caps = tuning.best(&seconds).clone();
                if reducer.group.rank() == 0 {
                    let times = seconds.iter().map(|seconds| format!("{:.3}", seconds * 1e3));
                    log::info!(
                        "tune: buckets of {:?} MiB; milliseconds of all sizes: {}",
                        caps.in_mib(),
                        times.collect::<Vec<_>>().join(", ")
                    );
                }
                state.tuning = None;
                self.build(&caps)
            }
        }
    }
}
