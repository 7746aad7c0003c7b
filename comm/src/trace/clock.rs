//! The time of records: cheap enough to read at each end of every operation.
//!
//! Where Linux itself keeps time by the processor's time stamp counter, so do records: reading it
//! takes a third of what `Instant::now` takes. Counts become nanoseconds when records are read, by
//! a rate that is measured over the life of the process. Elsewhere `Instant` serves.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::time::{clock_gettime, ClockId};

/// The file in which Linux names its clock source.
const CLOCK_SOURCE: &str = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
/// The rate is measured over at least this long.
const CALIBRATION: Duration = Duration::from_millis(5);

/// One moment on all clocks.
struct Origin {
    has_counter: bool,
    ticks: u64,
    instant: Instant,
    /// On the machine's monotonic clock, which all its processes share.
    monotonic: Duration,
}

/// Makes the first reading, so that none of an operation's does.
pub fn start() {
    origin();
}

/// The time now, in ticks.
#[inline]
pub fn now() -> u64 {
    let origin = origin();
    if origin.has_counter {
        counter()
    } else {
        origin.instant.elapsed().as_nanos() as u64
    }
}

/// When `ticks` was, on the machine's monotonic clock.
pub fn monotonic(ticks: u64) -> Duration {
    let origin = origin();
    if !origin.has_counter {
        return origin.monotonic + Duration::from_nanos(ticks);
    }
    let left = CALIBRATION.saturating_sub(origin.instant.elapsed());
    std::thread::sleep(left);
    let (counted, elapsed) = (counter() - origin.ticks, origin.instant.elapsed());
    let since = ticks.saturating_sub(origin.ticks) as f64 * elapsed.as_nanos() as f64;
    origin.monotonic + Duration::from_nanos((since / counted as f64) as u64)
}

/// When `instant` was, on the machine's monotonic clock.
pub fn monotonic_of(instant: Instant) -> Duration {
    let origin = origin();
    match instant.checked_duration_since(origin.instant) {
        Some(later) => origin.monotonic + later,
        None => origin.monotonic.saturating_sub(origin.instant - instant),
    }
}

fn origin() -> &'static Origin {
    static ORIGIN: OnceLock<Origin> = OnceLock::new();
    ORIGIN.get_or_init(|| {
        let source = std::fs::read_to_string(CLOCK_SOURCE).unwrap_or_default();
        let has_counter = cfg!(target_arch = "x86_64") && source.trim() == "tsc";
        let now = clock_gettime(ClockId::Monotonic);
        let monotonic = Duration::new(now.tv_sec as u64, now.tv_nsec as u32);
        Origin { has_counter, ticks: counter(), instant: Instant::now(), monotonic }
    })
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn counter() -> u64 {
    // SAFETY: every x86-64 processor has the instruction, which only reads a counter.
    unsafe { std::arch::x86_64::_rdtsc() }
}

#[cfg(not(target_arch = "x86_64"))]
fn counter() -> u64 {
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_moments_on_the_monotonic_clock() {
        start();
        let before = monotonic_of(Instant::now());
        let ticks = now();
        let after = monotonic_of(Instant::now());
        let slack = Duration::from_millis(1);
        let found = monotonic(ticks);
        assert!(before <= found + slack && found <= after + slack, "{before:?} {found:?} {after:?}");
        assert!(monotonic(now()) >= found);
    }
}
