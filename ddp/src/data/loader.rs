//! Batches of a data set, made ahead of time by worker threads and handed out in the sampler's
//! order.
//!
//! Worker `w` of `W` makes batches `w`, `w + W`, `w + 2 W`, ... and sends them through a bounded
//! channel of its own; the caller takes from the channels in turn. The order is thereby fixed
//! without any shared queue, and dropping the receiving ends stops the workers.

use std::any::Any;
use std::convert::Infallible;
use std::error::Error;
use std::fmt;
use std::io;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use flow_comm::{DEFAULT_TIMEOUT, ForkSafe};

use super::sampler::{DistributedSampler, Order, Taken};

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
    fn batch(&self, indices: &[usize]) -> Result<Self::Batch, Box<dyn Error + Send + Sync>>;
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
pub struct DataLoader<'a, D: Dataset + ?Sized> {
    dataset: &'a Arc<D>,
    sampler: &'a DistributedSampler,
    batch_size: usize,
    workers: usize,
    prefetch: usize,
    drop_last: bool,
    timeout: Duration,
}

impl<'a, D: Dataset + ?Sized> DataLoader<'a, D> {
    /// Makes a loader of batches of `batch_size` samples (the last may be smaller), with one
    /// worker thread.
    pub fn new(dataset: &'a Arc<D>, sampler: &'a DistributedSampler, batch_size: usize) -> Self {
        Self {
            dataset,
            sampler,
            batch_size,
            workers: 1,
            prefetch: 2,
            drop_last: false,
            timeout: DEFAULT_TIMEOUT,
        }
    }

    /// Sets the number of worker threads (default: 1). With 0, the caller's thread makes each batch
    /// when it is asked for.
    pub fn workers(mut self, workers: usize) -> Self {
        self.workers = workers;
        self
    }

    /// Sets how many batches each worker may have made, or be making, that were not yet handed out
    /// (default: 2, at least 1).
    pub fn prefetch(mut self, batches: usize) -> Self {
        self.prefetch = batches.max(1);
        self
    }

    /// Sets whether to leave out a last batch of fewer than `batch_size` samples (default: false).
    pub fn drop_last(mut self, drop_last: bool) -> Self {
        self.drop_last = drop_last;
        self
    }

    /// Sets how long to wait for a batch from a worker (default: as long as ranks wait for each
    /// other). A worker that takes longer is left behind: the iteration ends with an error.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Returns the number of batches that an iteration gives; after [`DistributedSampler::resume`],
    /// those that are left.
    pub fn len(&self) -> usize {
        let samples = self.sampler.range().len();
        if self.batch_size == 0 {
            0
        } else if self.drop_last {
            samples / self.batch_size
        } else {
            samples.div_ceil(self.batch_size)
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
        let sampler = self.sampler.samples();
        let dataset = self.dataset.len();
        if sampler != dataset {
            return Err(LoaderError::Length { sampler, dataset });
        }
        Ok(())
    }
}

impl<D: Dataset + ?Sized> IntoIterator for DataLoader<'_, D> {
    type Item = Result<D::Batch, LoaderError>;
    type IntoIter = Batches<D>;

    fn into_iter(self) -> Batches<D> {
        let count = self.len();
        let indices = self.sampler.iter();
        let plan = EpochPlan {
            dataset: Arc::clone(self.dataset),
            order: indices.order,
            range: indices.range,
            batch_size: self.batch_size,
            rank: self.sampler.rank(),
        };
        let mut batches = Batches {
            plan: Arc::new(plan),
            numbers: 0..count,
            taken: indices.taken,
            workers: ForkSafe::new(Vec::new()),
            ended: ForkSafe::new(None),
            timeout: self.timeout,
            failure: None,
        };
        let workers = self.workers.min(count);
        if let Err(error) = self.check().and_then(|()| batches.start(workers, self.prefetch)) {
            batches.stop();
            batches.failure = Some(error);
        }
        batches
    }
}

/// The batches of one epoch; see [`DataLoader`].
pub struct Batches<D: Dataset + ?Sized> {
    plan: Arc<EpochPlan<D>>,
    /// Numbers of the batches still to come.
    numbers: Range<usize>,
    /// The sampler's position.
    taken: Taken,
    workers: ForkSafe<Vec<LoaderWorker<D::Batch>>>,
    /// Disconnected when the last worker has ended.
    ended: ForkSafe<Option<Receiver<Infallible>>>,
    timeout: Duration,
    failure: Option<LoaderError>,
}

struct LoaderWorker<B> {
    batches: Receiver<Result<B, LoaderError>>,
    thread: JoinHandle<()>,
}

impl<D: Dataset + ?Sized> Batches<D> {
    fn start(&mut self, workers: usize, prefetch: usize) -> Result<(), LoaderError> {
        let (alive, ended) = channel::<Infallible>();
        *self.ended = Some(ended);
        for worker in 0..workers {
            // The batch in a worker's hands counts too.
            let (sender, batches) = sync_channel(prefetch - 1);
            let plan = Arc::clone(&self.plan);
            let numbers = self.numbers.clone().skip(worker).step_by(workers);
            let alive = alive.clone();
            let thread = thread::Builder::new()
                .name(format!("flow-loader-{worker}"))
                .spawn(move || plan.work(numbers, &sender, alive))
                .map_err(|error| LoaderError::Spawn { rank: self.plan.rank, worker, error })?;
            self.workers.push(LoaderWorker { batches, thread });
        }
        Ok(())
    }

