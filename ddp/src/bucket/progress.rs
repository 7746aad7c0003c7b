//! Who reduces the CPU's buckets while backward runs: the hooks themselves, or a thread where a
//! core is to spare.

use std::sync::Arc;
use std::time::Instant;

use flow_comm::{ProcessGroup, ReduceOp, Result, Segments, Work, Worker};

use super::hook_progress::HookProgress;
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
            Ok(Self::Hooks(Arc::new(HookProgress::new(group.clone(), op))))
        }
    }

    /// Starts the reduction of a bucket over all ranks, without waiting.
    pub fn launch(&self, bucket: &Arc<Segments>) -> Result<Pending> {
        bucket.queue();
        match self {
            Self::Hooks(hooks) => {
                hooks.launch(bucket)?;
                Ok(Pending::in_hooks(Arc::clone(hooks), Arc::clone(bucket)))
            }
            Self::Thread(thread) => {
                Ok(Pending::in_thread(thread.launch(bucket), Arc::clone(bucket)))
            }
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
            bucket.wait(&group)
        })
    }
}
