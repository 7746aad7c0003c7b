//! Data sets that are streams, whose items are dealt out to ranks and workers.

use std::iter::Fuse;
use std::ops::Range;
use std::sync::Arc;

use flow_comm::ProcessGroup;
use tch::Device;

use super::batches::{Batches, Epoch, Maker};
use super::loader::DataLoader;
use super::loader_error::LoaderError;
use super::on_device::{OnDevice, ToDevice};
use super::position::{Position, Taken};
use super::sampler_state::{SamplerError, SamplerState, Stateful, check_rank};
use super::shuffle::Shuffle;
use crate::BoxError;

/// Samples that come one after another, as those of PyTorch's `IterableDataset`: nobody knows how
/// many there are.
///
/// Each worker of each rank reads the whole stream, and makes batches of the items that are its own.
/// An item should therefore be cheap: a line of a file, not yet its tokens. What costs time belongs
/// into [`batch`](Self::batch). A data set that can skip items sooner than it can read them has a
/// [`stream_from`](Self::stream_from) of its own.
///
/// ```
/// use std::sync::Arc;
/// use flow_ddp::{BoxError, DataLoader, IterableDataset, ItemStream, StreamSampler};
///
/// struct Lines(&'static str);
///
/// impl IterableDataset for Lines {
///     type Item = &'static str;
///     type Batch = Vec<usize>;
///
///     fn stream(&self, _epoch: u64) -> Result<ItemStream<&'static str>, BoxError> {
///         Ok(Box::new(self.0.lines().map(Ok)))
///     }
///
///     fn batch(&self, lines: Vec<&'static str>) -> Result<Vec<usize>, BoxError> {
///         Ok(lines.iter().map(|line| line.len()).collect())
///     }
/// }
///
/// let lines = Arc::new(Lines("a\nbb\nccc\ndddd\neeeee"));
/// let sampler = StreamSampler::with_replicas(2, 0)?; // rank 0 of 2
/// let batches: Result<Vec<_>, _> = DataLoader::iterable(&lines, &sampler, 2).into_iter().collect();
/// assert_eq!(batches?, [[1, 3]]); // the fifth line fills no batch of both ranks
/// # Ok::<(), BoxError>(())
/// ```
pub trait IterableDataset: Send + Sync + 'static {
    /// A sample as the stream has it.
    type Item: 'static;

    /// A batch as the training loop wants it, for instance a pair of tensors.
    type Batch: Send + 'static;

    /// Opens the stream of an epoch. All ranks and workers open it, and it has the same items in the
    /// same order each time.
    ///
    /// # Errors
    /// Anything, and so may its items. The loader hands it to its caller as
    /// [`LoaderError::Dataset`]; an item that is an error fails on all ranks, whichever it is dealt
    /// to.
    fn stream(&self, epoch: u64) -> Result<ItemStream<Self::Item>, BoxError>;

    /// Opens the stream of an epoch without its first `skipped` items, to resume there (default:
    /// reads them). There may be fewer.
    ///
    /// # Errors
    /// As [`stream`](Self::stream).
    fn stream_from(&self, epoch: u64, skipped: usize) -> Result<ItemStream<Self::Item>, BoxError> {
        let mut stream = self.stream(epoch)?.fuse();
        for item in stream.by_ref().take(skipped) {
            item?;
        }
        Ok(Box::new(stream))
    }

    /// Makes a batch of some items.
    ///
    /// # Errors
    /// Anything; the loader hands it to its caller as [`LoaderError::Dataset`].
    fn batch(&self, items: Vec<Self::Item>) -> Result<Self::Batch, BoxError>;

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

impl<D: IterableDataset<Batch: ToDevice>> IterableDataset for OnDevice<D> {
    type Item = D::Item;
    type Batch = D::Batch;

    fn stream(&self, epoch: u64) -> Result<ItemStream<D::Item>, BoxError> {
        self.dataset.stream(epoch)
    }

