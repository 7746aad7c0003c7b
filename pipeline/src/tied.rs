//! Weights that several stages share.

use flow_autograd::{set_grad, BoxError};
use flow_comm::ProcessGroup;
use flow_global::GlobalTensor;
use flow_tensor::{ReduceOp, TensorCollectives};
use tch::Tensor;

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

    /// Adds up the gradients of all copies.
    pub fn reduce(&self) -> Result<(), BoxError> {
        tch::no_grad(|| {
            let gradient = self.weight.grad();
            let gradient = match gradient.defined() {
                true => gradient,
                false => self.weight.zeros_like(),
            };
            let mut local = own(&gradient)?;
            self.group.all_reduce_tensor(&mut local, ReduceOp::Sum)?;
            set_grad(&self.weight, Some(&gradient))?;
            Ok(())
        })
    }
}

/// What this rank has of a tensor, with its memory.
fn own(tensor: &Tensor) -> Result<Tensor, BoxError> {
    let local = match tensor.is_global() {
        true => tch::no_grad(|| tensor.to_local())?,
        false => tensor.shallow_clone(),
    };
    Ok(local.detach())
}
