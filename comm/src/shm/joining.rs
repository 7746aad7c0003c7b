//! Waiting for ranks that have yet to join: how long, and whether they still can.

use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::process::{pidfd_open, Pid, PidfdFlags};

use super::world::FIRST_WARNING;
use crate::store::Store;

/// How many ranks to ask the store for at a time.
const LOOKS: usize = 16;

/// One rank's patience while its world comes together.
pub struct Joining<'a> {
    rank: usize,
    size: usize,
    /// Begins the keys of this world.
    prefix: &'a str,
    store: &'a Store,
    /// Whether flow-launch says in the store which ranks have ended.
    launched: bool,
    timeout: Duration,
    deadline: Instant,
    warning: Instant,
    /// The first rank to look for next.
    next: usize,
}

impl<'a> Joining<'a> {
    /// `timeout` counts from now.
    pub fn new(
        (rank, size): (usize, usize),
        prefix: &'a str,
        store: &'a Store,
        launched: bool,
        timeout: Duration,
    ) -> Self {
        let (deadline, warning) = (Instant::now() + timeout, Instant::now() + FIRST_WARNING);
        Self { rank, size, prefix, store, launched, timeout, deadline, warning, next: 0 }
    }

    /// The time that is left, at most `slice`.
    pub fn left(&self, slice: Duration) -> Duration {
        self.deadline.saturating_duration_since(Instant::now()).min(slice)
    }

    /// To be called again and again while ranks are `missing`; fine if none is.
    ///
    /// # Errors
    /// When the time is over, or a rank has ended, be it one that had come already.
    pub fn look(&mut self, missing: &dyn Fn() -> Vec<usize>) -> Result<(), String> {
        let Some(&first) = missing().first() else { return Ok(()) };
        let some = (self.next..self.next + LOOKS.min(self.size)).map(|rank| rank % self.size);
        self.next = (self.next + LOOKS) % self.size;
        let mut looked_for = std::iter::once(first).chain(some).filter(|&rank| rank != self.rank);
        let ended = looked_for.find_map(|rank| self.fate(rank).transpose());
        // Only now: a rank may have ended because all were there, and it had nothing else to do.
        let ranks = match &missing()[..] {
            [] => return Ok(()),
            [one] => format!("rank {one} has"),
            all => format!("ranks {} have", all.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")),
        };
        match ended {
            Some(Ok(fate)) => return Err(format!("{fate} before all ranks had joined")),
            Some(Err(lost)) => return Err(format!("{ranks} not joined, and {lost}")),
            None => {}
        }
        let now = Instant::now();
        if now >= self.deadline {
            return Err(format!("{ranks} not joined within {:?}", self.timeout));
        }
        if now >= self.warning {
            log::warn!("rank {}: {ranks} not joined yet", self.rank);
            self.warning = now + FIRST_WARNING;
        }
        Ok(())
    }

    /// How `rank` has ended, if it has.
    fn fate(&self, rank: usize) -> Result<Option<String>, String> {
        let read = |key: &str| {
            let value = self.store.try_get(key).map_err(|e| e.to_string())?;
            Ok::<_, String>(value.map(|value| String::from_utf8_lossy(&value).into_owned()))
        };
        if self.launched {
            return Ok(read(&format!("exit/{rank}"))?.map(|end| format!("rank {rank} ended with {end}")));
        }
        let pid = read(&format!("{}rank/{rank}", self.prefix))?;
        Ok(pid.filter(|pid| pid.parse().is_ok_and(has_ended)).map(|pid| format!("rank {rank} (pid {pid}) died")))
    }
}

fn has_ended(pid: i32) -> bool {
    let Some(pid) = Pid::from_raw(pid) else { return false };
    match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(pidfd) => {
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            rustix::event::poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&now)).is_ok_and(|ready| ready > 0)
        }
        Err(error) => error == Errno::SRCH,
    }
}
