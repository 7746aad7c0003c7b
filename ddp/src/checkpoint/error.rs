//! What can go wrong with checkpoints.

use std::io;
use std::path::PathBuf;

use crate::data::sampler::SamplerError;

/// Errors of [`Checkpoints`](super::Checkpoints): one line, with the file and what to do.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// A file or folder cannot be read or written.
    #[error("cannot {operation} {}: {cause}; {remedy}", .path.display())]
    File {
        /// What was being done.
        operation: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The cause.
        cause: io::Error,
        /// What to do.
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
         Checkpoints::latest first, or use another folder",
        .0.display()
    )]
    Unread(PathBuf),
    /// What has a checkpoint's name is none, and saving would replace it.
    #[error(
        "{} is no checkpoint of Flow, and saving would replace it; move it away, or use another \
         folder",
        .0.display()
    )]
    Foreign(PathBuf),
    /// A tensor or the program's state cannot be kept.
    #[error("cannot save {what} in {}: {reason}", .path.display())]
    Unfit {
        /// The tensor's name, or the program's state.
        what: String,
        /// The checkpoint.
        path: PathBuf,
        /// Why, and what to do.
        reason: String,
    },
    /// Not one checkpoint in the folder is whole.
    #[error(
        "all checkpoints in {} are damaged; remove them to start anew: {newest}",
        .folder.display()
    )]
    Damaged {
        /// The folder.
        folder: PathBuf,
        /// What is wrong with the newest.
        newest: String,
    },
    /// Rank 0, which reads for all, does not see what another rank sees.
    #[error(
        "the newest checkpoint in {} is {seen} for rank {rank}, but {by_rank_0} for rank 0, which \
         reads it for all; use a disk that all machines share",
        .folder.display()
    )]
    NotShared {
        /// The folder.
        folder: PathBuf,
        /// The rank that sees a newer one.
        rank: usize,
        /// The name of that one.
        seen: String,
        /// The name of the one that rank 0 sees, or none.
        by_rank_0: String,
    },
    /// What rank 0, which reads and writes for all, failed with, on the other ranks.
    #[error("rank 0: {0}")]
    Rank0(String),
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
}

impl From<flow_comm::Error> for CheckpointError {
    fn from(error: flow_comm::Error) -> Self {
        Self::Training(error.into())
    }
}

impl CheckpointError {
    /// The error of `operation` on `path`.
    pub(super) fn file(
        operation: &'static str,
        path: impl Into<PathBuf>,
        remedy: &'static str,
    ) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |cause| Self::File { operation, path, cause, remedy }
    }
}
