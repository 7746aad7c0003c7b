//! Checks what a launcher has made: all collectives between its ranks, with their results.
//!
//! usage: collectives [check | late RANK | killed RANK]
//!
//! `late`: this rank does not come to a collective for a minute; `killed`: it is killed on the way
//! there.

use std::time::Duration;

use anyhow::{bail, ensure, Context, Result};
use flow_comm::{P2pOp, ProcessGroup, ReduceOp};
use rustix::process::{getpid, kill_process, Signal};

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let group = ProcessGroup::from_env()?;
    match &args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] | ["check"] => {
            check_sizes(&group)?;
            let subgroups = subgroups(&group)?;
            for subgroup in &subgroups {
                check(subgroup, 1000)?;
            }
            check_messages(&group)?;
            check_at_once(&group, &subgroups)?;
            println!("rank {} of {}: all is well", group.rank(), group.world_size());
            Ok(())
        }
        ["late", rank] => miss(&group, rank, || std::thread::sleep(Duration::from_secs(60))),
        ["killed", rank] => miss(&group, rank, || {
            let _ = kill_process(getpid(), Signal::KILL);
        }),
        other => bail!("{other:?}: must be check, late RANK or killed RANK"),
    }
}

fn miss(group: &ProcessGroup, rank: &str, what: impl FnOnce()) -> Result<()> {
    group.barrier()?;
    if group.rank() == rank.parse::<usize>().context("RANK")? {
        what();
    }
    group.all_reduce(&mut [1.0_f32; 1000], ReduceOp::Sum)?;
    Ok(())
}

fn check_sizes(group: &ProcessGroup) -> Result<()> {
    [0, 1, 7, 1000, 100_003, 2_000_000].into_iter().try_for_each(|len| check(group, len))
}

/// All collectives, each with `len` elements of every rank.
fn check(group: &ProcessGroup, len: usize) -> Result<()> {
    let (rank, size) = (group.rank(), group.world_size());
    // Small whole numbers: sums are exact.
    let value = |rank: usize, index: usize| ((rank * 31 + index) % 97) as f32;
    let own: Vec<f32> = (0..len).map(|index| value(rank, index)).collect();
    let sum = |index: usize| (0..size).map(|rank| value(rank, index)).sum::<f32>();
    let expect = |what: &str, got: &[f32], expected: &dyn Fn(usize) -> f32| -> Result<()> {
        let wrong = got.iter().enumerate().find(|&(index, &got)| got != expected(index));
        ensure!(
            wrong.is_none(),
            "rank {rank} of {:?}: {what} of {len}: {wrong:?} is wrong: {}",
            group.ranks(),
            expected(wrong.map_or(0, |(index, _)| index))
        );
        Ok(())
    };

    let mut data = own.clone();
    group.all_reduce(&mut data[..], ReduceOp::Sum)?;
    expect("all_reduce", &data, &sum)?;

    let mut shared = group.alloc_shared::<f32>(len)?;
    shared.copy_from_slice(&own);
    group.all_reduce(&mut shared, ReduceOp::Max)?;
    expect("all_reduce (max)", &shared, &|index| {
        (0..size).map(|rank| value(rank, index)).fold(0.0, f32::max)
    })?;

    for root in [0, size - 1] {
        let mut data = own.clone();
        group.broadcast(&mut data[..], root)?;
        expect("broadcast", &data, &|index| value(root, index))?;

        let mut data = own.clone();
        group.reduce(&mut data[..], ReduceOp::Sum, root)?;
        expect("reduce", &data, &|index| {
            if rank == root {
                sum(index)
            } else {
                value(rank, index)
            }
        })?;

        let mut gathered = vec![-1.0; len * size];
        group.gather(&own[..], (rank == root).then_some(&mut gathered[..]), root)?;
        let of_all = |index: usize| value(index / len, index % len);
        expect("gather", &gathered, &|index| if rank == root { of_all(index) } else { -1.0 })?;

        let all: Vec<f32> = (0..len * size).map(of_all).collect();
        let mut data = vec![0.0; len];
        group.scatter((rank == root).then_some(&all[..]), &mut data[..], root)?;
        expect("scatter", &data, &|index| value(rank, index))?;
    }

    let mut gathered = vec![0.0; len * size];
    group.all_gather(&own[..], &mut gathered[..])?;
    expect("all_gather", &gathered, &|index| value(index / len, index % len))?;

    let blocks: Vec<f32> = (0..len * size).map(|index| value(rank, index)).collect();
    let mut data = vec![0.0; len];
    group.reduce_scatter(&blocks[..], &mut data[..], ReduceOp::Sum)?;
    expect("reduce_scatter", &data, &|index| sum(rank * len + index))?;

    let mut turned = vec![0.0; len * size];
    group.all_to_all(&blocks[..], &mut turned[..])?;
    expect("all_to_all", &turned, &|index| value(index / len, rank * len + index % len))?;

    group.barrier()?;
    Ok(())
}

