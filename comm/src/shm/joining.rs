//! Waiting for ranks that have yet to join: how long, and whether they still can.

use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::process::{pidfd_open, Pid, PidfdFlags};

use super::world::{EXIT_REPORT, FIRST_WARNING};
use crate::store::Store;

/// How often to look whether ranks have ended, and how many of those that are missing to ask the store for.
pub const LOOK: Duration = Duration::from_millis(500);
const ASKED: usize = 4;

/// One rank's patience while its world comes together.
pub struct Joining<'a> {
    pub rank: usize,
    pub size: usize,
    pub store: &'a Store,
    /// Begins the keys of this world.
    pub prefix: &'a str,
    /// Whether flow-launch says in the store which ranks have ended.
    pub launched: bool,
    pub begin: Instant,
    pub timeout: Duration,
    pub next_look: Instant,
    pub next_warning: Instant,
}

impl Joining<'_> {
    /// The time that is left, at most `slice`.
    pub fn left(&self, slice: Duration) -> Duration {
        self.timeout.saturating_sub(self.begin.elapsed()).min(slice)
    }

    /// To be called again and again while ranks are `missing`; fine if none is. `pid` is that of a rank that has come, 0
    /// for others.
    ///
    /// # Errors
    /// When the time is over, or a rank has ended.
    pub fn look(&mut self, missing: &dyn Fn() -> Vec<usize>, pid: &dyn Fn(usize) -> u32) -> Result<(), String> {
        let now = Instant::now();
        let ranks = match &missing()[..] {
            [] => return Ok(()),
            [one] => format!("rank {one} has"),
            all => format!("ranks {} have", all.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")),
        };
        if self.left(self.timeout).is_zero() {
            return Err(format!("{ranks} not joined within {:?}", self.timeout));
        }
        if now >= self.next_warning {
            log::warn!("rank {}: {ranks} not joined yet", self.rank);
            self.next_warning = now + FIRST_WARNING;
        }
        if now < self.next_look {
            return Ok(());
        }
        self.next_look = now + LOOK;
        let come = (0..self.size).filter(|&rank| rank != self.rank).find_map(|rank| self.fate(rank, pid(rank)));
        let ended = come.or_else(|| missing().into_iter().take(ASKED).find_map(|rank| self.fate_of_missing(rank)));
        match ended {
            // It may have ended because all were there, and it had nothing else to do.
            Some(fate) if !missing().is_empty() => Err(format!("{fate} before all ranks had joined")),
            _ => Ok(()),
        }
    }

    /// How a rank that has come has ended, if it has.
    fn fate(&self, rank: usize, pid: u32) -> Option<String> {
        let report = || self.launched.then(|| self.value(&format!("exit/{rank}"), EXIT_REPORT)).flatten();
        has_ended(pid).then(|| match report() {
            Some(end) => format!("rank {rank} ended with {end}"),
            None => format!("rank {rank} (pid {pid}) died"),
        })
    }

    fn fate_of_missing(&self, rank: usize) -> Option<String> {
        if self.launched {
            return Some(format!("rank {rank} ended with {}", self.value(&format!("exit/{rank}"), Duration::ZERO)?));
        }
        let pid = self.value(&format!("{}rank/{rank}", self.prefix), Duration::ZERO)?;
        pid.parse().is_ok_and(has_ended).then(|| format!("rank {rank} (pid {pid}) died"))
    }

    /// Leaves word of why this rank gives up, for those who come later.
    pub fn give_up(&self, reason: &str) {
        // It is gone together with rank 0 if that serves it: then there is nothing to tell.
        let _ = self.store.compare_and_set(&format!("{}failure", self.prefix), None, reason.as_bytes());
    }

    /// Why others gave up.
    pub fn given_up(&self) -> Option<String> {
        self.value(&format!("{}failure", self.prefix), Duration::ZERO)
    }

    /// A store that does not answer has no news.
    fn value(&self, key: &str, timeout: Duration) -> Option<String> {
        let value = self.store.get(key, timeout).ok()?;
        Some(String::from_utf8_lossy(&value).into_owned())
    }
}

/// Whether the process is gone; 0 is none.
pub fn has_ended(pid: u32) -> bool {
    let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return false };
    match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(pidfd) => {
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            rustix::event::poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&now)).is_ok_and(|ready| ready > 0)
        }
        Err(error) => error == Errno::SRCH,
    }
}
