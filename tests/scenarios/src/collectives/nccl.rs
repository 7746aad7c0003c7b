//! Process groups on GPUs, over NCCL.

use std::sync::Arc;

use anyhow::Result;
use flow_comm::nccl::{CudaGroup, Device};
use flow_comm::{DType, P2pOp, ProcessGroup, ReduceOp};

use super::backend::Backend;
use super::reference::{Number, Values};
use crate::nccl::memory::{Array, Gpu};

/// A group's collectives on a rank's GPU.
pub struct OnGpu {
    pub nccl: Arc<CudaGroup>,
    pub gpu: Gpu,
    nodes: Vec<u32>,
}

impl OnGpu {
    pub fn new(group: &ProcessGroup, device: &Arc<Device>) -> Result<Self> {
        let nccl = group.nccl(device.ordinal())?;
        Ok(Self { nccl, gpu: Gpu::new(device)?, nodes: vec![0; group.world_size()] })
    }
}

impl Backend for OnGpu {
    type Memory<T: Number> = Array;
    const VALUES: Values = Values::Small;

    fn rank(&self) -> usize {
        self.nccl.rank()
    }

    fn nodes(&self) -> &[u32] {
        &self.nodes
    }

    fn reduces(&self, dtype: DType, op: ReduceOp) -> bool {
        op != ReduceOp::Avg || !matches!(dtype, DType::I32 | DType::I64 | DType::U8)
    }

    fn input<T: Number>(&self, content: Vec<T>) -> Result<Array> {
        self.gpu.upload(&content)
    }

    fn output<T: Number>(&self, len: usize) -> Result<Array> {
        self.gpu.upload(&vec![T::small(9); len])
    }

    fn read<T: Number>(&self, memory: &Array) -> Result<Vec<T>> {
        self.gpu.download(memory)
    }

    fn broadcast<T: Number>(&self, data: &mut Array, root: usize) -> Result<()> {
        Ok(self.nccl.broadcast(std::slice::from_mut(data), root, &self.gpu.stream)?)
    }

    fn send<T: Number>(&self, data: &Array, to: usize) -> Result<()> {
        Ok(self.nccl.send(data, to, &self.gpu.stream)?)
    }

    fn recv<T: Number>(&self, data: &mut Array, from: usize) -> Result<()> {
        Ok(self.nccl.recv(data, from, &self.gpu.stream)?)
    }

    fn batch_send_recv<T: Number>(
        &self,
        sends: &mut [(usize, Array)],
        receives: &mut [(usize, Array)],
    ) -> Result<()> {
        let sends = sends.iter_mut().map(|(to, data)| P2pOp::Send { data, to: *to });
        let receives =
            receives.iter_mut().map(|(from, data)| P2pOp::Recv { buffer: data, from: *from });
        let mut ops: Vec<P2pOp<&mut Array>> = sends.chain(receives).collect();
        Ok(self.nccl.batch_send_recv(&mut ops, &self.gpu.stream)?)
    }
}
