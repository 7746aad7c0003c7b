//! Whether processes still live.

use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// Returns which of `pidfds` belong to processes that have ended, or end within `time`, by index.
pub fn ended(pidfds: &[&OwnedFd], time: Duration) -> Vec<usize> {
    let mut fds: Vec<PollFd<'_>> = pidfds.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
    // A time that the kernel cannot count is for ever.
    let time = Timespec::try_from(time).ok();
    if rustix::event::poll(&mut fds, time.as_ref()).is_err() {
        return Vec::new();
    }
    (0..fds.len()).filter(|&index| !fds[index].revents().is_empty()).collect()
}

/// Whether the process is gone; 0 is none.
pub fn has_ended(pid: u32) -> bool {
    let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return false };
    match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(pidfd) => !ended(&[&pidfd], Duration::ZERO).is_empty(),
        Err(error) => error == Errno::SRCH,
    }
}
