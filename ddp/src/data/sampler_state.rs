//! The positions that samplers go on from, and their errors.

use std::fmt::Display;

use serde::{Deserialize, Serialize};

use super::shuffle::Shuffle;

/// The position of a [`DistributedSampler`](crate::DistributedSampler) or a [`StreamSampler`](crate::StreamSampler), to be kept
/// in a checkpoint. It is the same on all ranks that took as many samples, so one rank's state
/// serves all.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SamplerState {
    /// The epoch.
    pub epoch: u64,
    /// Samples, or batches of a batch sampler, that all ranks together have taken in this epoch.
    pub taken: usize,
    /// Length of the data set.
    pub samples: usize,
    /// The seed.
    pub seed: u64,
    /// The kind of shuffle.
    pub shuffle: Shuffle,
    /// Whether the samples that do not fill a place on every rank are dropped.
    pub drop_last: bool,
    /// Whether samples are repeated to fill the last places.
    pub pad: bool,
}

/// A sampler of any kind that goes on from a [`SamplerState`].
pub trait Stateful {
    /// Returns the position.
    fn state(&self) -> SamplerState;

    /// Goes to the epoch and position of `state`, of whatever number of ranks; the next iteration
    /// starts there.
    ///
    /// # Errors
    /// When `state` was saved by a sampler with other settings, or has taken more samples than
    /// there are. The sampler is then unchanged.
    fn resume(&mut self, state: &SamplerState) -> Result<(), SamplerError>;
}

/// Errors of samplers.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum SamplerError {
    /// The number of ranks is 0.
    #[error("invalid number of replicas 0, it should be at least 1")]
    Replicas,
    /// The rank is not one of the replicas.
    #[error("invalid rank {rank}, it should be in the interval [0, {}]", .replicas - 1)]
    Rank {
        /// The rank that was given.
        rank: usize,
        /// The number of ranks.
        replicas: usize,
    },
    /// The batch size is 0.
    #[error("batch size 0, it should be at least 1")]
    BatchSize,
    /// A sample alone is too long for a batch.
    #[error(
        "sample {index} has {length} tokens, it should have at most the {max_tokens} of a batch: \
         leave it out, cut it, or raise max_tokens"
    )]
    TooLong {
        /// The sample.
        index: usize,
        /// Its length.
        length: usize,
        /// The tokens of a batch.
        max_tokens: usize,
    },
    /// A weight is no probability.
    #[error(
        "sample {index} has weight {weight}, it should be at least 0, and the sum of all finite"
    )]
    Weight {
        /// The sample.
        index: usize,
        /// Its weight.
        weight: f64,
    },
    /// There are fewer samples to draw than are to be drawn.
    #[error(
        "cannot draw {num_samples} samples: {drawable} have a weight above 0; {}",
        if *.drawable == 0 { "give some a weight" } else { "ask for fewer, or draw with replacement" }
    )]
    Draws {
        /// The number of draws.
        num_samples: usize,
        /// The samples that have a weight above 0.
        drawable: usize,
    },
    /// The order of a [`Sampler`](crate::Sampler) of one's own has not the length that it tells.
    #[error(
        "the sampler's order lists {items} items, it should have as many as its places(): {places}"
    )]
    Order {
        /// The items of the list.
        items: usize,
        /// The sampler's places.
        places: usize,
    },
    /// The state to resume from was saved by a sampler with other settings.
    #[error(
        "cannot resume: the state was saved with {field} {saved}, this sampler has {field} {here}"
    )]
    Mismatch {
        /// The setting, as its method or [`SamplerState`] field is called.
        field: &'static str,
        /// Its value in the state.
        saved: String,
        /// Its value here.
        here: String,
    },
    /// The state to resume from has taken more samples than there are.
    #[error("cannot resume: the state has taken {taken} samples of an epoch of {samples}")]
    Taken {
        /// The samples, or batches, taken in the state.
        taken: usize,
        /// Those of an epoch.
        samples: usize,
    },
}

impl SamplerState {
    /// Checks that a sampler in the state `here` has the settings that this state was saved with.
    pub(crate) fn same_settings(&self, here: &Self) -> Result<(), SamplerError> {
        same("samples", &self.samples, &here.samples)?;
        same("seed", &self.seed, &here.seed)?;
        same("shuffle", &self.shuffle, &here.shuffle)?;
        same("drop_last", &self.drop_last, &here.drop_last)?;
        same("pad", &self.pad, &here.pad)
    }
}

fn same<T: PartialEq + Display>(
    field: &'static str,
    saved: &T,
    here: &T,
) -> Result<(), SamplerError> {
    if saved == here {
        return Ok(());
    }
    Err(SamplerError::Mismatch { field, saved: saved.to_string(), here: here.to_string() })
}

pub(crate) fn check_rank(replicas: usize, rank: usize) -> Result<(), SamplerError> {
    if replicas == 0 {
        return Err(SamplerError::Replicas);
    }
    if rank >= replicas {
        return Err(SamplerError::Rank { rank, replicas });
    }
    Ok(())
}
