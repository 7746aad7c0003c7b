//! A model's reducer in a join under way: who goes on, and where they are.

use super::notices::JoinContext;
use crate::error::Result;

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
    /// Begins a join after this step. `waits`: a backward begins with waiting for the other ranks.
    pub fn new(context: JoinContext, ranks: usize, waits: bool, step: u32) -> Self {
        Self {
            context,
            ranks,
            waits,
            is_announced: false,
            step,
            root: 0,
            scale: None,
            grads_are_apart: false,
        }
    }

    /// Returns what tells the other ranks.
    pub fn context(&self) -> &JoinContext {
        &self.context
    }

    /// Returns the last step that has begun.
    pub fn step(&self) -> u32 {
        self.step
    }

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

    /// Begins a backward of the ranks in `active`, in which this rank reduces zeros. Returns whether
    /// it has done so before: gradients are then no views of buckets.
    pub fn shadow_backward(&mut self, step: u32, active: &[usize]) -> bool {
        self.step = step;
        self.root = root_of(active);
        std::mem::replace(&mut self.grads_are_apart, true)
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
