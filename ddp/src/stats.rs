//! How well communication hid behind backward.

use std::time::{Duration, Instant};

/// The last backward that reduced gradients, seen from this rank. On a GPU, times are the device's.
#[derive(Debug, Clone, Default)]
pub struct Stats {
    /// Backwards that reduced gradients so far.
    pub backwards: u64,
    /// In the order of reduction.
    pub buckets: Vec<BucketStats>,
    /// From the first gradient to the last, without what reductions add.
    pub backward: Duration,
    /// How long backward was held up at its end: waiting for other ranks, finishing reductions,
    /// copying back.
    pub exposed: Duration,
}

/// One bucket in the last backward.
#[derive(Debug, Clone)]
pub struct BucketStats {
    /// Bytes as communicated, on each rank.
    pub bytes: usize,
    /// Names of the parameters in it.
    pub parameters: Vec<String>,
    /// Bytes that were reduced where backward had put them, without a copy.
    pub in_place: usize,
    /// From the backward's first gradient to this bucket's last.
    pub ready_at: Duration,
    /// From its last gradient on this rank until the reduction was seen to be over.
    pub ready_to_done: Duration,
    /// The part of `ready_to_done` during which backward still ran.
    pub behind_backward: Duration,
}

impl Stats {
    /// Of the time that reductions took, the share during which backward still ran: 0 to 1.
    pub fn hidden(&self) -> f64 {
        let sum = |time: fn(&BucketStats) -> Duration| {
            self.buckets.iter().map(time).sum::<Duration>().as_secs_f64()
        };
        let total = sum(|b| b.ready_to_done);
        if total == 0.0 {
            1.0
        } else {
            sum(|b| b.behind_backward) / total
        }
    }
}

/// The times of one bucket: all of the communication, and the part before `backward_end`.
pub(crate) fn times(ready: Instant, done: Instant, backward_end: Instant) -> (Duration, Duration) {
    (done.saturating_duration_since(ready), done.min(backward_end).saturating_duration_since(ready))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hidden_is_the_share_before_the_end_of_backward() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        assert_eq!(
            times(at(1), at(3), at(10)),
            (Duration::from_millis(2), Duration::from_millis(2))
        );
        assert_eq!(
            times(at(8), at(12), at(10)),
            (Duration::from_millis(4), Duration::from_millis(2))
        );
        assert_eq!(times(at(11), at(12), at(10)), (Duration::from_millis(1), Duration::ZERO));
    }
}
