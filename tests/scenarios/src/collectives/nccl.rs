//! Process groups on GPUs, over NCCL.

use std::sync::Arc;

use anyhow::{Result, ensure};
use flow_comm::nccl::{CudaGroup, Device};
use flow_comm::{DType, P2pOp, ProcessGroup, ReduceOp};

use super::backend::Backend;
use super::reference::{Number, Values};
use super::table::check_types;
use crate::nccl::memory::{Array, Gpu};

pub fn all(group: &ProcessGroup) -> Result<()> {
    let device = group.use_cuda()?;
    let shares = std::env::var_os("FLOW_TEST_SHARE_GPUS").is_some_and(|value| value == "1");
    ensure!(
        shares || device.ordinal() == group.local_rank(),
        "{device:?} is not the GPU of this local rank"
    );
    let check = OnGpu::new(group, &device)?;
    check_types(&check, |_| vec![0, 1, 5, 1000, 70_001])?;
    check.several_in_a_broadcast()?;
    check.wrong_counts()?;
    check.nccl.barrier()?;
    Ok(())
}

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

    /// Arrays of two types.
    fn several_in_a_broadcast(&self) -> Result<()> {
        let rank = self.nccl.rank() as u8;
        let root = self.nccl.size() as u8 - 1;
        let mut arrays =
            [self.gpu.upload(&[i32::from(rank); 1000])?, self.gpu.upload(&[f32::from(rank); 3])?];
        self.nccl.broadcast(&mut arrays, root.into(), &self.gpu.stream)?;
        let [whole, float] = &arrays;
        ensure!(self.gpu.download::<i32>(whole)? == [i32::from(root); 1000]);
        ensure!(self.gpu.download::<f32>(float)? == [f32::from(root); 3]);
        Ok(())
    }

    fn wrong_counts(&self) -> Result<()> {
        let size = self.nccl.size();
        let input = self.gpu.upload(&[0_i32])?;
        let mut output = self.gpu.upload(&[0_i32; 2])?;
        let counts = vec![1; size + 1];
        let wrong = self.nccl.all_gather_v(&input, &mut output, &counts, &self.gpu.stream);
        let wrong = wrong.err().map(|error| error.to_string()).unwrap_or_default();
        let expected = format!("all_gather_v: counts has {} entries for {size} ranks", size + 1);
        ensure!(wrong.contains(&expected), "{wrong:?}");
        Ok(())
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
