//! The virtual ranks of a rank, and the gradients that wait for their sum.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use flow_comm::{ProcessGroup, VirtualRanks};
use tch::Tensor;

use crate::parameter::Parameter;

/// The virtual ranks of this rank, and where it is in a step.
pub(crate) struct OwnVirtualRanks {
    pub own: Range<usize>,
    /// How their gradients are added up: see [`VirtualRanks::sums`].
    sums: Vec<usize>,
    progress: Mutex<Progress>,
}

/// Where a rank is in a step.
pub(super) struct Progress {
    /// The virtual rank that runs, or comes next.
    pub next: usize,
    pub is_running: bool,
    /// Its backward has begun to reduce gradients.
    pub reduces: bool,
    /// The gradients that wait for their sum, by parameter.
    pub waiting: Vec<Vec<Tensor>>,
    /// The buffers that every virtual rank of the step begins with, and those that virtual rank 0 has left.
    pub buffers: Vec<Tensor>,
    pub first_buffers: Vec<Tensor>,
}

impl OwnVirtualRanks {
    /// Returns the virtual ranks of this rank, if there are `count` in all.
    pub fn new(count: usize, group: &ProcessGroup) -> Result<Self, String> {
        let own = VirtualRanks::new(count, group.world_size())?.of_rank(group.rank());
        let progress = Progress {
            next: own.start,
            is_running: false,
            reduces: false,
            waiting: Vec::new(),
            buffers: Vec::new(),
            first_buffers: Vec::new(),
        };
        Ok(Self { sums: VirtualRanks::sums(&own), progress: Mutex::new(progress), own })
    }

    /// Returns whether a virtual rank runs.
    pub fn is_running(&self) -> bool {
        self.progress().is_running
    }

    /// Returns whether no step is under way.
    pub fn is_between_steps(&self) -> bool {
        let progress = self.progress();
        !progress.is_running && progress.next == self.own.start
    }

    /// Returns whether the backward of the virtual rank that runs has begun to reduce gradients.
    pub fn has_reduced(&self) -> bool {
        self.progress().reduces
    }

    /// Notes that a backward begins, which reduces gradients. The error says why it must not.
    pub fn begin_backward(&self) -> Result<(), String> {
        let mut progress = self.progress();
        if std::mem::replace(&mut progress.reduces, true) {
            let part = progress.next;
            return Err(format!(
                "virtual rank {part} runs several backwards: all but the last belong under no_sync"
            ));
        }
        Ok(())
    }

    /// Returns the sum of all virtual ranks of this rank, in the backward of its last one, whose gradient of
    /// parameter `index` this is; None if it has no other.
    pub fn sum(&self, index: usize, gradient: &Tensor) -> Option<Tensor> {
        let mut progress = self.progress();
        let waiting = std::mem::take(progress.waiting.get_mut(index)?);
        let mut sum: Option<Tensor> = None;
        for before in waiting.into_iter().rev() {
            let after = sum.as_ref().unwrap_or(gradient);
            sum = Some(add(&before, after));
        }
        sum
    }

    /// Takes the gradients of a virtual rank that is not the last one. The error says what is wrong.
    pub(super) fn take_gradients(
        &self,
        part: usize,
        parameters: &[Parameter],
    ) -> Result<(), String> {
        let mut progress = self.progress();
        progress.waiting.resize_with(parameters.len(), Vec::new);
        for (parameter, waiting) in parameters.iter().zip(&mut progress.waiting) {
            let gradient = parameter.tensor.grad();
            if !gradient.defined() {
                return Err(format!(
                    "{} got no gradient: each virtual rank runs a backward that uses every parameter",
                    parameter.name
                ));
            }
            // What is to be computed when it is read becomes `.grad`.
            parameter.resolved(&gradient).map(drop)?;
            let mut sum = parameter.tensor.grad().detach();
            // What the program does to `.grad` does nothing to it.
            flow_autograd::set_grad(&parameter.tensor, None).map_err(|error| error.to_string())?;
            for _ in 0..self.sums[part - self.own.start] {
                let Some(before) = waiting.pop() else { break };
                sum = add(&before, &sum);
            }
            waiting.push(sum);
        }
        Ok(())
    }

    pub(super) fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Adds up gradients as the buckets do: complex numbers by their real and imaginary parts.
fn add(before: &Tensor, after: &Tensor) -> Tensor {
    tch::no_grad(|| {
        if !before.is_complex() {
            return before + after;
        }
        let [before, after] = [before, after].map(|sum| sum.resolve_conj().view_as_real());
        (before + after).view_as_complex()
    })
}
