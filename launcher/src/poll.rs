//! Waiting for one of several things.

use std::time::Instant;

use rustix::event::{poll, PollFd, Timespec};
use rustix::io::Errno;

/// What of `watched` is ready, as soon as anything is; nothing at the deadline, or at times for no
/// reason.
pub fn ready<T>(watched: Vec<(T, PollFd<'_>)>, deadline: Option<Instant>) -> Result<Vec<T>, Errno> {
    let (events, mut fds): (Vec<_>, Vec<_>) = watched.into_iter().unzip();
    let timeout = deadline.map(|deadline| {
        let left = deadline.saturating_duration_since(Instant::now());
        Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() }
    });
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
