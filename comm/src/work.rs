//! Operations that run beside the caller.

use std::sync::mpsc;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use flow_store::fork::ForkSafe;

use crate::error::{Error, Result};

/// A collective or a message that was started: it runs on a communication thread of the group.
/// Collectives share one; messages to each rank, and those from each rank with each tag, have one
/// of their own.
///
/// The buffer was moved in and comes back from [`Work::wait`], so nothing can touch it meanwhile.
/// Dropping a `Work` loses the buffer and the result; the operation still runs, as the other ranks
/// need it.
#[must_use = "the result, and the buffer, come from wait()"]
pub struct Work<T> {
    outcome: ForkSafe<mpsc::Receiver<Result<T>>>,
    rank: usize,
    operation: &'static str,
}

impl<T> Work<T> {
    /// Waits for the operation and returns its buffer. The group's timeout bounds the wait.
    pub fn wait(self) -> Result<T> {
        if !self.outcome.is_ours() {
            let reason = "it runs in the process that this one was forked from: wait for it there";
            return Err(self.lost(reason));
        }
        match self.outcome.recv() {
            Ok(outcome) => outcome,
            Err(_) => Err(self.lost("the communication thread ended before it")),
        }
    }

    fn lost(&self, reason: &str) -> Error {
        Error::System { rank: self.rank, operation: self.operation.into(), reason: reason.into() }
    }
}

type Task = Box<dyn FnOnce() + Send>;

/// A thread that runs tasks in the order of their submission. Dropping it waits for them.
pub struct Worker {
    tasks: Option<mpsc::Sender<Task>>,
    thread: Option<std::thread::JoinHandle<()>>,
    pending: Arc<(Mutex<usize>, Condvar)>,
}

impl Worker {
    /// Starts the thread, which is named after this rank.
    ///
    /// # Errors
    ///
    /// The system's, if it has no room for another thread.
    pub fn start(rank: usize) -> std::io::Result<Self> {
        let (sender, receiver) = mpsc::channel::<Task>();
        let pending = Arc::new((Mutex::new(0), Condvar::new()));
        let counted = Arc::clone(&pending);
        let thread =
            std::thread::Builder::new().name(format!("flow-comm-{rank}")).spawn(move || {
                for task in receiver {
                    // A task that panics drops its sender: `wait` reports that.
                    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(task));
                    let (count, idle) = &*counted;
                    *count.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
                    idle.notify_all();
                }
            })?;
        Ok(Self { tasks: Some(sender), thread: Some(thread), pending })
    }

    /// Hands a task over; `rank` and `operation` are for errors of [`Work::wait`].
    pub fn submit<T: Send + 'static>(
        &self,
        rank: usize,
        operation: &'static str,
        task: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Work<T> {
        let (sender, outcome) = mpsc::channel();
        *self.pending.0.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        let task: Task = Box::new(move || drop(sender.send(task())));
        if let Some(tasks) = &self.tasks {
            // The thread ends only when `tasks` is dropped.
            let _ = tasks.send(task);
        }
        Work { outcome: ForkSafe::new(outcome), rank, operation }
    }

    /// Whether all submitted tasks are over.
    pub fn is_idle(&self) -> bool {
        *self.pending.0.lock().unwrap_or_else(PoisonError::into_inner) == 0
    }

    /// Waits until all submitted tasks are over; each is bounded by its group's timeout.
    pub fn drain(&self) {
        let (count, idle) = &*self.pending;
        let count = count.lock().unwrap_or_else(PoisonError::into_inner);
        drop(idle.wait_while(count, |count| *count > 0).unwrap_or_else(PoisonError::into_inner));
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.tasks = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
