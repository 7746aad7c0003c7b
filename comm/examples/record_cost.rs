//! What it costs to record an operation: `cargo run --release -p flow-comm --example record_cost`.
//!
//! A group of one rank does barriers, which are nothing but the entry, the record and the exit of
//! an operation. The program prints what a record alone takes, and what a whole barrier does.

use std::time::{Duration, Instant};

use flow_comm::ProcessGroup;
use flow_comm::trace::record_cost;

/// The fastest batch counts: the others were interrupted.
const BATCHES: u32 = 500;
const BATCH: u32 = 1000;

fn main() -> anyhow::Result<()> {
    let group = ProcessGroup::from_env()?;
    let nanoseconds = |batch: Duration| batch.as_secs_f64() * 1e9 / f64::from(BATCH);
    let record = (0..BATCHES).map(|_| record_cost(BATCH)).min().unwrap_or_default();
    println!("a record: {:.1} ns", nanoseconds(record));
    let mut barrier = Duration::MAX;
    for _ in 0..BATCHES {
        let begin = Instant::now();
        (0..BATCH).try_for_each(|_| group.barrier())?;
        barrier = barrier.min(begin.elapsed());
    }
    println!("a barrier of one rank, with its record: {:.1} ns", nanoseconds(barrier));
    Ok(())
}
