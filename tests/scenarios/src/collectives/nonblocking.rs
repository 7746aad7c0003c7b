//! What only process groups on the host have: nonblocking collectives, parts of shared buffers, and
//! uneven arguments that are refused.

use anyhow::{Result, ensure};
use flow_comm::{Lane, ProcessGroup, ReduceOp, SharedBuffer, Work};

use super::backend::Backend;
use super::host::{Host, Memory, Place};
use super::reference::{Number, Values};
use crate::beside;

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
    let size = group.world_size();
    let fitting = vec![1; group.world_size()];
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
    group.all_gather_v(&[7_i32], &mut all, &fitting)?;
    let mut reduced = [0];
    group.reduce_scatter_v(&all, &mut reduced, &fitting, ReduceOp::Sum)?;
    ensure!(reduced == [7 * size as i32]);
    group.all_to_all_v(&all, &fitting, &mut output, &fitting)?;
    ensure!(output == vec![7; size]);
    Ok(())
}

/// Starts a collective that writes into `output`, which comes back.
fn start<O: Send + 'static>(
    group: &ProcessGroup,
    mut output: O,
    run: impl FnOnce(&ProcessGroup, &mut O) -> flow_comm::Result<()> + Send + 'static,
) -> flow_comm::Result<Work<O>> {
    group.start(Lane::Collectives, "nonblocking", move |group| {
        run(group, &mut output)?;
        Ok(output)
    })
}

/// Every collective started before any is waited for, with blocking ones in between.
fn overlapping<T: Number>(group: &ProcessGroup, nodes: &[u32], count: usize) -> Result<()> {
    let rank = group.rank();
    let size = group.world_size();
    let root = size - 1;
    let at_root = |present: bool, len: usize| present.then(|| own::<T>(rank, len));
    let blank = |len: usize| vec![T::small(0); len];
    let shared = |len: usize| -> Result<SharedBuffer<T>> {
        let mut buffer = group.alloc_shared(len)?;
        buffer.iter_mut().enumerate().for_each(|(index, to)| *to = value(rank, index));
        Ok(buffer)
    };

    let all_reduce = beside::all_reduce(group, own::<T>(rank, count), ReduceOp::Sum)?;
    let all_reduce_in_place = beside::all_reduce(group, shared(count)?, ReduceOp::Max)?;
    let reduce = start(group, own::<T>(rank, count), move |group, data| {
        group.reduce(data, ReduceOp::Min, root)
    })?;
    let broadcast =
        start(group, own::<T>(rank, count), move |group, data| group.broadcast(data, root))?;
    let input = shared(count)?;
    let all_gather =
        start(group, blank(size * count), move |group, output| group.all_gather(&input, output))?;

    let mut between = own::<T>(rank, count);
    group.all_reduce(&mut between, ReduceOp::Product)?;
    check("blocking all_reduce between", &between, |index| {
        Values::Any.all_reduced(ReduceOp::Product, nodes, count, index)
    })?;

    let input = own::<T>(rank, size * count);
    let reduce_scatter = start(group, blank(count), move |group, output| {
        group.reduce_scatter(&input, output, ReduceOp::Avg)
    })?;
    let input = own::<T>(rank, size * count);
    let all_to_all =
        start(group, blank(size * count), move |group, output| group.all_to_all(&input, output))?;
    let input = own::<T>(rank, count);
    let gather = start(group, at_root(rank == root, size * count), move |group, output| {
        group.gather(&input, output.as_mut(), root)
    })?;
    let input = at_root(rank == root, size * count);
    let scatter = start(group, blank(count), move |group, output| {
        group.scatter(input.as_ref(), output, root)
    })?;
    let barrier = beside::barrier(group)?;

    group.barrier()?;
    barrier.wait()?;
    check("scatter", &scatter.wait()?, |index| value(root, rank * count + index))?;
    let gathered = gather.wait()?.unwrap_or_default();
    check("gather", &gathered, |index| value(index / count, index % count))?;
    check("all_to_all", &all_to_all.wait()?, |i| value(i / count, rank * count + i % count))?;
    let scattered = reduce_scatter.wait()?;
    check("reduce_scatter", &scattered, |index| {
        reduced(ReduceOp::Avg, size, rank * count + index)
    })?;
    check("all_gather", &all_gather.wait()?, |index| value(index / count, index % count))?;
    check("broadcast", &broadcast.wait()?, |index| value(root, index))?;
    let kept =
        |index| if rank == root { reduced(ReduceOp::Min, size, index) } else { value(rank, index) };
    check("reduce", &reduce.wait()?, kept)?;
    let in_place = all_reduce_in_place.wait()?;
    check("all_reduce, shared", &in_place, |index| {
        Values::Any.all_reduced(ReduceOp::Max, nodes, count, index)
    })?;
    check("all_reduce", &all_reduce.wait()?, |index| {
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
        received.push((other, beside::recv(group, vec![T::small(0); count], other, 0)?));
    }
    for &other in &others {
        let mut first = group.alloc_shared(count)?;
        first.copy_from_slice(&own::<T>(rank, count));
        sent.push(beside::send(group, Memory::Shared(first), other, 0)?);
        sent.push(beside::send(group, Memory::Ordinary(own::<T>(rank + 100, count)), other, 0)?);
    }
    let mut all = own::<T>(rank, count);
    group.all_reduce(&mut all, ReduceOp::Sum)?;
    for &other in &others {
        let mut second = vec![T::small(0); count];
        group.recv(&mut second, other)?;
        check("recv after one beside", &second, |index| value(other + 100, index))?;
    }
    for (other, work) in received {
        check("recv beside", &work.wait()?, |index| value(other, index))?;
    }
    sent.into_iter().try_for_each(|work| work.wait().map(drop))?;
    Ok(())
}

/// Parts of shared buffers that begin at a different, odd place on every rank.
fn unaligned_parts(group: &ProcessGroup, nodes: &[u32]) -> Result<()> {
    let rank = group.rank();
    let count = 50_001;
    let start = 1 + 3 * rank;
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
