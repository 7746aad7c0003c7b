//! Errors of data-parallel training.

use std::collections::VecDeque;
use std::error::Error as StdError;
use std::sync::{Mutex, PoisonError};

use flow_autograd::BoxError;
use flow_comm::{DType, ProcessGroup};
use tch::{Kind, TchError};

use crate::optimizer_choice::one_line;

/// Errors of [`Ddp`](crate::Ddp) and of collectives on tensors. Ranks are those in the job.
///
/// libtorch reports what ends a backward, so the caller gets tch's error. [`Error::from_backward`]
/// returns the original one.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] flow_comm::Error),
    /// Backward failed in libtorch, or in a hook that is not [`Ddp`](crate::Ddp)'s.
    #[error("backward: {reason}")]
    Backward {
        /// libtorch's text.
        reason: String,
    },
    /// libtorch, or the hooks into it, failed.
    #[error("rank {rank}: {operation}: {reason}")]
    Torch {
        /// This rank.
        rank: usize,
        /// The operation under way.
        operation: &'static str,
        /// The cause.
        reason: String,
    },
    /// The device that was asked for cannot be used.
    #[error("rank {rank}: choosing a device: {reason}")]
    Device {
        /// This rank.
        rank: usize,
        /// The lack, and what to do.
        reason: String,
    },
    /// A model or an option that data-parallel training cannot work with.
    #[error("rank {rank}: Ddp: {reason}")]
    Model {
        /// This rank.
        rank: usize,
        /// The fault, and what would be right.
        reason: String,
    },
    /// A model that an [`Fsdp`](crate::Fsdp) cannot train, or a use of one that is wrong.
    #[error("rank {rank}: Fsdp: {reason}")]
    Fsdp {
        /// This rank.
        rank: usize,
        /// The fault, and what would be right.
        reason: String,
    },
    /// A model that a [`FullyShard`](crate::FullyShard) cannot shard, or a use of one that is wrong.
    #[error("rank {rank}: FullyShard: {reason}")]
    FullyShard {
        /// This rank.
        rank: usize,
        /// The fault, and what would be right.
        reason: String,
    },
    /// Ranks reduce the gradients of different parameters; every rank gets this.
    #[error(
        "rank {rank}: the parameters whose gradients are reduced differ between ranks: {difference}"
    )]
    Buckets {
        /// This rank.
        rank: usize,
        /// The first difference, with the ranks that have each side.
        difference: String,
    },
    /// Ranks wrapped different models; every rank gets this.
    #[error("rank {rank}: Ddp: the model differs between ranks: {difference}")]
    Mismatch {
        /// This rank.
        rank: usize,
        /// The first difference: the parameter and both ranks.
        difference: String,
    },
    /// Another rank could not wrap its model.
    #[error("rank {rank}: Ddp: another rank cannot wrap its model: {reason}")]
    Peer {
        /// This rank.
        rank: usize,
        /// The other rank's error.
        reason: String,
    },
    /// A [`GradScaler`](crate::GradScaler) cannot unscale gradients, or is called out of order.
    #[error("GradScaler: {reason}")]
    GradScaler {
        /// The fault, and what would be right.
        reason: String,
    },
    /// A communication hook failed, or returned something else than a bucket's gradients.
    #[error("rank {rank}: the communication hook, for bucket {bucket}: {reason}")]
    CommHook {
        /// This rank.
        rank: usize,
        /// The bucket's number.
        bucket: usize,
        /// The hook's own text, or what it should have returned.
        reason: String,
    },
    /// The hook that communicates buffers failed.
    #[error("rank {rank}: the buffers' communication hook: {reason}")]
    BufferCommHook {
        /// This rank.
        rank: usize,
        /// The hook's own text.
        reason: String,
    },
    /// A [`join`](crate::join()) cannot begin, or a joinable has failed in it.
    #[error("rank {rank}: join: {reason}")]
    Join {
        /// This rank.
        rank: usize,
        /// The fault, and what would be right.
        reason: String,
    },
    /// Some ranks have ended and others have not, in a join that
    /// [throws then](crate::JoinOptions::throw_on_early_termination); every rank gets this.
    #[error(
        "rank {rank}: join: the ranks {ended:?} have ended, the ranks {active:?} have not, and \
         throw_on_early_termination is set"
    )]
    EndedEarly {
        /// This rank.
        rank: usize,
        /// The ranks that have ended.
        ended: Vec<usize>,
        /// The ranks that have not.
        active: Vec<usize>,
    },
    /// A training with [`Elastic`](crate::Elastic) cannot go on, or a use of it is wrong.
    #[error("rank {rank}: Elastic: {reason}")]
    Elastic {
        /// This rank.
        rank: usize,
        /// The fault, and what would be right.
        reason: String,
    },
    /// Others wait to join: [`Elastic::run`](crate::Elastic::run) and
    /// [`InProcessRestart::run`](crate::InProcessRestart::run) take them in when they get this.
    #[error(
        "rank {rank}: others wait to join ({count}): pass this error on to `run`, which takes them in"
    )]
    Newcomers {
        /// This rank.
        rank: usize,
        /// The number of them.
        count: usize,
    },
    /// The ranks change: [`InProcessRestart::run`](crate::InProcessRestart::run) goes on with those that there are
    /// when it gets this.
    #[error("rank {rank}: the ranks change: pass this error on to InProcessRestart::run")]
    RanksChange {
        /// This rank.
        rank: usize,
    },
    /// Some parameters got no gradient in this backward, on some ranks; every rank gets this.
    #[error(
        "rank {rank}: Ddp: some parameters got no gradient in this backward: {missing}; {advice}"
    )]
    MissingGradients {
        /// This rank.
        rank: usize,
        /// Ranks and the names of their parameters.
        missing: String,
        /// The remedy.
        advice: &'static str,
    },
}