    fn receive(&mut self, number: usize) -> Result<D::Batch, LoaderError> {
        if !self.workers.is_ours() {
            let message =
                "its thread is in the process that this one was forked from: begin an epoch here"
                    .into();
            return Err(LoaderError::Panic { batch: self.plan.id(number), message });
        }
        let worker = number % self.workers.len();
        match self.workers[worker].batches.recv_timeout(self.timeout) {
            Ok(batch) => batch,
            Err(RecvTimeoutError::Timeout) => {
                self.workers.clear(); // not joined: the one that hangs has had its time
                Err(LoaderError::Timeout { batch: self.plan.id(number), timeout: self.timeout })
            }
            Err(RecvTimeoutError::Disconnected) => {
                let message = "worker lost".into();
                Err(LoaderError::Panic { batch: self.plan.id(number), message })
            }
        }
    }

    /// Ends the iteration.
    fn stop(&mut self) {
        self.numbers = 0..0;
        if !self.workers.is_ours() {
            return;
        }
        // All receivers go before the first join: a worker that waits to send ends when its
        // receiver is gone.
        let threads: Vec<_> = self.workers.drain(..).map(|worker| worker.thread).collect();
        let Some(ended) = self.ended.take().filter(|_| !threads.is_empty()) else { return };
        if let Err(RecvTimeoutError::Timeout) = ended.recv_timeout(self.timeout) {
            log::warn!(
                "rank {}: the data set hangs; its loader's threads are left behind",
                self.plan.rank
            );
            return;
        }
        for thread in threads {
            // A worker hands every panic of the data set over as an error.
            let _ = thread.join();
        }
    }
}

impl<D: Dataset + ?Sized> Iterator for Batches<D> {
    type Item = Result<D::Batch, LoaderError>;

    fn next(&mut self) -> Option<Self::Item> {
        if let Some(error) = self.failure.take() {
            return Some(Err(error));
        }
        let Some(number) = self.numbers.next() else {
            self.stop();
            return None;
        };
        let batch =
            if self.workers.is_empty() { self.plan.batch(number) } else { self.receive(number) };
        match &batch {
            Ok(_) => self.taken.up_to(self.plan.positions(number).end),
            Err(_) => self.stop(),
        }
        Some(batch)
    }
}

impl<D: Dataset + ?Sized> Drop for Batches<D> {
    fn drop(&mut self) {
        self.stop();
    }
}

/// An epoch's batches, any of which a worker can make.
struct EpochPlan<D: ?Sized> {
    dataset: Arc<D>,
    order: Arc<Order>,
    /// The positions in the rank's samples that are batched.
    range: Range<usize>,
    batch_size: usize,
    rank: usize,
}

impl<D: Dataset + ?Sized> EpochPlan<D> {
    /// Makes a worker's batches. It ends after the last one, after a failed one, or when nobody
    /// wants batches any more.
    fn work(
        &self,
        numbers: impl Iterator<Item = usize>,
        sender: &SyncSender<Result<D::Batch, LoaderError>>,
        _alive: Sender<Infallible>,
    ) {
        for number in numbers {
            let batch = self.batch(number);
            let failed = batch.is_err();
            if sender.send(batch).is_err() || failed {
                return;
            }
        }
    }

    fn batch(&self, number: usize) -> Result<D::Batch, LoaderError> {
        let id = self.id(number);
        match catch_unwind(AssertUnwindSafe(|| self.dataset.batch(&id.indices))) {
            Ok(Ok(batch)) => Ok(batch),
            Ok(Err(error)) => Err(LoaderError::Dataset { batch: id, error }),
            Err(panic) => Err(LoaderError::Panic { batch: id, message: message(panic.as_ref()) }),
        }
    }

    fn positions(&self, number: usize) -> Range<usize> {
        let start = self.range.start + number * self.batch_size;
        start..self.range.end.min(start.saturating_add(self.batch_size))
    }

    fn id(&self, number: usize) -> BatchId {
        let positions = self.positions(number);
        let indices = positions.clone().map(|position| (self.order)(position)).collect();
        BatchId { rank: self.rank, number, positions, indices }
    }
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
        .to_owned()
}

/// The batch that an error is about.
#[derive(Debug)]
pub struct BatchId {
    /// The rank that loads it.
    pub rank: usize,
    /// Its number in this iteration, from 0.
    pub number: usize,
    /// The positions of its samples in the rank's epoch.
    pub positions: Range<usize>,
    /// The indices of its samples in the data set.
    pub indices: Vec<usize>,
}

impl fmt::Display for BatchId {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Self { rank, number, positions, indices } = self;
        write!(
            f,
            "batch {number} of rank {rank} (samples {} to {} of its epoch",
            positions.start, positions.end
        )?;
        if let (Some(first), Some(last)) = (indices.first(), indices.last()) {
            write!(f, ", data set indices {first} ... {last}")?;
        }
        f.write_str(")")
    }
}

/// The reason for which a [`DataLoader`] gave no batch.
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
        error: Box<dyn Error + Send + Sync>,
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
    /// The data set panicked.
    #[error("the data set panicked in {batch}: {message}")]
    Panic {
        /// The batch.
        batch: BatchId,
        /// The panic's message.
        message: String,
    },
}
