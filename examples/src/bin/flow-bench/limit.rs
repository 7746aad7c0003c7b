//! The zero-copy bound: how fast two threads can sum two buffers in place, with no library in
//! between.

use std::convert::Infallible;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use flow_comm::env::Membership;
use multiversion::multiversion;
use serde_json::json;

use crate::sizes::{Sizes, size_name};
use crate::timing::{median, microseconds, repetitions, time};

const THREADS: usize = 2;
const TIME_PER_SIZE: Duration = Duration::from_millis(300);
const WARM_UP: usize = 5;

pub fn run(sizes: &Sizes) -> Result<()> {
    if Membership::from_env()?.rank != 0 {
        return Ok(());
    }
    for &bytes in &sizes.sizes {
        let us = microseconds(measure(bytes)?);
        if sizes.json {
            println!("{}", json!({"bench": "limit", "bytes": bytes, "median_us": us}));
        } else {
            println!("limit, {THREADS} threads {:>10} {us:>12.2} us", size_name(bytes));
        }
    }
    Ok(())
}

/// A cache line of f32. Aligned buffers and loops compiled for AVX2 together halve the time at 1
/// MiB; whole lines give each thread its own.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line([f32; 16]);

fn measure(bytes: usize) -> Result<Duration> {
    let mut a = zeros(bytes)?;
    let mut b = zeros(bytes)?;
    let count = repetitions(&mut sum_repeatedly(&mut a, &mut b, WARM_UP), TIME_PER_SIZE);
    Ok(median(&mut sum_repeatedly(&mut a, &mut b, count)))
}

fn zeros(bytes: usize) -> Result<Vec<Line>> {
    let count = bytes.div_ceil(size_of::<Line>());
    let mut lines = Vec::new();
    lines.try_reserve_exact(count).with_context(|| format!("no memory for {bytes} bytes"))?;
    lines.resize(count, Line([0.0; 16]));
    Ok(lines)
}

/// Sums `count` times, each thread its half. The threads wait for each other every time.
fn sum_repeatedly(a: &mut [Line], b: &mut [Line], count: usize) -> Vec<Duration> {
    let half = a.len().div_ceil(THREADS);
    let (a, other_a) = a.split_at_mut(half);
    let (b, other_b) = b.split_at_mut(half);
    let arrived = &AtomicUsize::new(0);
    thread::scope(|scope| {
        scope.spawn(|| sum_half(other_a, other_b, count, arrived));
        sum_half(a, b, count, arrived)
    })
}

fn sum_half(a: &mut [Line], b: &mut [Line], count: usize, arrived: &AtomicUsize) -> Vec<Duration> {
    let mut target = 0;
    let Ok(times) = time::<Infallible>(count, || {
        sum_in_place(a, b);
        target += THREADS;
        arrived.fetch_add(1, Ordering::AcqRel);
        while arrived.load(Ordering::Acquire) < target {
            std::hint::spin_loop();
        }
        Ok(())
    });
    times
}

#[multiversion(targets("x86_64+avx+avx2"))]
fn sum_in_place(a: &mut [Line], b: &mut [Line]) {
    for (Line(a), Line(b)) in a.iter_mut().zip(b) {
        for (a, b) in a.iter_mut().zip(b) {
            let sum = *a + *b;
            (*a, *b) = (sum, sum);
        }
    }
}
