//! Prints the memory bandwidth of the reduction, beside that of a plain loop and, for scale, of
//! `memcpy`.
//!
//! `cargo run --release -p flow-kernels --example reduce_bandwidth`

use std::hint::black_box;
use std::time::{Duration, Instant};

use flow_kernels::{Element, ReduceOp, bf16, f16, reduce};

fn main() {
    println!("GB/s counts every byte that is read or written.\n");
    for bytes in [16 << 10, 1 << 20, 25 << 20] {
        println!("{} KiB a buffer", bytes >> 10);
        let mut a = vec![1f32; bytes / 4];
        let mut b = vec![1f32; bytes / 4];
        report("  memcpy", 2 * bytes, || black_box(&mut a).copy_from_slice(black_box(&b)));
        report("  plain loop, 2 x f32 in place, sum", 4 * bytes, || {
            for (a, b) in black_box(&mut a).iter_mut().zip(black_box(&mut b)) {
                let sum = *a + *b;
                *a = sum;
                *b = sum;
            }
        });
        for op in [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max] {
            in_place(2, op, vec![1f32; bytes / 4]);
        }
        in_place(2, ReduceOp::Avg, vec![1f64; bytes / 8]);
        in_place(2, ReduceOp::Avg, vec![f16::ONE; bytes / 2]);
        in_place(2, ReduceOp::Avg, vec![bf16::ONE; bytes / 2]);
        in_place(2, ReduceOp::Sum, vec![1i64; bytes / 8]);
        in_place(2, ReduceOp::Sum, vec![1u8; bytes]);
        for ranks in [3, 4, 8] {
            in_place(ranks, ReduceOp::Avg, vec![1f32; bytes / 4]);
        }
    }
}

/// Reduces `ranks` copies of `buffer` into all of them.
fn in_place<T: Element>(ranks: usize, op: ReduceOp, buffer: Vec<T>) {
    let dtype = T::DTYPE;
    let count = buffer.len();
    let mut buffers = vec![buffer; ranks];
    let destinations: Vec<*mut u8> =
        buffers.iter_mut().map(|buffer| buffer.as_mut_ptr().cast()).collect();
    let sources: Vec<*const u8> = destinations.iter().map(|pointer| pointer.cast_const()).collect();
    report(
        &format!("  reduce, {ranks} x {dtype} in place, {op}"),
        2 * ranks * count * dtype.size(),
        || {
            // SAFETY: all pointers are to `count` elements of `dtype`, which nobody else uses.
            unsafe { reduce(dtype, op, &sources, &destinations, count) }
        },
    );
}

/// Prints the bandwidth of the fastest of many runs of `run`; each moves `bytes`.
fn report(name: &str, bytes: usize, mut run: impl FnMut()) {
    let start = Instant::now();
    let mut fastest = Duration::MAX;
    while start.elapsed() < Duration::from_millis(200) {
        let start = Instant::now();
        run();
        fastest = fastest.min(start.elapsed());
    }
    println!(
        "{name:<40} {:>8.1} us {:>7.1} GB/s",
        fastest.as_secs_f64() * 1e6,
        bytes as f64 / 1e9 / fastest.as_secs_f64()
    );
}
