//! Chooses the device that a rank computes on.

use std::str::FromStr;

use flow_comm::ProcessGroup;
use tch::Device;

use crate::error::{Error, Result, job_rank};

/// The kind of device that a job's ranks compute on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceKind {
    /// The processor.
    Cpu,
    /// NVIDIA GPUs, one for each rank of a machine.
    Cuda,
}

impl FromStr for DeviceKind {
    type Err = String;

    /// Reads `cpu` or `cuda`, as PyTorch writes them.
    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text {
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda),
            _ => Err("it should be cpu or cuda".into()),
        }
    }
}

/// Chooses this rank's device:
/// [`TensorCollectives::use_device`](crate::TensorCollectives::use_device).
pub(crate) fn choose(group: &ProcessGroup, kind: DeviceKind) -> Result<Device> {
    if kind == DeviceKind::Cpu {
        return Ok(Device::Cpu);
    }
    let rank = job_rank(group);
    // All ranks take part in the group's own check, also those that failed here.
    let loaded = flow_autograd::load_cuda();
    let device = group.use_cuda();
    let device = device?;
    loaded.map_err(|error| Error::Device { rank, reason: error.to_string() })?;
    Ok(flow_autograd::torch_device(&device))
}