/// This rank's: with every other one, and with the one that is opposite.
fn subgroups(group: &ProcessGroup) -> Result<Vec<ProcessGroup>> {
    let size = group.world_size();
    let mut own = Vec::new();
    let every_other = (0..2.min(size)).map(|first| (first..size).step_by(2).collect::<Vec<_>>());
    let opposite = (0..size / 2).map(|rank| vec![rank, size - 1 - rank]);
    for ranks in every_other.chain(opposite) {
        own.extend(group.new_group(&ranks)?);
    }
    Ok(own)
}

/// Two messages from each rank to each other, large ones in several pieces.
fn check_messages(group: &ProcessGroup) -> Result<()> {
    let (rank, size) = (group.rank(), group.world_size());
    for len in [1, 1_000_000] {
        for distance in 1..size {
            let (to, from) = ((rank + distance) % size, (rank + size - distance) % size);
            let mail: Vec<Vec<i64>> =
                (0..2).map(|number| vec![(rank * 10 + number) as i64; len]).collect();
            let sent: Vec<_> = mail
                .iter()
                .map(|data| group.send_async(data.clone(), to))
                .collect::<Result<_, _>>()?;
            for number in 0..2 {
                let mut data = vec![0_i64; len];
                group.recv(&mut data[..], from)?;
                let expected = (from * 10 + number) as i64;
                ensure!(
                    data.iter().all(|&got| got == expected),
                    "rank {rank}: a wrong message from rank {from}"
                );
            }
            for work in sent {
                work.wait()?;
            }
        }
    }
    check_batch(group)?;
    check_tags(group)
}

/// All ranks send to all others and receive from all, at the same time; they list the sends first.
fn check_batch(group: &ProcessGroup) -> Result<()> {
    const LEN: usize = 500_000;
    let (rank, size) = (group.rank(), group.world_size());
    let others = || (0..size).filter(|&other| other != rank);
    let mut sent: Vec<Vec<i64>> = others().map(|to| vec![(rank * size + to) as i64; LEN]).collect();
    let mut received: Vec<Vec<i64>> = others().map(|_| vec![0; LEN]).collect();
    let sends = others().zip(&mut sent).map(|(to, data)| P2pOp::Send { data: &mut data[..], to });
    let receives = others().zip(&mut received);
    let receives = receives.map(|(from, data)| P2pOp::Recv { buffer: &mut data[..], from });
    let mut ops: Vec<P2pOp<&mut [i64]>> = sends.chain(receives).collect();
    group.batch_send_recv(&mut ops)?;
    for (from, data) in others().zip(received) {
        let expected = (from * size + rank) as i64;
        ensure!(data.iter().all(|&got| got == expected), "rank {rank}: a wrong batch from {from}");
    }
    Ok(())
}

/// Each rank sends to all others: what is sent last is received first, and the rest from any rank.
fn check_tags(group: &ProcessGroup) -> Result<()> {
    let (rank, size) = (group.rank(), group.world_size());
    let others = || (0..size).filter(|&other| other != rank);
    let mut sent = Vec::new();
    for to in others() {
        sent.push(group.send_with_tag_async(vec![rank as i64; 100_000], to, 1)?);
        sent.push(group.send_with_tag_async(vec![rank as i64], to, 2)?);
    }
    for from in others() {
        let mut last = [0_i64];
        group.recv_with_tag(&mut last, from, 2)?;
        ensure!(last == [from as i64], "rank {rank}: a wrong message from rank {from}");
    }
    let mut senders = Vec::new();
    for _ in others() {
        let mut data = vec![0_i64; 100_000];
        let from = group.recv_any(&mut data, 1)?;
        ensure!(
            data.iter().all(|&got| got == from as i64),
            "rank {rank}: a wrong message from rank {from}"
        );
        senders.push(from);
    }
    senders.sort_unstable();
    ensure!(senders.iter().copied().eq(others()), "rank {rank}: messages from {senders:?}");
    sent.into_iter().try_for_each(|work| work.wait().map(drop))?;
    Ok(())
}

/// Collectives of several groups, each on a thread.
fn check_at_once(group: &ProcessGroup, subgroups: &[ProcessGroup]) -> Result<()> {
    std::thread::scope(|scope| {
        let groups = subgroups.iter().chain([group]);
        let threads: Vec<_> = groups.map(|group| scope.spawn(|| check(group, 50_000))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("no check panics"))
    })
}
