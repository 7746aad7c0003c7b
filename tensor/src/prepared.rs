//! Operations that are ready to run, and which tensors they can take.

use std::sync::Arc;

use flow_comm::ProcessGroup;
use flow_comm::nccl::{CudaGroup, Stream};
use tch::Tensor;

use crate::error::Result;
use crate::tensors::{OVERLAPS, current_stream, overlaps};

/// Operations and this rank's tensors for them, ready to run.
pub(crate) trait Prepared: Send + Sized + 'static {
    /// The caller's result.
    type Output: 'static;

    fn name(&self) -> &'static str;

    /// The group's collectives on the tensors' GPU, if they are on one.
    fn cuda(&self, group: &ProcessGroup) -> Result<Option<Arc<CudaGroup>>>;

    /// Runs on the host until all is done.
    fn run_on_host(&self, group: &ProcessGroup) -> flow_comm::Result<()>;

    /// Starts on the host, beside the caller. What is returned waits for it.
    fn start_on_host(
        self,
        group: &ProcessGroup,
    ) -> Result<impl FnOnce() -> Result<Self> + Send + 'static>;

    /// Enqueues the operation in the order of `stream`.
    fn enqueue(&self, group: &ProcessGroup, cuda: &CudaGroup, stream: &Stream) -> Result<()>;

    /// The result, when all is done.
    fn finish(self, group: &ProcessGroup) -> Result<Self::Output>;

    /// Runs the operation: on CPUs until it is done, on GPUs in the order of libtorch's stream.
    fn run(self, group: &ProcessGroup) -> Result<Self::Output> {
        match self.cuda(group)? {
            Some(cuda) => self.enqueue(group, &cuda, &current_stream(group, &cuda)?)?,
            None => self.run_on_host(group)?,
        }
        self.finish(group)
    }
}

/// Checks that an operation can read the tensor and, if `written`, write it.
pub(crate) fn check(reduces: bool, tensor: &Tensor, written: bool) -> Result<(), String> {
    if let Some(reason) = flow_autograd::unsendable(tensor) {
        return Err(format!("the tensor {reason}"));
    }
    if reduces && flow_autograd::dtype(tensor.kind()).is_none() {
        return Err(format!(
            "the tensor is {:?}: make it Float, Double, Half, BFloat16, Int, Int64 or Uint8",
            tensor.kind()
        ));
    }
    if written && overlaps(tensor) {
        return Err(format!("no result can be written to the tensor, as it {OVERLAPS}"));
    }
    Ok(())
}
