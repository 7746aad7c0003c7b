//! The mean over all ranks.

use flow_autograd::BoxError;

use crate::bucket::comm_hook::{CommHook, GradBucket};
use crate::bucket::pending::Pending;

/// Averages gradients over all ranks in their own type, on the CPU where backward has put them: the
/// default.
#[derive(Debug, Clone, Copy, Default)]
pub struct AllReduce;

impl CommHook for AllReduce {
    fn launch(&mut self, bucket: &mut GradBucket<'_>) -> Result<Pending, BoxError> {
        Ok(bucket.all_reduce()?)
    }
}
