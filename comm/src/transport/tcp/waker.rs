//! Wakes a thread that waits for its channel, when another thread has something for it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::event::{EventfdFlags, eventfd};

/// Wakes the thread that waits for a channel.
#[derive(Default)]
pub struct Waker {
    /// The number of times that there was something.
    events: AtomicU64,
    is_asleep: AtomicBool,
    /// Readable when there is something; made for the first sleep.
    fd: OnceLock<Option<OwnedFd>>,
}

impl Waker {
    /// Returns the number of times that there was something for the thread.
    pub fn events(&self) -> u64 {
        self.events.load(Ordering::SeqCst)
    }

    /// Says that something has happened: the thread that waits, or is about to, looks.
    pub fn wake(&self) {
        self.events.fetch_add(1, Ordering::SeqCst);
        if self.is_asleep.swap(false, Ordering::SeqCst)
            && let Some(Some(fd)) = self.fd.get()
        {
            // It fails only where the fd is readable for long.
            let _ = rustix::io::write(fd, &1_u64.to_ne_bytes());
        }
    }

    /// Makes the fd readable at each [`Waker::wake`] from now on. None if there are no file
    /// descriptors left.
    pub fn fall_asleep(&self) -> Option<BorrowedFd<'_>> {
        let flags = EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC;
        let fd = self.fd.get_or_init(|| eventfd(0, flags).ok());
        self.is_asleep.store(true, Ordering::SeqCst);
        fd.as_ref().map(AsFd::as_fd)
    }

    /// Notes that the thread is awake again.
    pub fn wake_up(&self) {
        // Else somebody has woken it, or is about to: at worst the next sleep ends at once.
        if !self.is_asleep.swap(false, Ordering::SeqCst)
            && let Some(Some(fd)) = self.fd.get()
        {
            let _ = rustix::io::read(fd, &mut [0_u8; 8]);
        }
    }
}
