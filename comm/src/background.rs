//! Threads beside the program, whose ranks wait for each other while they do something else.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Work on a thread beside the program: ranks are busy with something else than each other, such as a
/// disk. While the program goes on, blocking operations of the thread have time: no timeout of a group ends
/// them, and neither the log nor flow-launch hears that they are long. The loss of a rank ends them as ever.
/// Clones are the same work.
///
/// ```
/// let background = flow_comm::Background::default();
/// let own = background.clone();
/// let thread = std::thread::spawn(move || {
///     own.enter();
///     // ... write, and meet the other ranks in a group of the thread's own
/// });
/// // ... train, and then wait for the thread:
/// background.end();
/// thread.join().unwrap();
/// ```
#[derive(Clone, Debug, Default)]
pub struct Background {
    /// The program waits for the work.
    is_over: Arc<AtomicBool>,
}

thread_local! {
    static OF_THREAD: RefCell<Option<Background>> = const { RefCell::new(None) };
}

impl Background {
    /// Makes the rest of this thread part of the work. Where all processors are busy, the thread has its share of
    /// them, but what wakes it stops no other one: the program goes on first.
    pub fn enter(&self) {
        OF_THREAD.set(Some(self.clone()));
        // SAFETY: the parameters are plain numbers, of which 0 is the priority that the policy has. They outlive the
        // call, which changes this thread alone. Where it is refused, the thread is as any other.
        unsafe {
            // Another policy is the user's.
            if libc::sched_getscheduler(0) == libc::SCHED_OTHER {
                let priority: libc::sched_param = std::mem::zeroed();
                libc::sched_setscheduler(0, libc::SCHED_BATCH, &priority);
            }
        }
    }

    /// Says that the program waits for the work from now on: so do its operations, like any others, and the
    /// time that they wait counts from now.
    pub fn end(&self) {
        self.is_over.store(true, Ordering::Relaxed);
    }

    /// Returns whether this thread is part of a work that the program does not wait for.
    pub(crate) fn goes_on() -> bool {
        OF_THREAD.with_borrow(|work| {
            work.as_ref().is_some_and(|work| !work.is_over.load(Ordering::Relaxed))
        })
    }
}
