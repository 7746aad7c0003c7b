//! What can go wrong with checkpoints.

use std::io;
use std::path::PathBuf;

/// Errors of [`Checkpoints`](super::Checkpoints) and [`merge`](super::merge()): one line, with the
/// file and what to do.
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
    /// A file is not what was written.
    #[error("{} is damaged: {reason}; bring it back, or use another checkpoint", .path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// Not one checkpoint in the folder is whole.
    #[error(
        "all checkpoints in {} are damaged; bring a file back, or remove them to start anew: \
         {newest}",
        .folder.display()
    )]
    AllDamaged {
        /// The folder.
        folder: PathBuf,
        /// What is wrong with the newest.
        newest: String,
    },
    /// The folder has checkpoints, and [`latest`](super::Checkpoints::latest) was not called.
    #[error(
        "{} has checkpoints of an earlier training, which saving would replace; call \
         Checkpoints::latest first, or use another folder",
        .0.display()
    )]
    Unread(PathBuf),
    /// What has a checkpoint's name is none, and saving would replace it.
    #[error(
        "{} has no index.json, so it is no sharded checkpoint, and saving would replace it; move \
         it away, or use another folder",
        .0.display()
    )]
    Foreign(PathBuf),
    /// Something cannot be kept in a checkpoint, or not be given what the checkpoint has.
    #[error("cannot {operation} {what}: {reason}")]
    Unfit {
        /// Save or load.
        operation: &'static str,
        /// The tensor's name, or the program's state.
        what: String,
        /// Why, and what to do.
        reason: String,
    },
    /// Rank 0 does not see what another rank has written.
    #[error(
        "rank {rank} has written {bytes} bytes to {}, but rank 0 sees {seen}; use a disk that all \
         machines share",
        .path.display()
    )]
    NotShared {
        /// The file.
        path: PathBuf,
        /// The rank that has written it.
        rank: usize,
        /// Its length for that rank.
        bytes: u64,
        /// Its length for rank 0.
        seen: u64,
    },
    /// The checkpoint is of another program, model or optimizer.
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
    /// What another rank has failed with.
    #[error("rank {rank}: {reason}")]
    OtherRank {
        /// The rank.
        rank: usize,
        /// Its error.
        reason: String,
    },
    /// A collective failed, or a part of a tensor is missing.
    #[error(transparent)]
    Global(#[from] crate::Error),
}

impl From<flow_comm::Error> for CheckpointError {
    fn from(error: flow_comm::Error) -> Self {
        Self::Global(error.into())
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

    /// Why `what` cannot be saved or loaded.
    pub(super) fn unfit(operation: &'static str, what: &str, reason: String) -> Self {
        // libtorch's texts have many lines: the first says what is wrong.
        let reason = reason.lines().next().unwrap_or_default().to_owned();
        Self::Unfit { operation, what: what.to_owned(), reason }
    }

    /// What is wrong with the file `path`.
    pub(super) fn damaged(path: impl Into<PathBuf>, reason: impl ToString) -> Self {
        Self::Damaged { path: path.into(), reason: reason.to_string() }
    }
}
