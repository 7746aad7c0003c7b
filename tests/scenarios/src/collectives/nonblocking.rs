//! What only process groups on the host have: nonblocking collectives, parts of shared buffers, and
//! uneven arguments that are refused.

use anyhow::{ensure, Result};
use flow_comm::{ProcessGroup, ReduceOp, SharedBuffer, Work};

use super::backend::Backend;
use super::host::{Host, Memory, Place};
use super::reference::{Number, Values};

pub fn all(group: &ProcessGroup) -> Result<()> {
    let host = Host::new(group, Place::Ordinary)?;
    let nodes = host.nodes();
    for count in [0, 3, 1000, 70_000] {
        overlapping::<f32>(group, nodes, count)?;
        overlapping::<u8>(group, nodes, count)?;
        crossing_messages::<f64>(group, count)?;
    }
    unaligned_parts(group, nodes)?;
    uneven_arguments(group)?;
    group.barrier()?;
    Ok(())
}

fn value<T: Number>(rank: usize, index: usize) -> T {
    Values::Any.of(rank, index)
}

fn reduced<T: Number>(op: ReduceOp, size: usize, index: usize) -> T {
    Values::Any.reduced(op, size, index)
}

fn check<T: Number>(case: &str, got: &[T], expected: impl Fn(usize) -> T) -> Result<()> {
    let wrong =
        got.iter().enumerate().find(|&(index, element)| element.bits() != expected(index).bits());
    if let Some((index, element)) = wrong {
        anyhow::bail!("{case}: element {index} is {element:?} and not {:?}", expected(index));
    }
    Ok(())
}

/// What uneven collectives refuse, with the group usable after it.
fn uneven_arguments(group: &ProcessGroup) -> Result<()> {
    let (size, fitting) = (group.world_size(), vec![1; group.world_size()]);
    let refused = |result: flow_comm::Result<()>, reason: &str| {
        let error = result.expect_err("refused").to_string();
        ensure!(error.contains(reason) && !error.contains('\n'), "{error}");
        Ok(())
    };
    let mut all = vec![0_i32; size];
    let few = &fitting[1..];
    refused(group.all_gather_v(&[1], &mut all, few), "counts has")?;
    refused(group.all_gather_v(&[1, 2], &mut all, &fitting), "input has 2 elements")?;
    refused(group.all_gather_v(&[1_i64], &mut all, &fitting), "must be alike")?;
    let result = group.reduce_scatter_v(&all, &mut [0, 0], &fitting, ReduceOp::Sum);
    refused(result, "output has 2 elements, its counts say 1")?;
    let mut output = vec![0; size];
    refused(group.all_to_all_v(&all, few, &mut output, &fitting), "input_counts has")?;
    refused(group.all_to_all_v(&all, &vec![usize::MAX; size], &mut output, &fitting), "sum up")?;
    let gathered = group.all_gather_v_async([7_i32], all, fitting.clone())?.wait()?.1;
    let reduced =
        group.reduce_scatter_v_async(gathered.clone(), [0], fitting.clone(), ReduceOp::Sum)?;
    ensure!(reduced.wait()?.1 == [7 * size as i32]);
    let exchanged = group.all_to_all_v_async(gathered, fitting.clone(), output, fitting)?;
    ensure!(exchanged.wait()?.1 == vec![7; size]);
    Ok(())
}

