//! Barriers: every rank contributes nothing, and waits for the others.

use super::host::HostCollectives;
use super::read::read_from_all;
use crate::descriptor::{Location, OpDescriptor};
use crate::error::Result;
use crate::group::ProcessGroup;
use crate::kind::Kind;
use crate::memory::{BufferView, Buffers};
use crate::nccl::CudaGroup;
use crate::shm::contribution::{Contribution, Contributors, Readers, equal_extents};
use flow_kernels::cuda::{DeviceBuffer, DeviceMemory};
use flow_kernels::{DType, ReduceOp};

impl ProcessGroup {
    /// Returns when all ranks of the group have called it.
    pub fn barrier(&self) -> Result<()> {
        let operation = OpDescriptor::new(Kind::Barrier, DType::U8, 0);
        self.collective(operation, Buffers::new(BufferView::NONE, BufferView::NONE), run)
    }

    /// Returns when all ranks of the group on this machine have called it. All ranks of the group call
    /// this, in the order of their collectives. That is checked on each machine, and not between them.
    pub fn barrier_on_machine(&self) -> Result<()> {
        let operation = OpDescriptor::new(Kind::BarrierOnMachine, DType::U8, 0);
        let nothing = Buffers::new(BufferView::NONE, BufferView::NONE);
        self.collective(operation, nothing, run_on_machine)
    }
}

/// Returns when all ranks of the machine have called it.
fn run_on_machine(host: &HostCollectives, operation: OpDescriptor, _: Buffers) -> Result<()> {
    let rounds = &host.rounds;
    let state = &mut *rounds.lock();
    let round = rounds.acquire(state, &operation)?;
    rounds.publish(round, &operation, Location::Staged);
    rounds.arrive(round);
    rounds.wait_locals_arrived(round, &operation)?;
    rounds.local_locations(round, &operation, &|_| 0)?;
    if host.core.is_leader() {
        rounds.arrive_for_remote(round);
    }
    rounds.done(round);
    Ok(())
}

/// Returns when all ranks have called it.
fn run(host: &HostCollectives, operation: OpDescriptor, _: Buffers) -> Result<()> {
    let contribution = Contribution {
        from: Contributors::All,
        to: Readers::All,
        data: None,
        blocks: 1,
        block_bytes: 0,
        extent: &equal_extents(0),
    };
    read_from_all(host, operation, &contribution, &mut |_, _| {})
}

impl CudaGroup {
    /// Returns when all ranks have called it and all their earlier operations are over.
    pub fn barrier(&self) -> Result<()> {
        self.member(&"barrier")?;
        let memory = DeviceMemory::allocate(self.device(), DType::F32.size())
            .map_err(|e| self.system("barrier", e.to_string()))?;
        let mut word = Word(memory);
        let operation = OpDescriptor::new(Kind::Barrier, DType::F32, 1);
        let done = self.enqueue(operation, &[], |communicator, stream| {
            word.0.fill_zero(stream)?;
            // SAFETY: freeing the word waits for the device.
            unsafe { communicator.all_reduce(&mut word, ReduceOp::Sum, stream)? };
            Ok(())
        })?;
        self.wait("barrier", &done)
    }
}

/// One element for a barrier.
struct Word(DeviceMemory);

// SAFETY: the memory holds one f32 and is freed when the device has done all its work.
unsafe impl DeviceBuffer for Word {
    fn address(&self) -> u64 {
        self.0.address()
    }

    fn bytes(&self) -> usize {
        self.0.bytes()
    }

    fn dtype(&self) -> DType {
        DType::F32
    }
}
