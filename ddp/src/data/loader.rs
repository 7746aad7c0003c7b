//! Data sets, and the batches of an epoch of one.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use flow_comm::DEFAULT_TIMEOUT;
use tch::Device;

use super::batches::{Ahead, Batches, Epoch, Maker};
use super::loader_error::LoaderError;
use super::on_device::{OnDevice, ToDevice};
use super::order::Sampler;
use super::sampler::{AppendIndices, Deal, Deals, DistributedSampler};
use crate::BoxError;

/// Samples that can be fetched by index, a batch at a time and from several threads at once.
pub trait Dataset: Send + Sync + 'static {
    /// A batch as the training loop wants it, for instance a pair of tensors.
    type Batch: Send + 'static;

    /// Number of samples.
    fn len(&self) -> usize;

    /// Returns whether there is no sample.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Makes one batch of the samples at `indices`, each below [`len`](Self::len), in this order.
    ///
    /// # Errors
    /// Anything; the loader hands it to its caller as [`LoaderError::Dataset`].
    fn batch(&self, indices: &[usize]) -> Result<Self::Batch, BoxError>;

    /// Returns the data set whose batches are on `device`: the loader's workers bring them there
    /// ahead of time.
    fn to_device(self, device: Device) -> OnDevice<Self>
    where
        Self: Sized,
        Self::Batch: ToDevice,
    {
        OnDevice::new(self, device)
    }
}

impl<D: Dataset<Batch: ToDevice>> Dataset for OnDevice<D> {
    type Batch = D::Batch;

    fn len(&self) -> usize {
        self.dataset.len()
    }

    fn batch(&self, indices: &[usize]) -> Result<D::Batch, BoxError> {
        Ok(self.dataset.batch(indices)?.to_device(self.device)?)
    }
}

/// One epoch of a data set in batches, to be iterated over:
/// `for batch in DataLoader::new(&dataset, &sampler, 64)`.
///
/// Batches come in the order of `sampler`, whatever the order in which workers finish. Iterating
/// takes the sampler's epoch and position as they are at that moment, and moves the position on as
/// batches are handed out.
///
/// Each item is a `Result`; after an error the iteration ends. Settings that cannot work are
/// reported in the same place, as the first and only item. Examples are a batch size of 0 and a
/// sampler for a data set of another length. So a training loop has one place where loading can
/// fail.
///
/// Dropping the iterator half-way stops and joins the workers; it waits for the batches that they
/// are just making, for at most the timeout.
pub struct DataLoader<'a, D: ?Sized, S = Sampled<'a>> {
    pub(super) dataset: &'a Arc<D>,
    pub(super) sampler: S,
    pub(super) batch_size: usize,
    pub(super) drop_last: bool,
    pub(super) ahead: Ahead,
}

/// How a [`DataLoader`] of a [`Dataset`] chooses samples: by a sampler.
pub struct Sampled<'a>(&'a dyn Deal);

impl<'a, D: Dataset + ?Sized> DataLoader<'a, D> {
    /// Makes a loader of batches of `batch_size` samples (the last may be smaller), with one
    /// worker thread.
    pub fn new<S>(
        dataset: &'a Arc<D>,
        sampler: &'a DistributedSampler<S>,
        batch_size: usize,
    ) -> Self
    where
        S: Sampler<Item = usize>,
    {
        Self::of(dataset, Sampled(sampler), batch_size, false)
    }

    /// Makes a loader of the batches that `sampler` deals out, as `DataLoader(batch_sampler=...)`
    /// does in PyTorch, with one worker thread.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use flow_ddp::{BoxError, DataLoader, Dataset, DistributedSampler, MaxTokensBatchSampler};
    ///
    /// struct Words(Vec<&'static str>);
    ///
    /// impl Dataset for Words {
    ///     type Batch = Vec<&'static str>;
    ///
    ///     fn len(&self) -> usize {
    ///         self.0.len()
    ///     }
    ///
    ///     fn batch(&self, indices: &[usize]) -> Result<Self::Batch, BoxError> {
    ///         Ok(indices.iter().map(|&index| self.0[index]).collect())
    ///     }
    /// }
    ///
    /// let words = Arc::new(Words(vec!["a", "longest", "be", "longer", "see"]));
    /// let lengths: Vec<usize> = words.0.iter().map(|word| word.len()).collect();
    /// let batches = MaxTokensBatchSampler::new(lengths, 14)?.shuffle(false);
    /// let sampler = DistributedSampler::wrap_replica(batches, 1, 0)?;
    /// let loaded: Result<Vec<_>, _> =
    ///     DataLoader::with_batch_sampler(&words, &sampler).into_iter().collect();
    /// assert_eq!(loaded?, [vec!["a", "be", "see"], vec!["longer", "longest"]]);
    /// # Ok::<(), BoxError>(())
    /// ```
    pub fn with_batch_sampler<S>(dataset: &'a Arc<D>, sampler: &'a DistributedSampler<S>) -> Self
    where
        S: Sampler<Item = Vec<usize>>,
    {
        Self::of(dataset, Sampled(sampler), 1, false)
    }

