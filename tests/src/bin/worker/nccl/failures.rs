//! Failures, each a way that ranks can go wrong. A rank prints the error that it got, and that of
//! the next call.

use std::time::Duration;

use anyhow::{bail, Result};
use flow_comm::nccl::CudaGroup;
use flow_comm::{DType, ProcessGroup, ReduceOp};

use super::memory::Gpu;

/// Where time-outs are what is checked.
const TIMEOUT: Duration = Duration::from_secs(4);

pub fn run(group: &ProcessGroup, way: &str) -> Result<()> {
    let device = match group.use_cuda() {
        Ok(device) => device,
        Err(error) => return tell(&Err(error)),
    };
    if !matches!(way, "dies" | "aborts") {
        group.set_timeout(TIMEOUT);
    }
    let second = group.rank() == 1;
    if way == "never_joins" && second {
        return sleep();
    }
    let nccl = match group.nccl(device.ordinal()) {
        Ok(nccl) => nccl,
        Err(error) => {
            tell(&Err(error))?;
            return tell(&group.barrier());
        }
    };
    let gpu = Gpu::new(&device)?;
    let mut buffer = gpu.array(DType::F32, &[1.0; 1000])?;
    let mut sum = |nccl: &CudaGroup| nccl.all_reduce(&mut buffer, ReduceOp::Sum, &gpu.stream);
    sum(&nccl)?;
    nccl.synchronize()?;
    group.barrier()?;
    let outcome = match way {
        // Rank 1 does nothing more.
        "late" if second => return sleep(),
        "late" => sum(&nccl).and_then(|()| stuck(&nccl, &gpu)),
        "late_bucket" if second => return sleep(),
        "late_bucket" => {
            let mut bucket = nccl.bucket(7, DType::F32, DType::BF16, &[1000, 24])?;
            let mut gradients =
                [gpu.array(DType::F32, &[1.0; 1000])?, gpu.array(DType::F32, &[1.0; 24])?];
            let streams = std::slice::from_ref(&gpu.stream);
            nccl.reduce_bucket(&mut bucket, &mut gradients, streams)?;
            nccl.join(&gpu.stream)?;
            stuck(&nccl, &gpu)
        }
        "mismatch" if second => {
            let mut other = gpu.array(DType::F64, &[1.0; 10])?;
            nccl.broadcast(std::slice::from_mut(&mut other), 0, &gpu.stream)?;
            stuck(&nccl, &gpu)
        }
        "mismatch" => {
            let other = gpu.array(DType::F32, &[1.0; 10])?;
            nccl.send(&other, 1, &gpu.stream)?;
            stuck(&nccl, &gpu)
        }
        "dies" if second => std::process::abort(),
        "dies" => sum(&nccl).and_then(|()| stuck(&nccl, &gpu)),
        "aborts" if second => {
            nccl.abort("the data ran out");
            nccl.check()
        }
        "aborts" => sum(&nccl).and_then(|()| stuck(&nccl, &gpu)),
        // The other failures are the fake's.
        "repeats" => (0..20).try_for_each(|_| sum(&nccl)).and_then(|()| stuck(&nccl, &gpu)),
        // A program that never looks: the process must end.
        "ignores" if second => return sleep(),
        "ignores" => {
            sum(&nccl)?;
            std::thread::sleep(Duration::from_secs(100));
            return Ok(());
        }
        _ => bail!("there is no failure {way:?}"),
    };
    tell(&outcome)?;
    tell(&nccl.check())?;
    tell(&group.barrier())
}

/// Waits for the device, as programs do that read a loss: only an abort sets it free. Then asks
/// what was wrong.
fn stuck(nccl: &CudaGroup, gpu: &Gpu) -> flow_comm::Result<()> {
    let waited = gpu.stream.synchronize();
    nccl.check()?;
    waited.map_err(|error| flow_comm::Error::System {
        rank: 0,
        operation: "waiting".into(),
        reason: error.to_string(),
    })
}

fn tell(outcome: &flow_comm::Result<()>) -> Result<()> {
    match outcome {
        Ok(()) => println!("no error"),
        Err(error) => println!("{error}"),
    }
    Ok(())
}

/// Longer than the others wait.
fn sleep() -> Result<()> {
    println!("sleeping");
    std::thread::sleep(4 * TIMEOUT);
    Ok(())
}
