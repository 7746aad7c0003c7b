//! Buckets for gradients that come from elsewhere than a wrapped model's hooks.

use std::fmt;
use std::sync::Arc;

use flow_autograd::BoxError;
use flow_comm::{ProcessGroup, ReduceOp};
use flow_tensor::ArenaAllocatorGuard;
use tch::Tensor;

use crate::bucket::assignment::Caps;
use crate::comm_hooks::AllReduce;
use crate::error::{Error, Result, job_rank};
use crate::model_check::{agree, describe, first_mismatch};
use crate::options::{Delayed, Options};
use crate::parameter::numbered;
use crate::reducer::{Reducer, Reduction};
use crate::settings::Settings;
use crate::wrap::{Allocator, reduce_path};

/// Adds up gradients over all ranks of a group in a [`Ddp`](crate::Ddp)'s buckets, while backward
/// still runs.
///
/// Whoever has a gradient puts it into `.grad` of its parameter and calls
/// [`GradReducer::mark_ready`] inside backward, once for each parameter in each backward. After
/// backward `.grad` is the sum. A backward that fails makes this unusable, on all ranks.
pub struct GradReducer {
    reducer: Arc<Reducer>,
    _allocator: Allocator,
}

impl fmt::Debug for GradReducer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GradReducer").finish_non_exhaustive()
    }
}

impl GradReducer {
    /// Makes buckets for these parameters: leaves of one device that require gradients, in the order
    /// of their use in forward. All ranks of the group call this with parameters of the same names,
    /// sizes and kinds.
    ///
    /// # Errors
    ///
    /// Ranks have different parameters, or another order; there are no parameters; settings of the
    /// environment that make no sense; a failure of the group.
    pub fn new(group: &ProcessGroup, parameters: Vec<(String, Tensor)>) -> Result<Self> {
        let rank = job_rank(group);
        if let Some(difference) = first_mismatch(group, &describe(&parameters, &[]))? {
            return Err(Error::Buckets { rank, difference });
        }
        let Some(first) = parameters.first().map(|(_, tensor)| tensor.shallow_clone()) else {
            let reason = "there are no parameters to reduce".to_owned();
            return Err(Error::Model { rank, reason });
        };
        let options = Options {
            caps: Caps::default(),
            tune: 0,
            find_unused: false,
            static_graph: false,
            bucket_view: false,
            communication: None,
            op: ReduceOp::Sum,
            delayed: Delayed::default(),
            sparse: Vec::new(),
            sparse_as_dense: true,
            virtual_ranks: None,
        };
        let settings = Settings::from_env().map_err(|reason| Error::Model { rank, reason })?;
        let allocator = ArenaAllocatorGuard::current().filter(|_| group.cuda_device().is_none());
        let own = group.duplicate_in(allocator.as_ref().map(|allocator| allocator.handle()))?;
        let parameters = numbered(parameters);
        let made =
            reduce_path(&own, &settings, &first, &options, None).and_then(|(path, allocator)| {
                let comm_hook = Box::new(AllReduce);
                let reduction = Reduction {
                    options,
                    comm_hook,
                    optimizer: None,
                    kept: None,
                    buffers: Vec::new(),
                };
                let reducer = Reducer::new(own.clone(), path, parameters, Vec::new(), reduction)?;
                Ok(Self { reducer, _allocator: allocator })
            });
        agree(&own, made)
    }

    /// Returns whether the sums are views of the buckets, which the next backward overwrites.
    pub fn grads_are_views(&self) -> bool {
        self.reducer.grads_are_views()
    }

    /// Takes `gradient`, which is `.grad` of parameter `index` and final, in backward. `exclusive`:
    /// nothing else uses its memory, so that it may be reduced where it is.
    ///
    /// # Errors
    ///
    /// They are to end the backward: a failure of the group, a gradient that comes twice, or no
    /// backward runs.
    pub fn mark_ready(
        &self,
        index: usize,
        gradient: &Tensor,
        exclusive: bool,
    ) -> std::result::Result<(), BoxError> {
        self.reducer.on_gradient(index, gradient, exclusive)
    }
}
