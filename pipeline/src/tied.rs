//! Weights that several stages share.

use flow_autograd::{BoxError, set_grad};
use flow_comm::ProcessGroup;
use flow_global::GlobalTensor;
use flow_tensor::{ReduceOp, TensorCollectives};
use tch::Tensor;

use crate::message::local_of;

/// A weight of which several ranks have a copy.
pub struct Tied {
    /// The ranks that have a copy.
    group: ProcessGroup,
    weight: Tensor,
}

impl Tied {
    /// Makes all copies the first rank's.
    pub fn new(group: ProcessGroup, weight: &Tensor) -> Result<Self, BoxError> {
        if flow_ddp::is_fully_sharded(weight) {
            let reason = "the weight is an Fsdp's, which keeps each rank's part of the gradient only: wrap \
                          the stages that share a weight with Ddp";
            group.abort(reason);
            return Err(reason.into());
        }
        let mut local = local_memory(weight)?;
        tch::no_grad(|| group.broadcast_tensor(&mut local, 0))?;
        Ok(Self { group, weight: weight.shallow_clone() })
    }

    /// Sets aside the gradient of earlier steps, which has been added up already.
    pub fn begin(&self) -> Result<Option<Tensor>, BoxError> {
        let gradient = self.weight.grad();
        if !gradient.defined() {
            return Ok(None);
        }
        // A copy, as `Ddp` may use the memory again.
        let before = tch::no_grad(|| gradient.copy());
        set_grad(&self.weight, None)?;
        Ok(Some(before))
    }

    /// Adds up the gradients of all copies, and the gradient that was set aside. A frozen copy gets none.
    pub fn reduce(&self, before: Option<Tensor>) -> Result<(), BoxError> {
        let _no_grad = tch::no_grad_guard();
        let mut gradient = self.weight.grad();
        if !gradient.defined() {
            gradient = self.weight.f_zeros_like()?;
        }
        // Ranks add up their parts, which must be those of the weight.
        if self.weight.is_global() {
            gradient = gradient.to_sbp(self.weight.sbp()?)?;
        }
        let mut local = local_memory(&gradient)?;
        self.group.all_reduce_tensor(&mut local, ReduceOp::Sum)?;
        let sum = match before {
            Some(before) => before.f_add(&gradient)?,
            None => gradient,
        };
        if self.weight.requires_grad() {
            set_grad(&self.weight, Some(&sum))?;
        }
        Ok(())
    }

    /// Makes the other ranks' collectives fail.
    pub fn abort(&self, cause: &str) {
        self.group.abort(cause);
    }
}

/// Returns this rank's part of a tensor, in the same memory.
fn local_memory(tensor: &Tensor) -> Result<Tensor, BoxError> {
    Ok(local_of(tensor)?.detach())
}
