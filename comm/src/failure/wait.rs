//! Waiting for members of a group while watching their lives and the clock.

use std::fmt::Display;
use std::time::{Duration, Instant};

use super::Failure;
use crate::background::Background;
use crate::error::{Error, Result};
use crate::interrupt::is_interrupted;
use crate::shm::control::{Counter, sleep_on};
use crate::stall::Stall;
use crate::transport::{DisconnectReason, PeerDown};
use crate::world::{FIRST_WARNING, LIVENESS_INTERVAL};

/// The time that a waiting rank keeps its core to itself, where every rank can have one: most waits
/// are shorter.
const SPIN: Duration = Duration::from_micros(20);
/// The time that such a rank stays awake, and then offers its core to others between two looks. It
/// is some times what a wake-up takes, which is tens of microseconds, and more on virtual machines.
/// After that it sleeps.
const AWAKE: Duration = Duration::from_micros(500);
/// The same where there are more ranks than cores: a rank that has work to do should not take turns
/// with many that wait.
const AWAKE_ON_SHARED_CORES: Duration = Duration::from_micros(50);

/// A wait for other ranks: since when, and until when.
pub struct Wait<'a> {
    since: Instant,
    timeout: Duration,
    /// The time at which the wait is next worth a line in the log.
    warning: Duration,
    long: Option<Stall<'a>>,
}

impl Failure {
    /// Waits until `counter` has come to `target`; `missing` says which members of the group are
    /// waited for.
    pub fn wait(
        &self,
        counter: &Counter,
        target: u32,
        operation: &dyn Display,
        missing: &dyn Fn() -> Vec<usize>,
    ) -> Result<()> {
        if counter.reached(target) {
            return Ok(());
        }
        self.wait_until(operation, missing, &|| self.find_lost_peer(missing), &mut |time| {
            if !time.is_zero() {
                sleep_on(counter, target, time);
            }
            Ok(counter.reached(target))
        })
    }

    /// Waits until `attempt` says that what is waited for has come; it may take the time that it is
    /// given for that. `lost` says which member can never bring it, as far as `attempt` does not
    /// see that.
    pub fn wait_until(
        &self,
        operation: &dyn Display,
        missing: &dyn Fn() -> Vec<usize>,
        lost: &dyn Fn() -> Option<(usize, DisconnectReason)>,
        attempt: &mut dyn FnMut(Duration) -> Result<bool, PeerDown>,
    ) -> Result<()> {
        let mut waiting = self.begin_wait();
        let timeout = waiting.timeout;
        let mut look = LIVENESS_INTERVAL.min(timeout);
        let mut spin = Duration::ZERO;
        let mut awake = AWAKE_ON_SHARED_CORES;
        if self.core.world.spin {
            spin = SPIN;
            awake = AWAKE;
        }
        loop {
            let waited = waiting.since.elapsed();
            let is_awake = waited < awake;
            let time = if is_awake { Duration::ZERO } else { look.saturating_sub(waited) };
            match attempt(time) {
                Ok(true) => return Ok(()),
                Ok(false) if is_awake => {
                    if waited < spin {
                        std::hint::spin_loop();
                    } else {
                        // Whoever is waited for may be waiting for this core.
                        std::thread::yield_now();
                    }
                    continue;
                }
                Ok(false) => {}
                Err(loss) => return Err(self.peer_down_error(loss, operation)),
            }
            if let Err(error) = self.check_failure(operation, true) {
                // The others may have come to the end of this, and failed in what follows.
                return if matches!(attempt(Duration::ZERO), Ok(true)) {
                    Ok(())
                } else {
                    Err(error)
                };
            }
            if waiting.since.elapsed() < look {
                continue;
            }
            if let Some((peer, how)) = lost() {
                // Arriving may have been the last thing it did.
                if matches!(attempt(Duration::ZERO), Ok(true)) {
                    return Ok(());
                }
                return Err(self.handle_disconnect(peer, how, operation));
            }
            self.check_deadline(&mut waiting, operation, missing)?;
            look = (waiting.since.elapsed() + LIVENESS_INTERVAL).min(timeout);
        }
    }

    /// Begins a wait of the operation that this thread runs.
    pub fn begin_wait(&self) -> Wait<'_> {
        Wait {
            since: Instant::now(),
            timeout: self.core.timeout(),
            warning: FIRST_WARNING,
            long: self.core.world.long_wait(),
        }
    }

    /// Reports a wait that has become long, and fails the group when its time is over, or the program
    /// is interrupted.
    pub fn check_deadline(
        &self,
        waiting: &mut Wait,
        operation: &dyn Display,
        missing: &dyn Fn() -> Vec<usize>,
    ) -> Result<()> {
        let rank = self.core.world.rank;
        let timeout = waiting.timeout;
        if Background::goes_on() {
            waiting.since = Instant::now();
        }
        let waited = waiting.since.elapsed();
        self.remote.publish_progress(waited, timeout);
        if let Some(long) = &mut waiting.long {
            long.check(waited, operation, || {
                let world = &self.core.world;
                missing().iter().map(|&r| world.seats[self.core.ranks[r]].number).collect()
            });
        }
        if is_interrupted() {
            let operation = operation.to_string();
            return Err(self.fail(Error::Interrupted { rank, operation }));
        }
        if waited >= timeout {
            let missing = self.describe_all(&self.remote.lagging(missing()));
            let missing = format!("{missing} (rank {rank} is {})", self.core.recorder.summary());
            let operation = operation.to_string();
            return Err(self.fail(Error::Timeout { rank, operation, timeout, missing }));
        }
        if waited >= waiting.warning {
            let missing = self.describe_all(&missing());
            log::warn!("rank {rank}: {operation} has waited {} s for {missing}", waited.as_secs());
            waiting.warning *= 2;
        }
        Ok(())
    }
}
