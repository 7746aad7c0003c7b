//! Where a rank computes.

use std::str::FromStr;

use flow_comm::ProcessGroup;
use tch::Device;

use crate::error::{job_rank, Error, Result};

/// What a job's ranks compute on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceKind {
    /// The processor.
    Cpu,
    /// NVIDIA GPUs, one for each rank of a machine.
    Cuda,
}

impl FromStr for DeviceKind {
    type Err = String;

    /// `cpu` or `cuda`, as PyTorch writes them.
    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text {
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda),
            _ => Err("it should be cpu or cuda".into()),
        }
    }
}

/// [`TensorCollectives::use_device`](crate::TensorCollectives::use_device).
pub(crate) fn choose(group: &ProcessGroup, kind: DeviceKind) -> Result<Device> {
    if kind == DeviceKind::Cpu {
        return Ok(Device::Cpu);
    }
    let rank = job_rank(group);
    // All ranks take part in the group's own check, also those that failed here.
    let loaded = flow_autograd::load_cuda();
    let device = group.use_cuda();
    let fail = |reason: String| Error::Device { rank, reason };
    match (loaded, device) {
        (Ok(()), Ok(device)) => Ok(flow_autograd::torch_device(&device)),
        (_, Err(error)) => Err(error.into()),
        (Err(error), Ok(_)) => Err(fail(error.to_string())),
    }
}
