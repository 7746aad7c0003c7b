//! The time of a flight recorder's records: cheap enough to read at each end of every operation.
//!
//! Where Linux itself keeps time by the processor's time stamp counter, so do records: reading it
//! takes a third of what `Instant::now` takes. Counts become nanoseconds when records are read, by
//! a rate that is measured over the life of the process. Elsewhere `Instant` serves.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use crate::fork::Once;

/// The file in which Linux names its clock source.
const CLOCK_SOURCE: &str = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
/// The rate is measured over at least this long.
const CALIBRATION: Duration = Duration::from_millis(5);

/// A moment on all clocks.
#[derive(Debug)]
struct ClockOrigin {
    has_counter: bool,
    ticks: u64,
    instant: Instant,
    /// On the machine's monotonic clock, which all its processes share.
    monotonic: Duration,
}

/// The relation between ticks and time, as measured now.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    origin: &'static ClockOrigin,
    nanoseconds_per_tick: f64,
}

impl Scale {
    /// Measures it; the first time in a process, that takes some milliseconds.
    pub fn now() -> Scale {
        let origin = origin();
        if !origin.has_counter {
            return Scale { origin, nanoseconds_per_tick: 1.0 };
        }
        std::thread::sleep(CALIBRATION.saturating_sub(origin.instant.elapsed()));
        let (ticks, instant) = moment();
        let elapsed = instant.saturating_duration_since(origin.instant).as_nanos() as f64;
        let nanoseconds_per_tick = elapsed / ticks.saturating_sub(origin.ticks).max(1) as f64;
        Scale { origin, nanoseconds_per_tick }
    }

    /// Returns the time of `ticks` on the machine's monotonic clock.
    pub fn monotonic(self, ticks: u64) -> Duration {
        let since = ticks.saturating_sub(self.origin.ticks) as f64 * self.nanoseconds_per_tick;
        self.origin.monotonic + Duration::from_nanos(since as u64)
    }

    /// Returns the moment `time` later than `ticks`.
    pub fn after(self, ticks: u64, time: Duration) -> u64 {
        ticks + (time.as_nanos() as f64 / self.nanoseconds_per_tick) as u64
    }
}

/// Makes the first reading, so that none of an operation's does.
pub fn start() {
    origin();
}

/// Returns the time now, in ticks.
#[inline]
pub fn now() -> u64 {
    let origin = origin();
    if origin.has_counter { counter() } else { origin.instant.elapsed().as_nanos() as u64 }
}

/// Returns where this process's ticks begin on the machine's monotonic clock; None where they are the
/// processor's counts, which are the same in all processes.
pub fn zero() -> Option<Duration> {
    let origin = origin();
    (!origin.has_counter).then_some(origin.monotonic)
}

/// Returns the time of `instant` on the machine's monotonic clock.
pub fn monotonic_of(instant: Instant) -> Duration {
    let origin = origin();
    match instant.checked_duration_since(origin.instant) {
        Some(later) => origin.monotonic + later,
        None => origin.monotonic.saturating_sub(origin.instant - instant),
    }
}

/// Takes a moment on both clocks: of some readings the one that was interrupted least.
fn moment() -> (u64, Instant) {
    let mut shortest = u64::MAX;
    let mut moment = (counter(), Instant::now());
    for _ in 0..5 {
        let before = counter();
        let instant = Instant::now();
        let took = counter() - before;
        if took < shortest {
            shortest = took;
            moment = (before + took / 2, instant);
        }
    }
    moment
}

#[inline]
fn origin() -> &'static ClockOrigin {
    static ORIGIN: Once<ClockOrigin> = Once::empty();
    ORIGIN.get_or_make(|| {
        let source = std::fs::read_to_string(CLOCK_SOURCE).unwrap_or_default();
        let has_counter = cfg!(target_arch = "x86_64") && source.trim() == "tsc";
        let (ticks, instant) = moment();
        let time = clock_gettime(ClockId::Monotonic);
        let since = instant.elapsed();
        let monotonic = Duration::new(time.tv_sec as u64, time.tv_nsec as u32);
        let monotonic = monotonic.saturating_sub(since);
        ClockOrigin { has_counter, ticks: if has_counter { ticks } else { 0 }, instant, monotonic }
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
        let found = Scale::now().monotonic(ticks);
        assert!(
            before <= found + slack && found <= after + slack,
            "{before:?} {found:?} {after:?}"
        );
        assert!(Scale::now().monotonic(now()) + slack >= found);
    }
}