impl AsRef<dyn StdError + Send + Sync> for Error {
    fn as_ref(&self) -> &(dyn StdError + Send + Sync + 'static) {
        self
    }
}

impl From<flow_tensor::Error> for Error {
    fn from(error: flow_tensor::Error) -> Self {
        match error {
            flow_tensor::Error::Comm(error) => Self::Comm(error),
            flow_tensor::Error::Tensor { rank, operation, reason } => {
                Self::Torch { rank, operation, reason }
            }
            flow_tensor::Error::Device { rank, reason } => Self::Device { rank, reason },
        }
    }
}

/// The errors that ended the last backwards, each with the text that libtorch passes on.
static IN_BACKWARD: Mutex<VecDeque<(String, Error)>> = Mutex::new(VecDeque::new());
const KEPT: usize = 16;

impl Error {
    /// Returns the error that ended a backward, given the one that tch returned: that of
    /// [`Ddp`](crate::Ddp), or else [`Error::Backward`]. Call this once for each error.
    ///
    /// ```
    /// # use tch::{Kind, Tensor};
    /// use flow_ddp::{CommError, Error};
    ///
    /// # let x = Tensor::ones([1], (Kind::Float, tch::Device::Cpu)).set_requires_grad(true);
    /// # let loss = x.sum(Kind::Float);
    /// match loss.f_backward().map_err(Error::from_backward) {
    ///     Ok(()) => {}
    ///     Err(Error::Comm(CommError::PeerLost { peer, .. })) => eprintln!("{peer} was lost"),
    ///     Err(other) => return Err(other),
    /// }
    /// # Ok(())
    /// ```
    pub fn from_backward(error: TchError) -> Self {
        let reason = match error {
            TchError::Torch(reason) => reason,
            other => other.to_string(),
        };
        let mut kept = IN_BACKWARD.lock().unwrap_or_else(PoisonError::into_inner);
        let position = kept.iter().rposition(|(text, _)| reason.contains(text));
        match position.and_then(|position| kept.remove(position)) {
            Some((_, error)) => error,
            None => Self::Backward { reason },
        }
    }

