//! Errors of loading batches.

use std::fmt;
use std::io;
use std::ops::Range;
use std::time::Duration;

use super::sampler_state::SamplerError;
use crate::BoxError;

/// The batch that an error is about.
#[derive(Debug)]
pub struct BatchId {
    /// The rank that loads it.
    pub rank: usize,
    /// Its number in this iteration, from 0.
    pub number: usize,
    /// The positions of its samples in the rank's epoch; with a batch sampler, its own.
    pub positions: Range<usize>,
    /// The indices of its samples in the data set; none where it is an
    /// [`IterableDataset`](crate::IterableDataset).
    pub indices: Vec<usize>,
}

impl fmt::Display for BatchId {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Self { rank, number, positions, indices } = self;
        write!(
            f,
            "batch {number} of rank {rank} (positions {} to {} of its epoch",
            positions.start, positions.end
        )?;
        if let (Some(first), Some(last)) = (indices.first(), indices.last()) {
            write!(f, ", data set indices {first} ... {last}")?;
        }
        f.write_str(")")
    }
}

/// The reason for which a [`DataLoader`](crate::DataLoader) gave no batch.
#[derive(Debug, thiserror::Error)]
pub enum LoaderError {
    /// The batch size is 0.
    #[error("batch size 0, it should be at least 1")]
    BatchSize,
    /// The sampler was made for another data set.
    #[error(
        "the sampler was made for {sampler} samples and the data set has {dataset}: make it with \
         the data set's len()"
    )]
    Length {
        /// Length that the sampler was made for.
        sampler: usize,
        /// Length of the data set.
        dataset: usize,
    },
    /// The sampler has no order.
    #[error(transparent)]
    Sampler(#[from] SamplerError),
    /// A worker thread could not be started.
    #[error("rank {rank} cannot start loader worker {worker}, ask for fewer workers: {error}")]
    Spawn {
        /// The rank.
        rank: usize,
        /// The worker's number.
        worker: usize,
        /// The system's reason.
        error: io::Error,
    },
    /// The data set returned an error.
    #[error("cannot load {batch}: {error}")]
    Dataset {
        /// The batch.
        batch: BatchId,
        /// The data set's error.
        error: BoxError,
    },
    /// The data set took too long.
    #[error(
        "{batch} was not there within {timeout:?}: does the data set hang? DataLoader::timeout() \
         changes the limit"
    )]
    Timeout {
        /// The batch.
        batch: BatchId,
        /// The limit.
        timeout: Duration,
    },
    /// The data set panicked, or the closure of an [`Order::computed`](crate::Order::computed).
    #[error("the data set panicked in {batch}: {message}")]
    Panic {
        /// The batch.
        batch: BatchId,
        /// The panic's message.
        message: String,
    },
}