    /// Returns the number of batches that an iteration gives; after [`DistributedSampler::resume`],
    /// those that are left.
    pub fn len(&self) -> usize {
        let items = self.sampler.0.range().len();
        if self.batch_size == 0 {
            0
        } else if self.drop_last {
            items / self.batch_size
        } else {
            items.div_ceil(self.batch_size)
        }
    }

    /// Returns whether an iteration gives no batch.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn check(&self) -> Result<(), LoaderError> {
        if self.batch_size == 0 {
            return Err(LoaderError::BatchSize);
        }
        let sampler = self.sampler.0.samples();
        let dataset = self.dataset.len();
        if sampler != dataset {
            return Err(LoaderError::Length { sampler, dataset });
        }
        Ok(())
    }
}

impl<'a, D: ?Sized, S> DataLoader<'a, D, S> {
    pub(super) fn of(dataset: &'a Arc<D>, sampler: S, batch_size: usize, drop_last: bool) -> Self {
        let ahead = Ahead { workers: 1, prefetch: 2, timeout: DEFAULT_TIMEOUT };
        Self { dataset, sampler, batch_size, drop_last, ahead }
    }

    /// Sets the number of worker threads (default: 1). With 0, the caller's thread makes each batch
    /// when it is asked for.
    pub fn workers(mut self, workers: usize) -> Self {
        self.ahead.workers = workers;
        self
    }

    /// Sets how many batches each worker may have made, or be making, that were not yet handed out
    /// (default: 2, at least 1).
    pub fn prefetch(mut self, batches: usize) -> Self {
        self.ahead.prefetch = batches.max(1);
        self
    }

    /// Sets whether to leave out a last batch of fewer than `batch_size` samples (default: false,
    /// and true for an [`IterableDataset`](crate::IterableDataset)). It is nothing to batches of a
    /// batch sampler: [`BatchSampler::drop_last`](crate::BatchSampler::drop_last) is for those.
    pub fn drop_last(mut self, drop_last: bool) -> Self {
        self.drop_last = drop_last;
        self
    }

    /// Sets how long to wait for a batch from a worker (default: as long as ranks wait for each
    /// other). A worker that takes longer is left behind: the iteration ends with an error.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.ahead.timeout = timeout;
        self
    }
}

impl<D: Dataset + ?Sized> IntoIterator for DataLoader<'_, D> {
    type Item = Result<D::Batch, LoaderError>;
    type IntoIter = Batches<D::Batch>;

    fn into_iter(self) -> Batches<D::Batch> {
        let count = self.len();
        let begun = self.check().and_then(|()| Ok(self.sampler.0.begin()?));
        let (Deals { append, range, taken }, settings) = match begun {
            Ok(deals) => (deals, Ok(())),
            Err(error) => (Deals::none(), Err(error)),
        };
        let epoch = SampledEpoch {
            dataset: Arc::clone(self.dataset),
            append,
            range,
            batch_size: self.batch_size,
            rank: self.sampler.0.rank(),
        };
        Batches::start(Arc::new(epoch), count, taken, self.ahead, settings)
    }
}

/// An epoch's batches, any of which a worker can make.
struct SampledEpoch<D: ?Sized> {
    dataset: Arc<D>,
    append: AppendIndices,
    /// The positions in the rank's items that are batched.
    range: Range<usize>,
    batch_size: usize,
    rank: usize,
}

impl<D: Dataset + ?Sized> Epoch for SampledEpoch<D> {
    type Batch = D::Batch;

    fn rank(&self) -> usize {
        self.rank
    }

    fn positions(&self, number: usize) -> Range<usize> {
        let start = self.range.start + number * self.batch_size;
        start..self.range.end.min(start.saturating_add(self.batch_size))
    }

    fn indices(&self, number: usize) -> Vec<usize> {
        let mut indices = Vec::new();
        for position in self.positions(number) {
            (self.append)(position, &mut indices);
        }
        indices
    }

    fn maker(self: Arc<Self>) -> Maker<D::Batch> {
        Box::new(move |number| Some(self.dataset.batch(&self.indices(number))))
    }
}
