//! Errors of checkpoints.

use std::io::{self, ErrorKind};
use std::path::PathBuf;

use crate::data::sampler_state::SamplerError;

pub(super) const WRITABLE: &str = "see that the disk has space and the folder can be written";

/// Result of operations on checkpoints.
pub type Result<T, E = CheckpointError> = std::result::Result<T, E>;

/// Errors of [`Checkpoints`](super::Checkpoints), and of the sharded ones of global tensors: one
/// line, with the file and what to do.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// A file or folder cannot be read or written.
    #[error("cannot {operation} {}: {cause}; {remedy}", .path.display())]
    File {
        /// The operation under way.
        operation: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The cause.
        cause: io::Error,
        /// The advice.
        remedy: &'static str,
    },
    /// Another job writes to the folder.
    #[error(
        "another job writes checkpoints to {}; give each job a folder of its own",
        .0.display()
    )]
    Locked(PathBuf),
    /// The folder has checkpoints, and [`latest`](super::Checkpoints::latest) was not called.
    #[error(
        "{} has checkpoints of an earlier training, which saving would replace; call \
         latest first, or use another folder",
        .0.display()
    )]
    Unread(PathBuf),
    /// A folder with a checkpoint's name is none, and saving would replace it.
    #[error(
        "{} is no checkpoint of Flow (it has no {lacks}), and saving would replace it; move it \
         away, or use another folder",
        .path.display()
    )]
    Foreign {
        /// The folder.
        path: PathBuf,
        /// The files by which a checkpoint is known.
        lacks: String,
    },
    /// A tensor or the program's state cannot be kept in a checkpoint, or not be given what the
    /// checkpoint has.
    #[error("cannot {operation} {what}: {reason}")]
    Unfit {
        /// Save or load.
        operation: &'static str,
        /// The tensor's name, or the program's state.
        what: String,
        /// The reason, and what to do.
        reason: String,
    },
    /// A file is not what was written.
    #[error("{} is damaged: {reason}; bring it back, or use another checkpoint", .path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The damage.
        reason: String,
    },
    /// Ranks that were lost had parts of the newest checkpoint in memory, and no other one is whole.
    /// [`InProcessRestart`](crate::InProcessRestart) waits until others come in their place.
    #[error(
        "the checkpoint of step {step} is in memory in part only, as its other parts were on ranks that are gone: wait \
         until workers have come in their place, or keep checkpoints in a folder, too"
    )]
    PartsMissing {
        /// The step.
        step: usize,
    },
    /// No checkpoint in the folder is whole.
    #[error(
        "all checkpoints in {} are damaged; remove them to start anew: {newest}",
        .folder.display()
    )]
    AllDamaged {
        /// The folder.
        folder: PathBuf,
        /// The damage of the newest.
        newest: String,
    },
    /// Rank 0, which looks for all, does not see what another rank sees.
    #[error(
        "rank {rank} sees {seen} in {}, but rank 0 sees {by_rank_0}; use a disk that all machines \
         share",
        .path.display()
    )]
    NotShared {
        /// The file or folder.
        path: PathBuf,
        /// The rank that sees more.
        rank: usize,
        /// The checkpoint that it sees, or the number of bytes.
        seen: String,
        /// The same, as rank 0 sees it.
        by_rank_0: String,
    },
    /// Another rank has failed.
    #[error("rank {rank}: {reason}")]
    OtherRank {
        /// The rank.
        rank: usize,
        /// Its error.
        reason: String,
    },
    /// The checkpoint is of another program, model, optimizer or data set.
    #[error(
        "{} is of another {what}: {reason}; use what it was saved with, or another folder",
        .path.display()
    )]
    Other {
        /// The checkpoint.
        path: PathBuf,
        /// Program, model or optimizer.
        what: &'static str,
        /// The difference.
        reason: String,
    },
    /// The sampler has other settings than the one that was saved.
    #[error(
        "{}: {cause}; use the settings that it was saved with, or another folder",
        .path.display()
    )]
    Sampler {
        /// The checkpoint.
        path: PathBuf,
        /// The difference.
        cause: SamplerError,
    },
    /// A collective failed, or a failure has spoiled the weights.
    #[error(transparent)]
    Training(#[from] crate::Error),
    /// An operation on global tensors has failed.
    #[error(transparent)]
    Global(Box<dyn std::error::Error + Send + Sync>),
}

impl From<flow_comm::Error> for CheckpointError {
    fn from(error: flow_comm::Error) -> Self {
        Self::Training(error.into())
    }
}

#[doc(hidden)]
impl CheckpointError {
    /// Makes the error of `operation` on `path`.
    pub fn file(
        operation: &'static str,
        path: impl Into<PathBuf>,
        remedy: &'static str,
    ) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |cause| Self::File { operation, path, cause, remedy }
    }

    /// Makes the error of writing the file `path`.
    pub fn write(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        Self::file("write", path, WRITABLE)
    }

    /// Makes the error that `what` cannot be saved or loaded.
    pub fn unfit(operation: &'static str, what: impl Into<String>, reason: impl ToString) -> Self {
        // libtorch's texts have many lines: the first says what is wrong.
        let reason = reason.to_string().lines().next().unwrap_or_default().to_owned();
        Self::Unfit { operation, what: what.into(), reason }
    }

    /// Makes the error that the file `path` is damaged.
    pub fn damaged(path: impl Into<PathBuf>, reason: impl ToString) -> Self {
        Self::Damaged { path: path.into(), reason: reason.to_string() }
    }

    /// Returns whether a file of the checkpoint is missing or damaged. If not, it may be whole.
    pub(super) fn is_damage(&self) -> bool {
        match self {
            Self::Damaged { .. } => true,
            Self::File { cause, .. } => cause.kind() == ErrorKind::NotFound,
            _ => false,
        }
    }
}
