//! Weights that several stages share.

use flow_autograd::{set_grad, BoxError};
use flow_comm::ProcessGroup;
use flow_global::GlobalTensor;
use flow_tensor::{ReduceOp, TensorCollectives};
use tch::Tensor;

use crate::message::local_of;

/// One weight of which several ranks have a copy.
pub struct Tied {
    /// The ranks that have one.
    group: ProcessGroup,
    weight: Tensor,
}

impl Tied {
    /// All copies become the first rank's.
    pub fn new(group: ProcessGroup, weight: &Tensor) -> Result<Self, BoxError> {
        let mut local = own(weight)?;
        tch::no_grad(|| group.broadcast_tensor(&mut local, 0))?;
        Ok(Self { group, weight: weight.shallow_clone() })
    }

    /// Sets the gradient of the steps before aside: it has been added up already.
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

    /// Adds up the gradients of all copies, and adds what was set aside. A frozen copy gets none.
    pub fn reduce(&self, before: Option<Tensor>) -> Result<(), BoxError> {
        let _no_grad = tch::no_grad_guard();
        let gradient = self.weight.grad();
        let gradient = match gradient.defined() {
            true => gradient,
            false => self.weight.f_zeros_like()?,
        };
        // A sum over ranks is right only of what is whole on each.
        let gradient = match self.weight.is_global() {
            true => gradient.to_sbp(self.weight.sbp()?)?,
            false => gradient,
        };
        let mut local = own(&gradient)?;
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

    /// Has the other ranks' collectives fail.
    pub fn abort(&self, cause: &str) {
        self.group.abort(cause);
    }
}

/// What this rank has of a tensor, with its memory.
fn own(tensor: &Tensor) -> Result<Tensor, BoxError> {
    Ok(local_of(tensor)?.detach())
}