    fn stream_from(&self, epoch: u64, skipped: usize) -> Result<ItemStream<D::Item>, BoxError> {
        self.dataset.stream_from(epoch, skipped)
    }

    fn batch(&self, items: Vec<D::Item>) -> Result<D::Batch, BoxError> {
        Ok(self.dataset.batch(items)?.to_device(self.device)?)
    }
}

/// The items of an [`IterableDataset`].
pub type ItemStream<T> = Box<dyn Iterator<Item = Result<T, BoxError>> + Send>;

/// Deals the items of an [`IterableDataset`] out to the ranks in turn, for
/// [`DataLoader::iterable`].
///
/// All ranks have the same number of batches: an epoch ends before the first batch that is not full
/// on every rank. With `drop_last(false)` of the loader, for evaluation, each item is seen once, and
/// ranks may differ by a batch.
///
/// [`resume`](Self::resume) goes on in the middle of an epoch, also with another number of ranks or
/// another batch size: no item is left out or seen twice.
#[derive(Debug)]
pub struct StreamSampler {
    replicas: usize,
    rank: usize,
    position: Position,
}

impl StreamSampler {
    /// Makes a sampler for this rank of `group`.
    pub fn new(group: &ProcessGroup) -> Self {
        Self::of(group.world_size(), group.rank())
    }

    /// Makes a sampler for `rank` of `replicas`.
    ///
    /// # Errors
    /// When `replicas` is 0, or `rank` is not below it.
    pub fn with_replicas(replicas: usize, rank: usize) -> Result<Self, SamplerError> {
        check_rank(replicas, rank)?;
        Ok(Self::of(replicas, rank))
    }

    fn of(replicas: usize, rank: usize) -> Self {
        Self { replicas, rank, position: Position::default() }
    }

    /// Starts `epoch`, which the data set's stream may depend on, at its first item; a position that
    /// [`resume`](Self::resume) has just set in this epoch is kept.
    pub fn set_epoch(&mut self, epoch: u64) {
        self.position.set_epoch(epoch);
    }

    /// Returns the epoch.
    pub fn epoch(&self) -> u64 {
        self.position.epoch()
    }

    /// Returns the position of this sampler. Items of batches that were not handed out yet do not
    /// count as taken.
    pub fn state(&self) -> SamplerState {
        SamplerState {
            epoch: self.position.epoch(),
            taken: self.position.taken(),
            samples: 0,
            seed: 0,
            shuffle: Shuffle::Other("stream".into()),
            drop_last: false,
            pad: false,
        }
    }

    /// Goes to the epoch and position of `state`, of whatever number of ranks; the next iteration
    /// starts there.
    ///
    /// # Errors
    /// When `state` is not that of a stream. The sampler is then unchanged.
    pub fn resume(&mut self, state: &SamplerState) -> Result<(), SamplerError> {
        state.same_settings(&self.state())?;
        self.position.resume(state.epoch, state.taken);
        Ok(())
    }
}

impl Stateful for StreamSampler {
    fn state(&self) -> SamplerState {
        self.state()
    }

    fn resume(&mut self, state: &SamplerState) -> Result<(), SamplerError> {
        self.resume(state)
    }
}

impl<'a, D: IterableDataset + ?Sized> DataLoader<'a, D, &'a StreamSampler> {
    /// Makes a loader of batches of `batch_size` items of a stream, with one worker thread. Batches
    /// come in the same order whatever the number of workers.
    pub fn iterable(dataset: &'a Arc<D>, sampler: &'a StreamSampler, batch_size: usize) -> Self {
        Self::of(dataset, sampler, batch_size, true)
    }
}

