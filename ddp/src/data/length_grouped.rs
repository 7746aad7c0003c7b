//! Samples of like length together, so that batches need little padding.

use std::cmp::Reverse;

use flow_comm::digest;

use super::order::{Order, Sampler};
use super::permutation::randperm;
use super::sampler_state::SamplerError;
use super::shuffle::Shuffle;

/// Shuffles samples so that those which come together are of like length: transformers'
/// `LengthGroupedSampler`, which `group_by_length` turns on.
///
/// PyTorch's permutation is cut into mega-batches of `batch_size * 50` samples, and each is sorted,
/// the longest first. The longest sample of all is the first one: what runs out of memory does so at
/// once. With [`DistributedSampler`](crate::DistributedSampler) the indices are those of
/// `DistributedLengthGroupedSampler`. Ranks have batches of like length in the same step, since they
/// take samples in turn. For a checkpoint to be resumed by another number of ranks, `batch_size`
/// must not depend on it.
///
/// ```
/// use flow_ddp::{DistributedSampler, LengthGroupedSampler};
///
/// let lengths = vec![3, 50, 7, 8, 60, 2, 49, 1];
/// let sampler = LengthGroupedSampler::new(lengths, 2)?;
/// let sampler = DistributedSampler::wrap_replica(sampler, 1, 0)?;
/// assert_eq!(sampler.indices(), [4, 0, 3, 7, 2, 5, 1, 6]);
/// # Ok::<(), flow_ddp::SamplerError>(())
/// ```
#[derive(Clone, Debug)]
pub struct LengthGroupedSampler {
    lengths: Vec<usize>,
    digest: u64,
    mega_batch: usize,
    seed: u64,
}

/// Batches of a mega-batch.
const MEGA_BATCH_MULT: usize = 50;
/// There are so many mega-batches at least.
const MEGA_BATCHES: usize = 4;

impl LengthGroupedSampler {
    /// Makes an order of samples that have these lengths, for batches of `batch_size`. There are
    /// four mega-batches at least.
    ///
    /// # Errors
    /// When `batch_size` is 0.
    pub fn new(lengths: impl Into<Vec<usize>>, batch_size: usize) -> Result<Self, SamplerError> {
        if batch_size == 0 {
            return Err(SamplerError::BatchSize);
        }
        let lengths = lengths.into();
        let batches = lengths.len() / batch_size;
        let mega_batch_mult = (batches / MEGA_BATCHES).clamp(1, MEGA_BATCH_MULT);
        let mega_batch = batch_size.saturating_mul(mega_batch_mult);
        Ok(Self { digest: digest(&lengths), lengths, mega_batch, seed: 0 })
    }

    /// Sets the seed, the same on all ranks (default: 0). The low 32 bits of seed + epoch are used.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }
}

impl Sampler for LengthGroupedSampler {
    type Item = usize;

    fn samples(&self) -> usize {
        self.lengths.len()
    }

    fn order(&self, epoch: u64) -> Order<usize> {
        let length = |index: usize| self.lengths[index];
        let mut order = randperm::<usize>(self.lengths.len(), self.seed.wrapping_add(epoch));
        let mut longest = 0; // the place of the longest sample, the first of its mega-batch
        for start in (0..order.len()).step_by(self.mega_batch) {
            let end = order.len().min(start.saturating_add(self.mega_batch));
            order[start..end].sort_by_key(|&index| Reverse(length(index)));
            if length(order[start]) > length(order[longest]) {
                longest = start;
            }
        }
        if !order.is_empty() {
            order.swap(0, longest);
        }
        Order::list(order)
    }

    fn seed(&self) -> u64 {
        self.seed
    }

    fn shuffle(&self) -> Shuffle {
        let Self { digest, mega_batch, .. } = self;
        Shuffle::Other(format!("grouped by length, {mega_batch} at a time (lengths {digest:016x})"))
    }
}
