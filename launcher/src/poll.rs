//! Waiting for one of several descriptors.

use std::os::fd::BorrowedFd;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

/// Watches for something to read.
pub fn readable<T>(what: T, fd: BorrowedFd<'_>) -> (T, PollFd<'_>) {
    (what, PollFd::from_borrowed_fd(fd, PollFlags::IN))
}

/// Watches for room to write.
pub fn writable<T>(what: T, fd: BorrowedFd<'_>) -> (T, PollFd<'_>) {
    (what, PollFd::from_borrowed_fd(fd, PollFlags::OUT))
}

/// Waits until a watched descriptor is ready or the deadline has passed, and returns what is ready.
/// It may return nothing before the deadline.
pub fn ready<T>(watched: Vec<(T, PollFd<'_>)>, deadline: Option<Instant>) -> Result<Vec<T>, Errno> {
    let (events, mut fds): (Vec<_>, Vec<_>) = watched.into_iter().unzip();
    let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
    let timeout = left.and_then(|left| Timespec::try_from(left).ok());
    match poll(&mut fds, timeout.as_ref()) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(error) => return Err(error),
    }
    let is_ready = fds.iter().map(|fd| !fd.revents().is_empty());
    Ok(events
        .into_iter()
        .zip(is_ready)
        .filter_map(|(event, ready)| ready.then_some(event))
        .collect())
}
