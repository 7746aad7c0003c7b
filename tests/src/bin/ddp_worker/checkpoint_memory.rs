//! The memory that a rank takes while it saves and resumes.

use anyhow::{Context, Result, ensure};
use flow_comm::ProcessGroup;
use flow_ddp::{Checkpoints, DistributedSampler, Fsdp, ZeroRedundancyOptimizer};
use tch::nn::{Adam, VarStore};
use tch::{Device, Kind, Tensor};

use crate::checkpoints::memory;
use crate::helpers::own_group;

/// What a rank may take beyond its part: pieces that are written, blocks that are read.
const MORE: u64 = 40 << 20;
/// The bytes of the model, most of which are in one weight.
const MODEL: u64 = 128 << 20;

/// An `Fsdp` and its Adam.
struct Training {
    store: VarStore,
    model: Fsdp<()>,
    optimizer: ZeroRedundancyOptimizer,
}

impl Training {
    fn new(group: &ProcessGroup) -> Result<Self> {
        let store = VarStore::new(Device::Cpu);
        let small = 1000;
        let elements = [MODEL as i64 / 4 - small, small];
        for (name, elements) in ["large", "small"].into_iter().zip(elements) {
            let numbers = Tensor::ones(elements, (Kind::Float, Device::Cpu));
            let _ = store.root().add(name, numbers, true);
        }
        let model = Fsdp::new((), &store, group)?;
        let optimizer = model.optimizer(Adam::default(), 1e-3)?;
        Ok(Self { store, model, optimizer })
    }
}

/// A rank that saves takes no memory for it but some pieces. One that resumes takes its part of what is
/// saved, and some pieces: also where other ranks have saved it.
pub fn in_parts(group: &ProcessGroup) -> Result<()> {
    let mut pid = [i64::from(std::process::id())];
    group.broadcast(&mut pid, 0)?;
    let folder = std::env::temp_dir().join(format!("flow-checkpoint-memory-{}", pid[0]));
    let fewer = group.new_group(&(0..group.world_size() - 1).collect::<Vec<_>>())?;
    let alone = own_group(group)?;
    let all = Some(group);
    let alone = Some(&alone).filter(|_| group.rank() == 0);
    for (savers, resumers) in [(all, fewer.as_ref()), (all, alone), (alone, all), (all, all)] {
        if let Some(savers) = savers {
            let more = saved(savers, &folder)?;
            ensure!(more <= MORE, "saving takes {more} bytes");
        }
        group.barrier()?;
        if let Some(resumers) = resumers {
            let own = 3 * MODEL / resumers.world_size() as u64;
            let more = resumed(resumers, &folder)?;
            ensure!(more <= own + MORE, "resuming takes {more} bytes, and {own} are its part");
        }
        group.barrier()?;
        if group.rank() == 0 {
            std::fs::remove_dir_all(&folder)?;
        }
        group.barrier()?;
    }
    Ok(())
}

fn saved(group: &ProcessGroup, folder: &std::path::Path) -> Result<u64> {
    let Training { store, model, optimizer } = Training::new(group)?;
    let sums = store.trainable_variables().into_iter().map(|weight| weight.sum(Kind::Float));
    optimizer.backward_step(&sums.sum::<Tensor>())?;
    let mut checkpoints = Checkpoints::open(folder, group)?;
    let sampler = DistributedSampler::new(1, group);
    at_most(|| Ok(checkpoints.save(1, &model, &store, &optimizer, &sampler, &())?))
}

fn resumed(group: &ProcessGroup, folder: &std::path::Path) -> Result<u64> {
    let Training { store, model: _model, mut optimizer } = Training::new(group)?;
    let mut checkpoints = Checkpoints::open(folder, group)?;
    let mut sampler = DistributedSampler::new(1, group);
    at_most(|| {
        let checkpoint = checkpoints.latest::<()>()?.context("it was saved")?;
        Ok(checkpoint.resume(&store, &mut optimizer, &mut sampler)?)
    })
}

/// Returns the bytes that this process has more of at most, while it does some work.
fn at_most(work: impl FnOnce() -> Result<()>) -> Result<u64> {
    // From here on the kernel counts anew how much there is at most.
    std::fs::write("/proc/self/clear_refs", "5")?;
    let before = memory("VmRSS")?;
    work()?;
    Ok(memory("VmHWM")?.saturating_sub(before))
}
