//! Times of events on the GPU, on the clock of records.

use std::sync::Arc;
use std::time::{Duration, Instant};

use flow_kernels::cuda::{Device, Error, Event, Stream};

use crate::trace;

/// The greatest age of a reference: the time between two events is a float of milliseconds.
const MAX_AGE: Duration = Duration::from_secs(10);

/// A moment on both clocks, renewed now and then.
pub struct DeviceClock {
    /// A stream of its own, so that an event on it happens at once.
    stream: Stream,
    reference: Event,
    ticks: u64,
    made: Instant,
}

impl DeviceClock {
    /// Returns a clock with a reference of now.
    pub fn new(device: &Arc<Device>) -> Result<Self, Error> {
        let mut clock = Self {
            stream: Stream::high_priority(device)?,
            reference: Event::timed(device)?,
            ticks: 0,
            made: Instant::now(),
        };
        clock.renew()?;
        Ok(clock)
    }

    /// Takes a new reference if this one is old. Events that happened before it have no time.
    pub fn renew_if_old(&mut self) -> Result<(), Error> {
        if self.made.elapsed() > MAX_AGE {
            self.renew()?;
        }
        Ok(())
    }

    /// Returns the time, in ticks, of `event`, which is timed and has happened.
    pub fn ticks(&self, event: &Event) -> Option<u64> {
        let after = event.since(&self.reference).ok()?;
        Some(trace::Scale::now().after(self.ticks, after))
    }

    fn renew(&mut self) -> Result<(), Error> {
        self.reference.record(&self.stream)?;
        self.stream.synchronize()?;
        self.ticks = trace::ticks();
        self.made = Instant::now();
        Ok(())
    }
}
