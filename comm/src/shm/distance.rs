//! How far two ranks' cores are apart: they may have a cache in common, or the way between them may
//! take five times as long. A virtual machine's cores move.

use std::hint::black_box;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::bytes::STREAMS;
use super::control::Control;

/// A cache line takes longer between cores that are far apart. On AMD's Zen 4 it took 20 ns within a
/// complex of cores, and 120 between two.
const FAR: Duration = Duration::from_nanos(90);
/// So many lines in a row change what rank 0 finds.
const CERTAIN: u8 = 8;

/// What two ranks know about the way between them. Both know the same.
#[derive(Default)]
pub struct Distance {
    /// As rank 0 has published it. Both act on it in the next operation.
    pub is_far: bool,
    /// Lines that were slow, less those that were fast: of rank 0 only.
    slow: u8,
    found_far: bool,
    calls: u8,
}

impl Distance {
    /// Takes the time of a cache line on its way from rank 1, which has arrived in this round: not of
    /// each, as that takes a tenth as long as a small operation.
    pub fn measure(&mut self, control: &Control, round: u64) {
        self.calls = self.calls.wrapping_add(1);
        if !self.calls.is_multiple_of(8) {
            return;
        }
        let line = &control.descriptor(round, 1).0[0];
        let before = Instant::now();
        let start = Instant::now();
        black_box(line.load(Ordering::Acquire));
        let end = Instant::now();
        if (end - start).saturating_sub(start - before) > FAR {
            self.slow = (self.slow + 1).min(CERTAIN);
        } else {
            self.slow = self.slow.saturating_sub(1);
        }
        match self.slow {
            0 => self.found_far = false,
            CERTAIN => self.found_far = true,
            _ => {}
        }
    }

    /// Has both ranks act as if they had found this.
    #[cfg(test)]
    pub fn assume(&mut self, is_far: bool) {
        *self = Self { is_far, found_far: is_far, ..Self::default() };
    }

    /// Publishes what rank 0 has found, in a round in which it is about to arrive.
    pub fn publish(&self, control: &Control, round: u64) {
        if self.found_far && STREAMS {
            control.descriptor(round, 0).note_far();
        }
    }

    /// Learns what rank 0 has published in this round, in which both have arrived.
    pub fn learn(&mut self, control: &Control, round: u64) {
        self.is_far = control.descriptor(round, 0).is_far();
    }
}
