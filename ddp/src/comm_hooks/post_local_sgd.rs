//! Means over some ranks only, after the first steps.

use flow_autograd::BoxError;
use flow_comm::{ProcessGroup, ReduceOp};
use flow_tensor::TensorCollectives;

use crate::bucket::comm_hook::{CommHook, GradBucket};
use crate::bucket::pending::Pending;

/// Averages gradients over all ranks in the first steps, and over a part of them from then on:
/// post-local SGD (T. Lin, S. U. Stich, K. K. Patel, M. Jaggi, "Don't Use Large Mini-Batches, Use
/// Local SGD", 2018). A [`ModelAverager`](crate::ModelAverager) then averages parameters.
///
/// It is PyTorch's `post_localSGD_hook`, and so are the names and defaults. Steps are counted from the
/// beginning: a training that goes on after a checkpoint sets a smaller
/// [`start_iter`](Self::start_iter). Sparse gradients are gathered from all ranks all along. A
/// [`ZeroRedundancyOptimizer`](crate::ZeroRedundancyOptimizer), which has all ranks step with the same
/// gradients, is an error.
#[derive(Debug)]
pub struct PostLocalSgd {
    subgroup: ProcessGroup,
    start_iter: u64,
    gradient_all_reduce: bool,
    /// The steps so far.
    iteration: u64,
}

impl PostLocalSgd {
    /// Returns the hook that averages over `subgroup`, such as the ranks of this machine, from the
    /// first step on. All ranks of `subgroup` call this.
    ///
    /// # Errors
    ///
    /// A failure of the group.
    pub fn new(subgroup: &ProcessGroup) -> flow_comm::Result<Self> {
        let subgroup = subgroup.duplicate()?;
        Ok(Self { subgroup, start_iter: 0, gradient_all_reduce: true, iteration: 0 })
    }

    /// Sets the number of steps that average gradients over all ranks (PyTorch's
    /// `start_localSGD_iter`; default: 0).
    pub fn start_iter(mut self, steps: u64) -> Self {
        self.start_iter = steps;
        self
    }

    /// Sets whether later steps average gradients over the subgroup (PyTorch's
    /// `post_local_gradient_allreduce`; default: yes). If not, each rank keeps its own.
    pub fn gradient_all_reduce(mut self, reduce: bool) -> Self {
        self.gradient_all_reduce = reduce;
        self
    }
}

impl CommHook for PostLocalSgd {
    fn launch(&mut self, bucket: &mut GradBucket<'_>) -> Result<Pending, BoxError> {
        let is_global = self.iteration < self.start_iter;
        if bucket.is_last() {
            self.iteration += 1;
        }
        if is_global {
            return Ok(bucket.all_reduce()?);
        }
        let gradients = bucket.buffer()?;
        if !self.gradient_all_reduce {
            return Ok(Pending::ready(gradients));
        }
        let reduction = self.subgroup.all_reduce_tensor_async(gradients, ReduceOp::Avg)?;
        Ok(Pending::new(move || Ok(reduction.wait()?)))
    }

    fn is_same_on_all_ranks(&self) -> bool {
        false
    }

    fn groups(&self) -> Vec<ProcessGroup> {
        vec![self.subgroup.clone()]
    }

    fn name(&self) -> String {
        let Self { start_iter, gradient_all_reduce, .. } = self;
        format!(
            "PostLocalSgd with start_iter {start_iter}, gradient_all_reduce {gradient_all_reduce}"
        )
    }
}
