//! Many tensors in one operation, and tensors in memory that all ranks share.

use anyhow::{Context, Result, ensure};
use flow_tensor::{
    ArenaAllocatorGuard, CoalescedBroadcast, ProcessGroup, ReduceOp, TensorCollectives,
};
use tch::{Kind, Tensor};

const KINDS: [Kind; 4] = [Kind::Float, Kind::Int64, Kind::Float, Kind::Double];

/// Tensors of some kinds and layouts, one of them empty.
fn tensors(group: &ProcessGroup, rank: usize) -> Vec<Tensor> {
    let tensor = |(index, kind): (usize, Kind)| {
        let count = 12 * index as i64 * index as i64;
        let numbers = Tensor::arange(count, (Kind::Int64, group.device())).remainder(100);
        let tensor = (numbers + rank as i64).to_kind(kind).view([-1, 4]);
        if index == 2 { tensor.tr() } else { tensor }
    };
    KINDS.into_iter().enumerate().map(tensor).collect()
}

pub fn broadcast(group: &ProcessGroup) -> Result<()> {
    let own = tensors(group, group.rank());
    let flag = Tensor::full([3], (group.rank() % 2) as i64, (Kind::Bool, group.device()));
    let named = own.iter().chain([&flag]).enumerate();
    let named = named.map(|(index, tensor)| (index.to_string(), tensor.shallow_clone()));
    let mut broadcast = CoalescedBroadcast::new(group, named.collect())?;
    for root in (0..group.world_size()).rev() {
        for (tensor, mine) in own.iter().zip(tensors(group, group.rank())) {
            tensor.shallow_clone().copy_(&mine);
        }
        let _ = flag.shallow_clone().fill_((group.rank() % 2) as i64);
        broadcast.run(group, root)?;
        for (tensor, expected) in own.iter().zip(tensors(group, root)) {
            ensure!(*tensor == expected, "from {root}: {tensor} instead of {expected}");
        }
        ensure!(flag.to_kind(Kind::Int64).max().int64_value(&[]) == (root % 2) as i64);
    }
    Ok(())
}

pub fn all_reduce(group: &ProcessGroup) -> Result<()> {
    let mut own = tensors(group, group.rank());
    for op in [ReduceOp::Sum, ReduceOp::Max] {
        own.iter_mut().zip(tensors(group, group.rank())).for_each(|(to, from)| to.copy_(&from));
        group.all_reduce_coalesced(&mut own, op)?;
        for (index, tensor) in own.iter().enumerate() {
            let all: Vec<Tensor> = (0..group.world_size())
                .map(|rank| tensors(group, rank).swap_remove(index))
                .collect();
            let all = Tensor::stack(&all, 0);
            let expected = match op {
                ReduceOp::Sum => all.sum_dim_intlist([0i64].as_slice(), false, KINDS[index]),
                _ => all.amax([0i64].as_slice(), false),
            };
            ensure!(*tensor == expected, "{op}: {tensor} instead of {expected}");
        }
    }
    group.all_reduce_coalesced(&mut [], ReduceOp::Sum)?;
    let ones = |kind| Tensor::ones([2], (kind, group.device()));
    for bad in [ones(Kind::Bool), ones(Kind::Float).expand([3, 2], false)] {
        let mut both = [ones(Kind::Float), bad];
        let error = group.all_reduce_coalesced(&mut both, ReduceOp::Sum).err();
        let text = error.context("no error")?.to_string();
        ensure!(text.contains("all_reduce_coalesced: ") && text.lines().count() == 1, "{text}");
    }
    Ok(())
}

/// The allocator without a `Ddp`.
pub fn allocator(group: &ProcessGroup) -> Result<()> {
    const BYTES: usize = 4 << 20;
    let tensor = || Tensor::full([BYTES as i64 / 4], 1.0, (Kind::Float, tch::Device::Cpu));
    let taken = |make: &dyn Fn() -> Tensor| {
        let (before, _) = group.arena().usage();
        let tensor = make();
        (tensor, group.arena().usage().0 >= before + BYTES)
    };
    ensure!(!taken(&tensor).1, "without a guard tensors come from the arena");
    let guard = ArenaAllocatorGuard::install(group.arena_handle()).context("not installed")?;
    ensure!(ArenaAllocatorGuard::current().is_some());
    let again = ArenaAllocatorGuard::install(group.arena_handle()).context("not installed")?;
    drop(guard);
    let (mut sum, shared) = taken(&tensor);
    ensure!(shared, "with a guard tensors come from elsewhere");
    group.all_reduce_tensor(&mut sum, ReduceOp::Sum)?;
    drop(again);
    ensure!(ArenaAllocatorGuard::current().is_none());
    let (other, shared) = taken(&tensor);
    ensure!(!shared, "without a guard tensors still come from the arena");
    // A tensor outlives the guard.
    ensure!((&sum - &other * group.world_size() as f64).abs().max().double_value(&[]) == 0.0);
    Ok(())
}
