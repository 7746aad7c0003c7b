//! Who reduces the CPU's buckets while backward runs: the hooks themselves, or a thread where a
//! core is to spare.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use flow_comm::{ProcessGroup, ReduceOp, Result, Segments, Work, Worker};

use super::pending::Pending;

/// Reduces buckets in the order in which they are launched.
pub(super) enum Progress {
    Hooks(Arc<HookProgress>),
    Thread(ThreadProgress),
}

impl Progress {
    /// A thread only if the computing threads of all ranks on this node leave a core for each
    /// rank's: otherwise it would steal from backward.
    pub fn choose(
        group: &ProcessGroup,
        thread: Option<bool>,
        op: ReduceOp,
    ) -> std::io::Result<Self> {
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let threads = usize::try_from(tch::get_num_threads()).unwrap_or(1).max(1);
        if thread.unwrap_or(group.ranks_on_node() * (threads + 1) <= cores) {
            let worker = Worker::start(group.rank())?;
            Ok(Self::Thread(ThreadProgress { group: group.clone(), op, worker }))
        } else {
            let queue = Mutex::default();
            Ok(Self::Hooks(Arc::new(HookProgress { group: group.clone(), op, queue })))
        }
    }

    /// Starts the reduction of a bucket over all ranks, without waiting.
    pub fn launch(&self, bucket: &Arc<Segments>) -> Result<Pending> {
        match self {
            Self::Hooks(hooks) => hooks.launch(bucket),
            Self::Thread(thread) => Ok(Pending::in_thread(thread.launch(bucket))),
        }
    }

    /// Does this rank's share of the buckets that all ranks have launched, without waiting.
    pub fn advance(&self) -> Result<()> {
        match self {
            Self::Hooks(hooks) => hooks.advance(),
            Self::Thread(_) => Ok(()),
        }
    }

    /// Returns when the group has all launched buckets: a collective now follows them.
    pub fn flush(&self) -> Result<()> {
        match self {
            Self::Hooks(hooks) => hooks.flush(),
            Self::Thread(thread) => {
                thread.worker.drain();
                Ok(())
            }
        }
    }
}

/// A hook launches its bucket and reduces its share of those that all ranks have launched, without
/// waiting; [`HookProgress::wait`] does the rest at the end of backward.
pub(super) struct HookProgress {
    group: ProcessGroup,
    op: ReduceOp,
    /// Buckets that the group has no slot for yet: only so many can be under way at a time.
    queue: Mutex<VecDeque<Arc<Segments>>>,
}

impl HookProgress {
    fn launch(self: &Arc<Self>, bucket: &Arc<Segments>) -> Result<Pending> {
        self.queue().push_back(Arc::clone(bucket));
        self.launch_queued()?;
        Ok(Pending::in_hooks(Arc::clone(self), Arc::clone(bucket)))
    }

    /// Launches the buckets that the group has slots for. Returns whether those are all.
    fn launch_queued(&self) -> Result<bool> {
        let mut queue = self.queue();
        while let Some(bucket) = queue.front() {
            if !self.group.launch_bucket(bucket, self.op)? {
                return Ok(false);
            }
            queue.pop_front();
        }
        Ok(true)
    }

    fn advance(&self) -> Result<()> {
        self.launch_queued()?;
        self.group.progress()
    }

    fn flush(&self) -> Result<()> {
        while !self.launch_queued()? {
            self.group.finish_buckets()?;
        }
        Ok(())
    }

    /// Waits until a launched bucket is reduced. Returns when that was.
    pub fn wait(&self, bucket: &Segments) -> Result<Instant> {
        self.flush()?;
        self.group.wait_bucket(bucket)
    }

    fn queue(&self) -> MutexGuard<'_, VecDeque<Arc<Segments>>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A thread launches a bucket and waits for it, before it takes the next.
pub(super) struct ThreadProgress {
    group: ProcessGroup,
    op: ReduceOp,
    worker: Worker,
}

impl ThreadProgress {
    fn launch(&self, bucket: &Arc<Segments>) -> Work<Instant> {
        let group = self.group.clone();
        let op = self.op;
        let bucket = Arc::clone(bucket);
        self.worker.submit(self.group.rank(), "all_reduce", move || {
            while !group.launch_bucket(&bucket, op)? {
                group.finish_buckets()?;
            }
            group.wait_bucket(&bucket)
        })
    }
}
