//! The buffers that the ranks of a `Ddp` share: running statistics and the like.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

use flow_autograd::{BoxError, identity};
use flow_comm::ProcessGroup;
use flow_tensor::CoalescedBroadcast;
use tch::Tensor;
use tch::nn::Variables;

use crate::error::{Error, Result, job_rank};
use crate::model_check::agree;

/// Communicates the buffers of a [`Ddp`](crate::Ddp), instead of the broadcast from rank 0: see
/// [`DdpBuilder::buffer_comm_hook`](crate::DdpBuilder::buffer_comm_hook).
///
/// All ranks use the same hook. It is called on the thread that runs the forward, in each forward in
/// training mode that is not under [`Ddp::no_sync`](crate::Ddp::no_sync), and in
/// [`Ddp::sync_buffers`](crate::Ddp::sync_buffers), but for a group of one rank. An error of one rank
/// fails the model on all.
///
/// This one averages the buffers:
///
/// ```
/// use flow_ddp::{BoxError, BufferCommHook, ProcessGroup, ReduceOp, TensorCollectives};
/// use tch::Tensor;
///
/// struct Average;
///
/// impl BufferCommHook for Average {
///     fn run(
///         &mut self,
///         group: &ProcessGroup,
///         buffers: &mut [(String, Tensor)],
///     ) -> Result<(), BoxError> {
///         for (_, buffer) in buffers.iter_mut().filter(|(_, buffer)| buffer.is_floating_point()) {
///             group.all_reduce_tensor(buffer, ReduceOp::Avg)?;
///         }
///         Ok(())
///     }
/// }
/// ```
pub trait BufferCommHook: Send + 'static {
    /// Writes into `buffers`, by their names in the model, what the model goes on with. The hook may
    /// use `group`, which is the model's own, only while it is called.
    ///
    /// # Errors
    ///
    /// [`Error::BufferCommHook`] has the text of the hook's own error. A
    /// [`flow_ddp::Error`](crate::Error) and those of collectives stay what they are. It is an error
    /// to put another tensor in a buffer's place.
    fn run(
        &mut self,
        group: &ProcessGroup,
        buffers: &mut [(String, Tensor)],
    ) -> Result<(), BoxError>;

    /// Returns when a forward calls the hook (default: after the model's own, as in PyTorch).
    fn location(&self) -> BufferCommHookLocation {
        BufferCommHookLocation::PostForward
    }

    /// Returns the hook's identity: all ranks must have the same.
    fn name(&self) -> String {
        std::any::type_name::<Self>().into()
    }
}

/// When a forward calls a [`BufferCommHook`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BufferCommHookLocation {
    /// Before the model's own forward.
    PreForward,
    /// After the model's own forward.
    PostForward,
}

/// The buffers that ranks share, and how.
pub(crate) struct Buffers {
    pub broadcast: CoalescedBroadcast,
    pub held: Vec<HeldBuffer>,
    /// None: rank 0's are broadcast.
    pub hook: Option<Box<dyn BufferCommHook>>,
}

impl Buffers {
    /// Returns when a forward shares the buffers.
    pub fn location(&self) -> BufferCommHookLocation {
        self.hook.as_ref().map_or(BufferCommHookLocation::PreForward, |hook| hook.location())
    }

    /// Finds a buffer that the model has replaced.
    pub fn check(&self, group: &ProcessGroup) -> Result<()> {
        let Some(replaced) = self.held.iter().find(|buffer| !buffer.is_held()) else {
            return Ok(());
        };
        let reason = format!(
            "the model has another tensor in place of the buffer {} since it was wrapped, which ranks \
             would not share (or whoever else held the buffer then has dropped it): copy into the \
             buffer (copy_), or wrap the model again",
            replaced.name
        );
        Err(Error::model(group, reason))
    }

    /// Gives all ranks the root's buffers, or calls the hook. `group` is the one in which gradients
    /// are reduced, so that a rank that is out of step finds the others in backward.
    pub fn share(&mut self, group: &ProcessGroup, root: usize) -> Result<()> {
        let Some(hook) = &mut self.hook else { return Ok(self.broadcast.run(group, root)?) };
        let own = self.broadcast.named();
        let mut buffers = Vec::with_capacity(own.len());
        for (name, buffer) in &own {
            // A backward refuses buffers of its forward that have changed since. What is written here,
            // or by a collective, counts as no change.
            buffers.push((name.clone(), buffer.data()));
        }
        tch::no_grad(|| hook.run(group, &mut buffers))
            .map_err(|error| Error::in_buffer_comm_hook(group, error))?;
        for ((name, own), (_, buffer)) in own.iter().zip(&buffers) {
            if flow_autograd::data_ptr(own) != flow_autograd::data_ptr(buffer) {
                let reason = format!(
                    "it has put another tensor in place of the buffer {name}, which the model would \
                     not get: write into the buffer (copy_)"
                );
                return Err(Error::BufferCommHook { rank: job_rank(group), reason });
            }
        }
        Ok(())
    }
}

/// Gives all ranks rank 0's variables that are not trainable. All ranks call this.
pub(crate) fn share_untrained(group: &ProcessGroup, store: &Mutex<Variables>) -> Result<()> {
    broadcast_all(group, &untrained(store))
}

/// Gives all ranks rank 0's values of these tensors. All ranks call this.
pub(crate) fn broadcast_all<'a>(
    group: &ProcessGroup,
    named: impl IntoIterator<Item = &'a (String, Tensor)>,
) -> Result<()> {
    let named = named.into_iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone()));
    let broadcast = CoalescedBroadcast::new(group, named.collect()).map_err(Error::from);
    let mut broadcast = agree(group, broadcast)?;
    agree(group, broadcast.run(group, 0).map_err(Error::from))
}

/// Returns the variables that are not trainable, by name.
pub(crate) fn untrained(store: &Mutex<Variables>) -> Vec<(String, Tensor)> {
    let variables = store.lock().unwrap_or_else(PoisonError::into_inner);
    let trainable = variables.trainable_variables.iter();
    let trainable: HashSet<usize> = trainable.map(|one| identity(&one.tensor)).collect();
    let mut buffers = Vec::new();
    for (name, tensor) in &variables.named_variables {
        if !trainable.contains(&identity(tensor)) {
            buffers.push((name.clone(), tensor.shallow_clone()));
        }
    }
    buffers.sort_by(|(name, _), (other, _)| name.cmp(other));
    buffers
}

/// A buffer that the model itself held when it was wrapped, beside the handles of its owners.
pub(crate) struct HeldBuffer {
    pub name: String,
    pub tensor: Tensor,
    /// The handles that are left once the model has replaced the buffer.
    pub others: usize,
}

impl HeldBuffer {
    /// Returns whether the model, or somebody else, still holds the buffer.
    pub fn is_held(&self) -> bool {
        flow_autograd::use_count(&self.tensor) > self.others
    }
}
