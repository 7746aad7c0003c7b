//! How long the host takes to launch the reduction of a bucket on a GPU.

use anyhow::{Context, Result};
use clap::Args;
use flow_autograd::{CudaTensor, current_stream};
use flow_comm::DType;
use flow_ddp::{DeviceKind, ProcessGroup, TensorCollectives};
use serde_json::json;
use tch::{Kind, Tensor};

use crate::timing::{median, microseconds, time};

const BYTES: usize = 25 << 20;
const GRADIENTS: usize = 30;
/// So few launches in a row that the device's queue is never full, after which it is waited for.
const LAUNCHES: usize = 8;
const ROUNDS: usize = 50;
const WARM_UP: usize = 10;

#[derive(Args)]
pub struct Options {
    /// Print a JSON line
    #[arg(long)]
    json: bool,
}

pub fn run(options: &Options) -> Result<()> {
    let group = ProcessGroup::from_env()?;
    let place = group.use_device(DeviceKind::Cuda)?;
    let device = group.cuda_device().context("no GPU was chosen")?;
    let nccl = group.nccl(device.ordinal())?;
    let stream = [current_stream(&device)?];

    let lengths = [BYTES / size_of::<f32>() / GRADIENTS; GRADIENTS];
    let mut gradients = Vec::with_capacity(GRADIENTS);
    for length in lengths {
        let zeros = Tensor::zeros([length as i64], (Kind::Float, place));
        gradients.push(CudaTensor::new(&zeros)?);
    }
    let mut bucket = nccl.bucket(0, DType::F32, DType::F32, &lengths)?;

    let mut times = Vec::new();
    for round in 0..WARM_UP + ROUNDS {
        let launched = time(LAUNCHES, || nccl.reduce_bucket(&mut bucket, &mut gradients, &stream))?;
        if round >= WARM_UP {
            times.extend(launched);
        }
        nccl.join(&stream[0])?;
        stream[0].synchronize()?;
    }
    if group.rank() == 0 {
        let ranks = group.world_size();
        let us = microseconds(median(&mut times));
        if options.json {
            let line = json!({
                "bench": "launch", "ranks": ranks, "gradients": GRADIENTS, "bytes": BYTES,
                "median_us": us,
            });
            println!("{line}");
        } else {
            println!(
                "launch of a bucket of {GRADIENTS} gradients, {ranks} ranks: {us:.2} us of the \
                 host's time"
            );
        }
    }
    Ok(())
}
