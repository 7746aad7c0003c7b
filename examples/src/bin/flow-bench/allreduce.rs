//! All-reduce over sizes, in memory that all ranks share and in ordinary memory.

use std::fmt;
use std::time::Duration;

use anyhow::Result;
use clap::{Args, ValueEnum};
use flow_comm::{Buffer, ProcessGroup, ReduceOp};
use serde_json::json;

use crate::sizes::{Sizes, size_name};
use crate::timing::{mean, median, microseconds, repetitions, time};

const TIME_PER_SIZE: Duration = Duration::from_millis(300);
const WARM_UP: usize = 5;

#[derive(Args)]
pub struct Options {
    #[command(flatten)]
    sizes: Sizes,
    /// Where the buffers lie
    #[arg(long, value_enum, default_value = "both")]
    memory: Choice,
}

#[derive(Clone, Copy, ValueEnum)]
enum Choice {
    Shared,
    Ordinary,
    Both,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Memory {
    Shared,
    Ordinary,
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Memory::Shared => "shared",
            Memory::Ordinary => "ordinary",
        })
    }
}

pub fn run(options: &Options) -> Result<()> {
    let group = ProcessGroup::from_env()?;
    let memories: &[Memory] = match options.memory {
        Choice::Shared => &[Memory::Shared],
        Choice::Ordinary => &[Memory::Ordinary],
        Choice::Both => &[Memory::Shared, Memory::Ordinary],
    };
    for &bytes in &options.sizes.sizes {
        for &memory in memories {
            let len = bytes / size_of::<f32>();
            let mut times = match memory {
                Memory::Shared => measure(&group, &mut group.alloc_shared::<f32>(len)?)?,
                Memory::Ordinary => measure(&group, &mut vec![0f32; len])?,
            };
            if group.rank() == 0 {
                print(options, memory, bytes, group.world_size(), &mut times);
            }
        }
    }
    Ok(())
}

/// Times of all-reduces that follow each other without a pause.
fn measure<B: Buffer>(group: &ProcessGroup, buffer: &mut B) -> Result<Vec<Duration>> {
    let mut warm_up = time(WARM_UP, || group.all_reduce(buffer, ReduceOp::Sum))?;
    let mut count = [repetitions(&mut warm_up, TIME_PER_SIZE) as i64];
    group.broadcast(&mut count, 0)?;
    Ok(time(count[0] as usize, || group.all_reduce(buffer, ReduceOp::Sum))?)
}

fn print(options: &Options, memory: Memory, bytes: usize, ranks: usize, times: &mut [Duration]) {
    let mean = microseconds(mean(times));
    let median = microseconds(median(times));
    if options.sizes.json {
        let memory = memory.to_string();
        println!(
            "{}",
            json!({
                "bench": "allreduce", "memory": memory, "bytes": bytes, "ranks": ranks,
                "median_us": median, "mean_us": mean,
            })
        );
    } else {
        let size = size_name(bytes);
        println!(
            "all-reduce, {ranks} ranks, {memory:<8} memory {size:>10} {median:>12.2} us, mean \
             {mean:>12.2} us"
        );
    }
}
