//! Communication hooks: the contract of PyTorch's `register_comm_hook`.

use flow_autograd::BoxError;
use flow_comm::ProcessGroup;
use tch::{Kind, Tensor};

use super::pending::Pending;
use super::{Bucket, ReducePath};
use crate::error::Result;
use crate::parameter::Parameter;

/// Reduces each bucket of a [`Ddp`](crate::Ddp) whose gradients are there: see
/// [`DdpBuilder::comm_hook`](crate::DdpBuilder::comm_hook).
///
/// All ranks use the same hook. It is called in `backward`, on the thread that runs the gradients'
/// hooks, once for each bucket and in the same order on all ranks. An error ends the backward; a
/// [`flow_ddp::Error`](crate::Error), a [`flow_comm::Error`], and what a collective on tensors returns
/// when its group fails, stay what they are.
///
/// The same hook as PyTorch's `allreduce_hook`, on tensors of any device:
///
/// ```
/// use flow_ddp::{BoxError, CommHook, GradBucket, Pending, ReduceOp, TensorCollectives};
///
/// struct Mean;
///
/// impl CommHook for Mean {
///     fn launch(&mut self, bucket: &mut GradBucket<'_>) -> Result<Pending, BoxError> {
///         let mut flat = bucket.buffer()?;
///         bucket.group().all_reduce_tensor(&mut flat, ReduceOp::Avg)?;
///         Ok(Pending::ready(flat))
///     }
/// }
/// ```
pub trait CommHook: Send + 'static {
    /// Starts the reduction of `bucket` (default: [`GradBucket::all_reduce`]). The result is the
    /// reduced gradients, which each rank finds in `.grad` after backward: unlike a mean, a sum has
    /// to be divided here.
    fn launch(&mut self, bucket: &mut GradBucket<'_>) -> Result<Pending, BoxError> {
        Ok(bucket.all_reduce()?)
    }

    /// Returns the type in which [`GradBucket::all_reduce`] sends gradients; None: their own.
    fn kind(&self) -> Option<Kind> {
        None
    }

    /// Returns whether `launch` waits for other ranks, as blocking collectives do (default: no). Then
    /// it is called at the end of backward, in which ranks may wait for each other in other
    /// collectives: those of [`convert_sync_batchnorm`](crate::convert_sync_batchnorm), for instance.
    /// Where ranks use different parameters, they would wait for ever in the middle of it.
    fn waits_for_ranks(&self) -> bool {
        false
    }

    /// Returns whether all ranks get the same gradients, and so keep the same parameters (default:
    /// yes). If not, [`mixed_precision`](crate::DdpBuilder::mixed_precision) casts the parameters on
    /// each rank, rather than once for all ranks of a machine. A
    /// [`ZeroRedundancyOptimizer`](crate::ZeroRedundancyOptimizer) is an error then, and so is a join
    /// that divides by the number of ranks that have not ended.
    fn is_same_on_all_ranks(&self) -> bool {
        true
    }

    /// Returns the groups, beside [`GradBucket::group`], in which the hook communicates (default: none).
    /// They fail with the model, so that no rank waits there for one whose backward has failed.
    fn groups(&self) -> Vec<ProcessGroup> {
        Vec::new()
    }

    /// Returns the hook's identity: all ranks must have the same.
    fn name(&self) -> String {
        std::any::type_name::<Self>().into()
    }
}

/// A bucket that has all gradients of this rank, as a [`CommHook`] gets it.
pub struct GradBucket<'a> {
    pub(crate) index: usize,
    pub(crate) is_last: bool,
    pub(crate) memory: &'a mut dyn Bucket,
    pub(crate) members: &'a [usize],
    pub(crate) unused: &'a [bool],
    pub(crate) parameters: &'a [Parameter],
    pub(crate) path: &'a dyn ReducePath,
    pub(crate) group: &'a ProcessGroup,
}

impl GradBucket<'_> {
    /// Returns the bucket's number. Numbers, and which parameters are in a bucket, change after the
    /// first backward; with [`DdpBuilder::tune`](crate::DdpBuilder::tune) also in later ones.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Returns whether this is the last bucket of the backward.
    pub fn is_last(&self) -> bool {
        self.is_last
    }

    /// Returns the parameters whose gradients these are, by name.
    pub fn parameters(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.members.iter().map(|&member| {
            let parameter = &self.parameters[member];
            (parameter.name.as_str(), &parameter.tensor)
        })
    }

    /// Returns for each of [`GradBucket::parameters`] whether this rank has used it since the last
    /// reduction. The gradient of one that it has not used is zeros, or what `.grad` had before.
    pub fn used(&self) -> impl Iterator<Item = bool> {
        self.unused.iter().map(|unused| !unused)
    }

    /// Returns this rank's gradients, of the shapes of [`GradBucket::parameters`]. Complex ones are
    /// real here, with one dimension more (`view_as_real`). A hook may write into the gradients:
    /// [`GradBucket::all_reduce`] and [`GradBucket::buffer`] take what is there then.
    ///
    /// # Errors
    ///
    /// Those of a GPU.
    pub fn gradients(&self) -> Result<Vec<Tensor>> {
        self.memory.join_gradients()?;
        let mut gradients = Vec::with_capacity(self.members.len());
        for (slot, &member) in self.members.iter().enumerate() {
            gradients.push(match self.memory.gradient(slot) {
                Some(gradient) => gradient.shallow_clone(),
                None => self.parameters[member].grad(),
            });
        }
        Ok(gradients)
    }

    /// Returns a copy of all gradients in one tensor of one dimension, one after the other.
    ///
    /// # Errors
    ///
    /// Those of [`GradBucket::gradients`].
    pub fn buffer(&self) -> Result<Tensor> {
        let flat: Vec<Tensor> =
            self.gradients()?.iter().map(|gradient| gradient.detach().reshape([-1])).collect();
        Ok(Tensor::cat(&flat, 0))
    }

    /// Returns the group over which gradients are averaged. A hook may use the group only while the
    /// hook is called.
    pub fn group(&self) -> &ProcessGroup {
        // An error is the group's, and what the caller does next finds it.
        let _ = self.path.flush();
        self.group
    }

    /// Starts the mean of [`GradBucket::gradients`] over all ranks where they are, without waiting:
    /// what a `Ddp` does without a hook.
    ///
    /// # Errors
    ///
    /// A failure of the group.
    pub fn all_reduce(&mut self) -> flow_comm::Result<Pending> {
        self.memory.launch()
    }
}