    /// Whether libtorch's `text` is that of a backward that ended with such an error.
    pub(crate) fn ends_backward(text: &str, is_such: impl Fn(&Error) -> bool) -> bool {
        let kept = IN_BACKWARD.lock().unwrap_or_else(PoisonError::into_inner);
        kept.iter().any(|(known, error)| text.contains(known) && is_such(error))
    }

    /// Keeps this error for [`Error::from_backward`], and returns the text that libtorch passes on.
    pub(crate) fn end_backward(self) -> BoxError {
        let text = self.to_string();
        let mut kept = IN_BACKWARD.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() == KEPT {
            kept.pop_front();
        }
        kept.push_back((text.clone(), self));
        text.into()
    }

    /// Returns an error of a model or an option.
    pub(crate) fn model(group: &ProcessGroup, reason: String) -> Self {
        Self::Model { rank: job_rank(group), reason }
    }

    /// Makes an error of an `Fsdp`.
    pub(crate) fn fsdp(group: &ProcessGroup, reason: String) -> Self {
        Self::Fsdp { rank: job_rank(group), reason }
    }

    /// Makes an error of a `FullyShard`.
    pub(crate) fn fully_shard(group: &ProcessGroup, reason: impl ToString) -> Self {
        Self::FullyShard { rank: job_rank(group), reason: reason.to_string() }
    }

    /// Returns an error of libtorch.
    pub(crate) fn torch(
        group: &ProcessGroup,
        operation: &'static str,
        reason: impl ToString,
    ) -> Self {
        Self::Torch { rank: job_rank(group), operation, reason: reason.to_string() }
    }

    /// Returns an error of the communication hook, or one that passed through it.
    pub(crate) fn of_hook(group: &ProcessGroup, bucket: usize, error: BoxError) -> Self {
        passed_through(error).unwrap_or_else(|error| Self::CommHook {
            rank: job_rank(group),
            bucket,
            reason: error.to_string(),
        })
    }

    /// Returns an error of the hook that communicates buffers, or one that passed through it.
    pub(crate) fn in_buffer_comm_hook(group: &ProcessGroup, error: BoxError) -> Self {
        passed_through(error).unwrap_or_else(|error| Self::BufferCommHook {
            rank: job_rank(group),
            reason: error.to_string(),
        })
    }

    /// Returns an error of looking at gradients, or one that passed through it.
    pub(crate) fn in_grad_scaler(error: BoxError) -> Self {
        passed_through(error).unwrap_or_else(|error| Self::GradScaler { reason: one_line(error) })
    }

    /// Returns an error of a joinable, or one that passed through it.
    pub(crate) fn in_join(group: &ProcessGroup, error: BoxError) -> Self {
        passed_through(error)
            .unwrap_or_else(|error| Self::Join { rank: job_rank(group), reason: error.to_string() })
    }
}

/// Returns the error of ours that passed through code of the user's, if it is one.
fn passed_through(error: BoxError) -> Result<Error, BoxError> {
    let error = match error.downcast::<flow_comm::Error>() {
        Ok(error) => return Ok(Error::Comm(*error)),
        Err(error) => error,
    };
    let error = match error.downcast::<flow_tensor::Error>() {
        Ok(error) => match *error {
            flow_tensor::Error::Comm(error) => return Ok(Error::Comm(error)),
            error => error.into(),
        },
        Err(error) => error,
    };
    error.downcast().map(|error| *error)
}

/// Result of data-parallel training.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Returns this rank's number in the job, which errors of sub-groups use too.
pub(crate) fn job_rank(group: &ProcessGroup) -> usize {
    group.ranks()[group.rank()]
}

/// Returns the element type of gradients of a kind, as collectives name it.
pub(crate) fn dtype(group: &ProcessGroup, kind: Kind) -> Result<DType> {
    flow_autograd::dtype(kind).ok_or_else(|| failed(group, format!("{kind:?} cannot be reduced")))
}

/// Makes an error of a reason for which a bucket could not be made or reduced.
pub(crate) fn failed(group: &ProcessGroup, reason: String) -> Error {
    Error::torch(group, "reducing a bucket", reason)
}
