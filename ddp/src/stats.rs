//! How well communication hid behind backward.

use std::time::{Duration, Instant};

/// The last backward that reduced gradients, seen from this rank. On a GPU, times are the device's.
#[derive(Debug, Clone, Default)]
pub struct Stats {
    /// Backwards that reduced gradients so far.
    pub backwards: u64,
    /// The caps of the buckets, in MiB: see
    /// [`DdpBuilder::bucket_cap_mb_list`](crate::DdpBuilder::bucket_cap_mb_list).
    pub bucket_cap_mb: Vec<f64>,
    /// Whether sizes of buckets are still being tried: see
    /// [`DdpBuilder::tune`](crate::DdpBuilder::tune).
    pub is_tuning: bool,
    /// The buckets, in the order of reduction.
    pub buckets: Vec<BucketStats>,
    /// The time from the first gradient to the last, without what reductions add.
    pub backward: Duration,
    /// The time for which backward was held up at its end: waiting for other ranks, finishing
    /// reductions, copying back.
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
    /// The times at which the bucket was full and reduced.
    pub times: BucketTimes,
}

/// The times of one bucket in the last backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BucketTimes {
    /// The time from the backward's first gradient to this bucket's last.
    pub ready_at: Duration,
    /// The time from the bucket's last gradient on this rank until the reduction was seen to be
    /// over.
    pub ready_to_done: Duration,
    /// The part of `ready_to_done` during which backward still ran.
    pub behind_backward: Duration,
}

impl BucketTimes {
    /// Makes the times of a bucket that was `ready` and `done` at these moments, in a backward from
    /// `began` to `backward_end`.
    pub(crate) fn new(
        began: Instant,
        ready: Instant,
        done: Instant,
        backward_end: Instant,
    ) -> Self {
        Self {
            ready_at: ready.saturating_duration_since(began),
            ready_to_done: done.saturating_duration_since(ready),
            behind_backward: done.min(backward_end).saturating_duration_since(ready),
        }
    }
}

/// The times of the last backward on a device's clock: see [`Stats`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct PhaseTimes {
    pub backward: Duration,
    pub exposed: Duration,
}

impl Stats {
    /// Returns the share of the reductions' time during which backward still ran: 0 to 1.
    pub fn hidden(&self) -> f64 {
        let total: Duration = self.buckets.iter().map(|b| b.times.ready_to_done).sum();
        let hidden: Duration = self.buckets.iter().map(|b| b.times.behind_backward).sum();
        if total.is_zero() {
            return 1.0;
        }
        hidden.as_secs_f64() / total.as_secs_f64()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hidden_is_the_share_before_the_end_of_backward() {
        let began = Instant::now();
        let at = |ms| began + Duration::from_millis(ms);
        let times = |ready_at, ready_to_done, behind_backward| BucketTimes {
            ready_at: Duration::from_millis(ready_at),
            ready_to_done: Duration::from_millis(ready_to_done),
            behind_backward: Duration::from_millis(behind_backward),
        };
        assert_eq!(BucketTimes::new(began, at(1), at(3), at(10)), times(1, 2, 2));
        assert_eq!(BucketTimes::new(began, at(8), at(12), at(10)), times(8, 4, 2));
        assert_eq!(BucketTimes::new(began, at(11), at(12), at(10)), times(11, 1, 0));
    }
}