impl<D: IterableDataset + ?Sized> IntoIterator for DataLoader<'_, D, &StreamSampler> {
    type Item = Result<D::Batch, LoaderError>;
    type IntoIter = Batches<D::Batch>;

    fn into_iter(self) -> Batches<D::Batch> {
        let StreamSampler { replicas, rank, ref position } = *self.sampler;
        let start = position.start();
        let epoch = StreamEpoch {
            dataset: Arc::clone(self.dataset),
            epoch: position.epoch(),
            start,
            batch_size: self.batch_size,
            drop_last: self.drop_last,
            replicas,
            rank,
        };
        let (taken, settings) = if self.batch_size == 0 {
            (Taken::default(), Err(LoaderError::BatchSize))
        } else {
            (position.begin(start / replicas, start % replicas, replicas), Ok(()))
        };
        Batches::start(Arc::new(epoch), usize::MAX, taken, self.ahead, settings)
    }
}

/// An epoch of a stream, of which each worker makes some batches.
struct StreamEpoch<D: ?Sized> {
    dataset: Arc<D>,
    epoch: u64,
    /// The place in the stream of the first item that is dealt.
    start: usize,
    batch_size: usize,
    drop_last: bool,
    replicas: usize,
    rank: usize,
}

/// A stream that is read forward.
struct Reader<T> {
    stream: Fuse<ItemStream<T>>,
    /// The place of the item that comes next.
    next: usize,
}

impl<T> Reader<T> {
    /// Returns the item at a place further on, or an error before it; None behind the last one.
    fn at(&mut self, place: usize) -> Result<Option<T>, BoxError> {
        while self.next < place {
            if self.read()?.is_none() {
                return Ok(None);
            }
        }
        self.read()
    }

    fn read(&mut self) -> Result<Option<T>, BoxError> {
        self.next += 1;
        self.stream.next().transpose()
    }
}

impl<D: IterableDataset + ?Sized> StreamEpoch<D> {
    fn open(&self) -> Result<Reader<D::Item>, BoxError> {
        let stream = self.dataset.stream_from(self.epoch, self.start)?.fuse();
        Ok(Reader { stream, next: self.start })
    }

    /// Makes a batch of this rank's items in a step, unless the epoch has ended before.
    fn batch(
        &self,
        number: usize,
        reader: &mut Reader<D::Item>,
    ) -> Result<Option<D::Batch>, BoxError> {
        let step = self.batch_size.saturating_mul(self.replicas);
        let begin = self.start.saturating_add(step.saturating_mul(number));
        let mut items = Vec::new();
        for position in 0..self.batch_size {
            let place = (position * self.replicas + self.rank).saturating_add(begin);
            match reader.at(place)? {
                Some(item) => items.push(item),
                None => break,
            }
        }
        let is_short = items.len() < self.batch_size;
        if items.is_empty() || self.drop_last && (is_short || !self.ends_full(begin, reader)?) {
            return Ok(None);
        }
        self.dataset.batch(items).map(Some)
    }

    /// Returns whether the stream has the last item of a step, which is the last rank's.
    fn ends_full(&self, begin: usize, reader: &mut Reader<D::Item>) -> Result<bool, BoxError> {
        let last = begin + self.batch_size * self.replicas - 1;
        Ok(reader.next > last || reader.at(last)?.is_some())
    }
}

impl<D: IterableDataset + ?Sized> Epoch for StreamEpoch<D> {
    type Batch = D::Batch;

    fn rank(&self) -> usize {
        self.rank
    }

    fn positions(&self, number: usize) -> Range<usize> {
        let before = number.saturating_mul(self.batch_size);
        let start = before.saturating_add(self.start / self.replicas);
        start..start.saturating_add(self.batch_size)
    }

    fn indices(&self, _number: usize) -> Vec<usize> {
        Vec::new()
    }

    fn maker(self: Arc<Self>) -> Maker<D::Batch> {
        let mut reader = None;
        Box::new(move |number| {
            let reader = match &mut reader {
                Some(reader) => reader,
                none => match self.open() {
                    Ok(opened) => none.insert(opened),
                    Err(error) => return Some(Err(error)),
                },
            };
            self.batch(number, reader).transpose()
        })
    }
}
