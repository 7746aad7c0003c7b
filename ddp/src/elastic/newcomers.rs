//! Whether somebody waits to join.

use std::cell::Cell;
use std::time::{Duration, Instant};

use flow_comm::ProcessGroup;

use crate::error::{Error, Result, job_rank};

/// The time between two looks.
pub const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// When a rank looks.
#[derive(Default)]
pub struct Looks(Cell<Option<Instant>>);

impl Looks {
    /// Whether it is time to look: the next time is [`LOOK_INTERVAL`] later. Never where the job cannot change its ranks.
    pub fn take_due(&self, group: &ProcessGroup) -> bool {
        let is_time = self.0.get().is_none_or(|looked| looked.elapsed() >= LOOK_INTERVAL);
        if !is_time || !group.can_reconfigure() {
            return false;
        }
        self.0.set(Some(Instant::now()));
        true
    }
}

/// Fails if somebody waits: all ranks take them in then.
pub fn look_for_newcomers(group: &ProcessGroup) -> Result<()> {
    match group.newcomers()? {
        0 => Ok(()),
        count => Err(Error::Newcomers { rank: job_rank(group), count }),
    }
}
