//! The parts of a group on GPUs.

use std::sync::Arc;

use flow_kernels::cuda::Device;

use crate::nccl::CudaGroup;

/// A group's part on GPUs, once it is used there.
#[derive(Clone, Default)]
pub struct Cuda {
    pub device: Option<Arc<Device>>,
    pub group: Option<Arc<CudaGroup>>,
}
