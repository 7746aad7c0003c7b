//! Which step a rank is in, so that ranks that are not in the same one find out.
//!
//! A step is a backward that reduces gradients. So is a forward in training mode that is followed
//! by none. Were only backwards counted, those of different steps would be averaged as soon as one
//! rank had left one out. That no backward follows is known when the forward's graph is freed, or
//! when a later backward is over.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use flow_comm::ForkSafe;
use tch::Tensor;

/// The step of the last backward of this process, whichever model it was of.
static LAST: AtomicU32 = AtomicU32::new(0);

/// Returns the step whose gradients an optimizer uses.
pub(crate) fn last_step() -> u32 {
    LAST.load(Ordering::Relaxed)
}

pub(crate) struct Steps {
    counts: ForkSafe<Mutex<Counts>>,
}

#[derive(Default)]
struct Counts {
    backwards: u32,
    /// Forwards that no backward has followed.
    left_out: u32,
    /// How many forwards there were, and how many of them before the end of the last backward.
    forwards: u64,
    before_last: u64,
    /// The numbers of those whose backward may yet come.
    open: BTreeSet<u64>,
}

impl Counts {
    /// Returns the forward's number.
    fn begin_forward(&mut self) -> u64 {
        let number = self.forwards;
        self.forwards += 1;
        self.open.insert(number);
        number
    }
}

impl Steps {
    /// Returns the count before the first step.
    pub fn new() -> Self {
        Self { counts: ForkSafe::new(Mutex::default()) }
    }

    /// Begins a backward that reduces gradients. Returns its step, from 1 on.
    pub fn begin(&self) -> u32 {
        let counts = &mut *self.counts();
        let may_come = counts.open.split_off(&counts.before_last);
        let left_out = std::mem::replace(&mut counts.open, may_come);
        counts.left_out = counts.left_out.wrapping_add(left_out.len() as u32);
        counts.backwards = counts.backwards.wrapping_add(1);
        let step = counts.backwards.wrapping_add(counts.left_out);
        LAST.store(step, Ordering::Relaxed);
        step
    }

    /// Returns the step of the next backward, if no forward is left out before it.
    pub fn next(&self) -> u32 {
        let counts = self.counts();
        counts.backwards.wrapping_add(counts.left_out).wrapping_add(1)
    }

    /// Counts forwards whose backward may yet come as steps that none follows. Returns the last step.
    pub fn close(&self) -> u32 {
        let counts = &mut *self.counts();
        let left_out = std::mem::take(&mut counts.open).len() as u32;
        counts.left_out = counts.left_out.wrapping_add(left_out);
        counts.backwards.wrapping_add(counts.left_out)
    }

    /// Goes on after this step, whatever has been counted. Forwards so far are no steps any more.
    pub fn go_on_after(&self, step: u32) {
        let counts = &mut *self.counts();
        counts.open.clear();
        counts.before_last = counts.forwards;
        counts.backwards = step;
        counts.left_out = 0;
    }

    /// Ends a backward that reduces gradients.
    pub fn end(&self) {
        let mut counts = self.counts();
        counts.before_last = counts.forwards;
        flow_comm::trace::end_step();
    }

    /// Counts a forward in training mode, whose result is `output`.
    pub fn follow(self: &Arc<Self>, output: &Tensor) -> Result<(), flow_autograd::Error> {
        if !output.requires_grad() {
            return Ok(()); // it can have no backward
        }
        let number = self.counts().begin_forward();
        let forward = Arc::new(Forward { steps: Arc::clone(self), number });
        flow_autograd::on_backward(output, move || {
            let forward = Arc::clone(&forward);
            Ok(flow_autograd::at_end_of_backward(move || {
                forward.steps.counts().open.remove(&forward.number);
                Ok(())
            })?)
        })
    }

    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Dropped with the graph and, in a backward that fails, with what was to be called at its end.
struct Forward {
    steps: Arc<Steps>,
    number: u64,
}

impl Drop for Forward {
    fn drop(&mut self) {
        if !self.steps.counts.is_ours() {
            return;
        }
        let mut counts = self.steps.counts();
        if counts.open.remove(&self.number) {
            counts.left_out = counts.left_out.wrapping_add(1);
        }
    }
}
