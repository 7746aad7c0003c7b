//! Which step a rank is in, so that ranks that are not in the same one find out.
//!
//! A step is a backward that reduces gradients. So is a forward in training mode that is followed by none: were only
//! backwards counted, those of different steps would be averaged as soon as one rank had left one out.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::Arc;

use tch::Tensor;

#[derive(Default)]
pub(crate) struct Steps {
    backwards: AtomicU32,
    /// Forwards whose backward can no longer come.
    left_out: AtomicU32,
}

impl Steps {
    /// A backward that reduces gradients begins: in which step, from 1 on.
    pub fn begin(&self) -> u32 {
        let backwards = self.backwards.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        backwards.wrapping_add(self.left_out.load(Ordering::Relaxed))
    }

    /// A forward in training mode has this result.
    pub fn follow(self: &Arc<Self>, output: &Tensor) -> Result<(), flow_autograd::Error> {
        if !output.requires_grad() {
            return Ok(()); // it can have no backward
        }
        let forward = Arc::new(Forward { steps: Arc::clone(self), done: AtomicBool::new(false) });
        flow_autograd::on_backward(output, move || {
            let forward = Arc::clone(&forward);
            let done = move || {
                forward.done.store(true, Ordering::Relaxed);
                Ok(())
            };
            Ok(flow_autograd::at_end_of_backward(done)?)
        })
    }
}

/// Dropped with the graph and, in a backward that fails, with what was to be called at its end.
struct Forward {
    steps: Arc<Steps>,
    /// A backward has come through, and to its end.
    done: AtomicBool,
}

impl Drop for Forward {
    fn drop(&mut self) {
        if !*self.done.get_mut() {
            self.steps.left_out.fetch_add(1, Ordering::Relaxed);
        }
    }
}
