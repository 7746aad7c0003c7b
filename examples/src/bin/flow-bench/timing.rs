//! Taking times, and what is printed of them.

use std::time::{Duration, Instant};

/// How often to repeat what took these times, for `total` altogether.
pub fn repetitions(warm_up: &mut [Duration], total: Duration) -> usize {
    let one = median(warm_up).max(Duration::from_nanos(100));
    total.div_duration_f64(one).max(5.0) as usize
}

/// How long each of `count` calls takes.
pub fn time<E>(count: usize, mut run: impl FnMut() -> Result<(), E>) -> Result<Vec<Duration>, E> {
    let one = |_| {
        let start = Instant::now();
        run().map(|()| start.elapsed())
    };
    (0..count).map(one).collect()
}

pub fn median(times: &mut [Duration]) -> Duration {
    let middle = times.len() / 2;
    *times.select_nth_unstable(middle).1
}

pub fn mean(times: &[Duration]) -> Duration {
    times.iter().sum::<Duration>() / times.len() as u32
}

pub fn microseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}
