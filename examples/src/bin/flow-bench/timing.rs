//! Takes times.

use std::time::{Duration, Instant};

use anyhow::Result;
use flow_ddp::ProcessGroup;
use tch::{Cuda, Device};

/// Returns how often to repeat what took these times, for `total` altogether.
pub fn repetitions(warm_up: &mut [Duration], total: Duration) -> usize {
    let one = median(warm_up).max(Duration::from_nanos(100));
    total.div_duration_f64(one).max(5.0) as usize
}

/// Measures how long each of `count` calls takes.
pub fn time<E>(count: usize, mut run: impl FnMut() -> Result<(), E>) -> Result<Vec<Duration>, E> {
    let mut times = Vec::with_capacity(count);
    for _ in 0..count {
        let start = Instant::now();
        run()?;
        times.push(start.elapsed());
    }
    Ok(times)
}

/// Runs `count` steps, after one that is not counted, on all ranks at once: the time of each or, on
/// a GPU, their mean.
pub fn block(
    group: &ProcessGroup,
    device: Device,
    count: usize,
    step: &mut dyn FnMut() -> Result<()>,
) -> Result<Vec<Duration>> {
    group.barrier()?;
    steps(device, count, step)
}

/// Runs as [`block`] does, on the ranks that call this.
pub fn steps(
    device: Device,
    count: usize,
    step: &mut dyn FnMut() -> Result<()>,
) -> Result<Vec<Duration>> {
    step()?;
    let Device::Cuda(ordinal) = device else { return time(count, step) };
    Cuda::synchronize(ordinal as i64);
    let start = Instant::now();
    (0..count).try_for_each(|_| step())?;
    Cuda::synchronize(ordinal as i64);
    Ok(vec![start.elapsed() / count as u32])
}

pub fn median(times: &mut [Duration]) -> Duration {
    let middle = times.len() / 2;
    *times.select_nth_unstable(middle).1
}

pub fn mean(times: &[Duration]) -> Duration {
    times.iter().sum::<Duration>() / times.len() as u32
}

pub fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

pub fn microseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}
