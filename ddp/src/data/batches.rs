//! Batches made ahead of time by worker threads and handed out in a fixed order.
//!
//! Worker `w` of `W` makes batches `w`, `w + W`, `w + 2 W`, ... and sends them through a bounded
//! channel of its own; the caller takes from the channels in turn. The order is thereby fixed
//! without any shared queue, and dropping the receiving ends stops the workers.

use std::any::Any;
use std::convert::Infallible;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use flow_comm::ForkSafe;

use super::loader_error::{BatchId, LoaderError};
use super::position::Taken;
use crate::BoxError;

/// A rank's epoch in batches.
pub(super) trait Epoch: Send + Sync + 'static {
    type Batch: Send + 'static;

    fn rank(&self) -> usize;

    /// Returns the positions of a batch in what the rank has of the epoch.
    fn positions(&self, number: usize) -> Range<usize>;

    /// Returns the indices of a batch in the data set, if it has indices.
    fn indices(&self, number: usize) -> Vec<usize>;

    /// Returns what makes batches in one thread.
    fn maker(self: Arc<Self>) -> Maker<Self::Batch>;
}

/// Makes the batches whose numbers it gets, which grow. After the last one there is none.
pub(super) type Maker<B> = Box<dyn FnMut(usize) -> Option<Result<B, BoxError>> + Send>;

type Made<B> = Option<Result<B, LoaderError>>;

/// How batches are made ahead of time.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    pub workers: usize,
    pub prefetch: usize,
    pub timeout: Duration,
}

/// The batches of one epoch; see [`DataLoader`](crate::DataLoader).
pub struct Batches<B: Send + 'static> {
    epoch: Arc<dyn Epoch<Batch = B>>,
    /// Makes the batches where there are no workers.
    maker: Maker<B>,
    /// Numbers of the batches still to come.
    numbers: Range<usize>,
    /// The sampler's position.
    taken: Taken,
    workers: ForkSafe<Vec<LoaderWorker<B>>>,
    /// Disconnected when the last worker has ended.
    ended: ForkSafe<Option<Receiver<Infallible>>>,
    timeout: Duration,
    failure: Option<LoaderError>,
}

struct LoaderWorker<B> {
    batches: Receiver<Made<B>>,
    thread: JoinHandle<()>,
}

impl<B: Send + 'static> Batches<B> {
    /// Starts the first `count` batches of an epoch, or fewer where it ends before. The settings
    /// may be wrong: the error is then the first item.
    pub(super) fn start(
        epoch: Arc<impl Epoch<Batch = B>>,
        count: usize,
        taken: Taken,
        ahead: Ahead,
        settings: Result<(), LoaderError>,
    ) -> Self {
        let mut batches = Self {
            maker: Arc::clone(&epoch).maker(),
            numbers: 0..count,
            taken,
            workers: ForkSafe::new(Vec::new()),
            ended: ForkSafe::new(None),
            timeout: ahead.timeout,
            failure: None,
            epoch: epoch.clone(),
        };
        let workers = ahead.workers.min(count);
        let started =
            settings.and_then(|()| batches.start_workers(&epoch, workers, ahead.prefetch));
        if let Err(error) = started {
            batches.stop();
            batches.failure = Some(error);
        }
        batches
    }

    fn start_workers(
        &mut self,
        epoch: &Arc<impl Epoch<Batch = B>>,
        workers: usize,
        prefetch: usize,
    ) -> Result<(), LoaderError> {
        let (alive, ended) = channel::<Infallible>();
        *self.ended = Some(ended);
        for worker in 0..workers {
            // The batch in a worker's hands counts too.
            let (sender, batches) = sync_channel(prefetch - 1);
            let epoch = Arc::clone(epoch);
            let numbers = self.numbers.clone().skip(worker).step_by(workers);
            let alive = alive.clone();
            let rank = epoch.rank();
            let thread = thread::Builder::new()
                .name(format!("flow-loader-{worker}"))
                .spawn(move || work(&epoch, numbers, &sender, alive))
                .map_err(|error| LoaderError::Spawn { rank, worker, error })?;
            self.workers.push(LoaderWorker { batches, thread });
        }
        Ok(())
    }

    fn receive(&mut self, number: usize) -> Made<B> {
        if !self.workers.is_ours() {
            let message =
                "its thread is in the process that this one was forked from: begin an epoch here"
                    .into();
            let batch = id(&*self.epoch, number);
            return Some(Err(LoaderError::Panic { batch, message }));
        }
        let worker = number % self.workers.len();
        match self.workers[worker].batches.recv_timeout(self.timeout) {
            Ok(made) => made,
            Err(RecvTimeoutError::Timeout) => {
                self.workers.clear(); // not joined: the one that hangs has had its time
                let batch = id(&*self.epoch, number);
                Some(Err(LoaderError::Timeout { batch, timeout: self.timeout }))
            }
            Err(RecvTimeoutError::Disconnected) => {
                let message = "worker lost".into();
                Some(Err(LoaderError::Panic { batch: id(&*self.epoch, number), message }))
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
                self.epoch.rank()
            );
            return;
        }
        for thread in threads {
            // A worker hands every panic of the data set over as an error.
            let _ = thread.join();
        }
    }
}

impl<B: Send + 'static> Iterator for Batches<B> {
    type Item = Result<B, LoaderError>;

    fn next(&mut self) -> Option<Self::Item> {
        if let Some(error) = self.failure.take() {
            return Some(Err(error));
        }
        let Some(number) = self.numbers.next() else {
            self.stop();
            return None;
        };
        let made = if self.workers.is_empty() {
            make(&*self.epoch, &mut self.maker, number)
        } else {
            self.receive(number)
        };
        match &made {
            Some(Ok(_)) => self.taken.up_to(self.epoch.positions(number).end),
            Some(Err(_)) | None => self.stop(),
        }
        made
    }
}

impl<B: Send + 'static> Drop for Batches<B> {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Makes a worker's batches. It ends after the last one, after a failed one, or when nobody wants
/// batches any more.
fn work<E: Epoch>(
    epoch: &Arc<E>,
    numbers: impl Iterator<Item = usize>,
    sender: &SyncSender<Made<E::Batch>>,
    _alive: Sender<Infallible>,
) {
    let mut maker = Arc::clone(epoch).maker();
    for number in numbers {
        let made = make(&**epoch, &mut maker, number);
        let goes_on = matches!(made, Some(Ok(_)));
        if sender.send(made).is_err() || !goes_on {
            return;
        }
    }
}

/// Makes a batch; a panic of the data set is an error.
fn make<B: Send + 'static>(
    epoch: &dyn Epoch<Batch = B>,
    maker: &mut Maker<B>,
    number: usize,
) -> Made<B> {
    match catch_unwind(AssertUnwindSafe(|| maker(number))) {
        Ok(Some(Ok(batch))) => Some(Ok(batch)),
        Ok(Some(Err(error))) => Some(Err(LoaderError::Dataset { batch: id(epoch, number), error })),
        Ok(None) => None,
        Err(panic) => {
            let message = message(panic.as_ref());
            Some(Err(LoaderError::Panic { batch: id(epoch, number), message }))
        }
    }
}

/// Names a batch, without its indices where the panic is in them.
fn id<B: Send + 'static>(epoch: &dyn Epoch<Batch = B>, number: usize) -> BatchId {
    let positions = epoch.positions(number);
    let indices = catch_unwind(AssertUnwindSafe(|| epoch.indices(number))).unwrap_or_default();
    BatchId { rank: epoch.rank(), number, positions, indices }
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
        .to_owned()
}
