//! Who reduces the CPU's buckets while backward runs: the hooks themselves, or a thread where a
//! core is to spare.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use flow_comm::{ProcessGroup, ReduceOp, Result, Segments, Worker};

use super::pending::Pending;

/// Reduces buckets in the order in which they are launched.
pub(super) enum Progress {
    Hooks(Arc<Hooks>),
    /// The worker launches a bucket and waits for it, before it takes the next.
    Thread(ProcessGroup, Worker, ReduceOp),
}

impl Progress {
    /// A thread only if the computing threads of all ranks on this node leave a core for each
    /// rank's: otherwise it would steal from backward.
    pub fn choose(
        group: &ProcessGroup,
        thread: Option<bool>,
        op: ReduceOp,
    ) -> std::result::Result<Self, String> {
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let threads = usize::try_from(tch::get_num_threads()).unwrap_or(1).max(1);
        if thread.unwrap_or(group.ranks_on_node() * (threads + 1) <= cores) {
            let worker =
                Worker::start(group.rank()).map_err(|e| format!("cannot start a thread: {e}"))?;
            Ok(Self::Thread(group.clone(), worker, op))
        } else {
            let (group, queue) = (group.clone(), Mutex::default());
            Ok(Self::Hooks(Arc::new(Hooks { group, op, queue })))
        }
    }

    /// Starts the reduction of a bucket over all ranks, without waiting.
    pub fn launch(&self, segments: &Arc<Segments>) -> Result<Pending> {
        let segments = Arc::clone(segments);
        match self {
            Self::Hooks(hooks) => {
                hooks.queue().push_back(Arc::clone(&segments));
                hooks.launch_queued()?;
                let hooks = Arc::clone(hooks);
                Ok(Pending::in_bucket(move || {
                    hooks.flush()?;
                    hooks.group.wait_bucket(&segments).map(Some)
                }))
            }
            Self::Thread(group, worker, op) => {
                let (own, op) = (group.clone(), *op);
                let work = worker.submit(group.rank(), "all_reduce", move || {
                    while !own.launch_bucket(&segments, op)? {
                        own.finish_buckets()?;
                    }
                    own.wait_bucket(&segments)
                });
                Ok(Pending::in_bucket(move || work.wait().map(Some)))
            }
        }
    }

    /// Does this rank's share of the buckets that all ranks have launched, without waiting.
    pub fn advance(&self) -> Result<()> {
        match self {
            Self::Hooks(hooks) => {
                hooks.launch_queued()?;
                hooks.group.progress()
            }
            Self::Thread(..) => Ok(()),
        }
    }

    /// Returns when the group has all launched buckets: a collective now follows them.
    pub fn flush(&self) -> Result<()> {
        match self {
            Self::Hooks(hooks) => hooks.flush(),
            Self::Thread(_, worker, _) => {
                worker.drain();
                Ok(())
            }
        }
    }
}

/// A hook launches its bucket and reduces its share of those that all ranks have launched, without
/// waiting; [`Pending::wait`] does the rest at the end of backward.
pub(super) struct Hooks {
    group: ProcessGroup,
    op: ReduceOp,
    /// Buckets that the group has no slot for yet: only so many can be under way at a time.
    queue: Mutex<VecDeque<Arc<Segments>>>,
}

impl Hooks {
    /// Launches the buckets that the group has slots for. Returns whether those are all.
    fn launch_queued(&self) -> Result<bool> {
        let mut queue = self.queue();
        while let Some(segments) = queue.front() {
            if !self.group.launch_bucket(segments, self.op)? {
                return Ok(false);
            }
            queue.pop_front();
        }
        Ok(true)
    }

    fn flush(&self) -> Result<()> {
        while !self.launch_queued()? {
            self.group.finish_buckets()?;
        }
        Ok(())
    }

    fn queue(&self) -> std::sync::MutexGuard<'_, VecDeque<Arc<Segments>>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