/// Every collective started before any is waited for, with blocking ones in between.
fn overlapping<T: Number>(group: &ProcessGroup, nodes: &[u32], count: usize) -> Result<()> {
    let (rank, size) = (group.rank(), group.world_size());
    let root = size - 1;
    let at_root = |present: bool, len: usize| present.then(|| own::<T>(rank, len));
    let blank = |len: usize| vec![T::small(0); len];
    let shared = |len: usize| -> Result<SharedBuffer<T>> {
        let mut buffer = group.alloc_shared(len)?;
        buffer.iter_mut().enumerate().for_each(|(index, to)| *to = value(rank, index));
        Ok(buffer)
    };

    let all_reduce = group.all_reduce_async(own::<T>(rank, count), ReduceOp::Sum)?;
    let all_reduce_in_place = group.all_reduce_async(shared(count)?, ReduceOp::Max)?;
    let reduce = group.reduce_async(own::<T>(rank, count), ReduceOp::Min, root)?;
    let broadcast = group.broadcast_async(own::<T>(rank, count), root)?;
    let all_gather = group.all_gather_async(shared(count)?, blank(size * count))?;

    let mut between = own::<T>(rank, count);
    group.all_reduce(&mut between, ReduceOp::Product)?;
    check("blocking all_reduce between", &between, |index| {
        Values::Any.all_reduced(ReduceOp::Product, nodes, count, index)
    })?;

    let reduce_scatter =
        group.reduce_scatter_async(own::<T>(rank, size * count), blank(count), ReduceOp::Avg)?;
    let all_to_all = group.all_to_all_async(own::<T>(rank, size * count), blank(size * count))?;
    let gather =
        group.gather_async(own::<T>(rank, count), at_root(rank == root, size * count), root)?;
    let scatter = group.scatter_async(at_root(rank == root, size * count), blank(count), root)?;
    let barrier = group.barrier_async()?;

    group.barrier()?;
    barrier.wait()?;
    check("scatter_async", &scatter.wait()?.1, |index| value(root, rank * count + index))?;
    let gathered = gather.wait()?.1.unwrap_or_default();
    check("gather_async", &gathered, |index| value(index / count, index % count))?;
    check("all_to_all_async", &all_to_all.wait()?.1, |i| {
        value(i / count, rank * count + i % count)
    })?;
    let scattered = reduce_scatter.wait()?.1;
    check("reduce_scatter_async", &scattered, |index| {
        reduced(ReduceOp::Avg, size, rank * count + index)
    })?;
    check("all_gather_async", &all_gather.wait()?.1, |index| value(index / count, index % count))?;
    check("broadcast_async", &broadcast.wait()?, |index| value(root, index))?;
    let kept =
        |index| if rank == root { reduced(ReduceOp::Min, size, index) } else { value(rank, index) };
    check("reduce_async", &reduce.wait()?, kept)?;
    let in_place = all_reduce_in_place.wait()?;
    check("all_reduce_async, shared", &in_place, |index| {
        Values::Any.all_reduced(ReduceOp::Max, nodes, count, index)
    })?;
    check("all_reduce_async", &all_reduce.wait()?, |index| {
        Values::Any.all_reduced(ReduceOp::Sum, nodes, count, index)
    })
}

/// Every rank sends to and receives from every other at once, in shared and ordinary memory;
/// messages between two ranks keep their order.
fn crossing_messages<T: Number>(group: &ProcessGroup, count: usize) -> Result<()> {
    let rank = group.rank();
    let others: Vec<usize> = (0..group.world_size()).filter(|&other| other != rank).collect();
    let mut received: Vec<(usize, Work<Vec<T>>)> = Vec::new();
    let mut sent: Vec<Work<Memory<T>>> = Vec::new();
    for &other in &others {
        received.push((other, group.recv_async(vec![T::small(0); count], other)?));
    }
    for &other in &others {
        let mut first = group.alloc_shared(count)?;
        first.copy_from_slice(&own::<T>(rank, count));
        sent.push(group.send_async(Memory::Shared(first), other)?);
        sent.push(group.send_async(Memory::Ordinary(own::<T>(rank + 100, count)), other)?);
    }
    let mut all = own::<T>(rank, count);
    group.all_reduce(&mut all, ReduceOp::Sum)?;
    for &other in &others {
        let mut second = vec![T::small(0); count];
        group.recv(&mut second, other)?;
        check("recv after recv_async", &second, |index| value(other + 100, index))?;
    }
    for (other, work) in received {
        check("recv_async", &work.wait()?, |index| value(other, index))?;
    }
    sent.into_iter().try_for_each(|work| work.wait().map(drop))?;
    Ok(())
}

/// Parts of shared buffers that begin at a different, odd place on every rank.
fn unaligned_parts(group: &ProcessGroup, nodes: &[u32]) -> Result<()> {
    let rank = group.rank();
    let (count, start) = (50_001, 1 + 3 * rank);
    let mut data = group.alloc_shared::<f32>(start + count + 5)?;
    data[start..start + count].copy_from_slice(&own::<f32>(rank, count));
    group.all_reduce(&mut data[start..start + count], ReduceOp::Sum)?;
    check("all_reduce of a part", &data[start..start + count], |index| {
        Values::Any.all_reduced(ReduceOp::Sum, nodes, count, index)
    })?;
    let around = data[..start].iter().chain(&data[start + count..]);
    ensure!(
        around.into_iter().all(|&element| element == 0.0),
        "all_reduce of a part wrote beside it"
    );
    Ok(())
}

fn own<T: Number>(rank: usize, len: usize) -> Vec<T> {
    (0..len).map(|index| value(rank, index)).collect()
}
