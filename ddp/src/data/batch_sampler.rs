//! Batches of a sampler's samples, dealt out whole.

use super::order::{Order, Sampler};
use super::sampler_state::SamplerError;
use super::shuffle::Shuffle;

/// Cuts the order of another sampler into batches: `torch.utils.data.BatchSampler`.
///
/// [`DistributedSampler`](crate::DistributedSampler) deals the batches out in turn, each whole, as
/// Accelerate's `BatchSamplerShard` does. Without it, a
/// [`DataLoader`](crate::DataLoader::new) makes batches of what a rank gets sample by sample.
///
/// ```
/// use flow_ddp::{BatchSampler, DistributedSampler, RandomSampler};
///
/// let batches = BatchSampler::new(RandomSampler::new(10).shuffle(false), 3)?;
/// let sampler = DistributedSampler::wrap_replica(batches, 2, 1)?;
/// assert_eq!(sampler.indices(), [vec![3, 4, 5], vec![9]]);
/// # Ok::<(), flow_ddp::SamplerError>(())
/// ```
#[derive(Clone, Debug)]
pub struct BatchSampler<S> {
    sampler: S,
    batch_size: usize,
    drop_last: bool,
}

impl<S: Sampler<Item = usize>> BatchSampler<S> {
    /// Makes batches of `batch_size` samples. The last may be smaller.
    ///
    /// # Errors
    /// When `batch_size` is 0.
    pub fn new(sampler: S, batch_size: usize) -> Result<Self, SamplerError> {
        if batch_size == 0 {
            return Err(SamplerError::BatchSize);
        }
        Ok(Self { sampler, batch_size, drop_last: false })
    }

    /// Sets whether to leave out a last batch of fewer than `batch_size` samples (default: false).
    pub fn drop_last(mut self, drop_last: bool) -> Self {
        self.drop_last = drop_last;
        self
    }
}

impl<S: Sampler<Item = usize>> Sampler for BatchSampler<S> {
    type Item = Vec<usize>;

    fn samples(&self) -> usize {
        self.sampler.samples()
    }

    fn places(&self) -> usize {
        if self.drop_last {
            self.sampler.places() / self.batch_size
        } else {
            self.sampler.places().div_ceil(self.batch_size)
        }
    }

    fn order(&self, epoch: u64) -> Order<Vec<usize>> {
        let all = self.sampler.places();
        let batch_size = self.batch_size;
        Order::computed_from(self.sampler.order(epoch), all, move |items, place| {
            let start = place * batch_size;
            let end = all.min(start.saturating_add(batch_size));
            (start..end).map(|place| items(place)).collect()
        })
    }

    fn seed(&self) -> u64 {
        self.sampler.seed()
    }

    fn shuffle(&self) -> Shuffle {
        let order = self.sampler.shuffle();
        let last = if self.drop_last { "whole batches" } else { "batches" };
        Shuffle::Other(format!("{last} of {} of {order}", self.batch_size))
    }
}
