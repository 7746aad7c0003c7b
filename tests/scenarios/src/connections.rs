//! Connections between nodes: all groups of two processes share one.

use std::fs;
use std::thread;
use std::time::Duration;

use crate::beside;
use crate::registry::{Scenario, by_hand, scenario};
use anyhow::{Result, bail, ensure};
use flow_comm::{ProcessGroup, ReduceOp};

use crate::groups::{sum_of_ranks, use_all};

pub const SCENARIOS: &[Scenario] = &[
    scenario("groups_share_one_connection", share, &[by_hand(&[1, 1]), by_hand(&[2, 2])]),
    scenario("groups_move_data_at_once", at_once, &[by_hand(&[1, 1]), by_hand(&[2, 1])]),
];

/// A connection has two sockets: for data, and for what processes tell each other about groups.
const SOCKETS: usize = 2;
/// Bytes of a message that neither the kernel's buffers nor a window can hold.
const LARGE: usize = 40 << 20;

fn sockets() -> Result<usize> {
    let mut count = 0;
    for fd in fs::read_dir("/proc/self/fd")? {
        let target = fs::read_link(fd?.path()).unwrap_or_default();
        count += usize::from(target.to_string_lossy().starts_with("socket:"));
    }
    Ok(count)
}

/// An attempt to connect that came second ends a moment later.
fn come_to(expected: usize) -> Result<()> {
    for _ in 0..200 {
        if sockets()? == expected {
            return Ok(());
        }
        thread::sleep(Duration::from_millis(20));
    }
    bail!("{} sockets instead of {expected}", sockets()?)
}

/// How many there are, once that stays.
fn settled() -> Result<usize> {
    let mut last = sockets()?;
    let mut looks = 0;
    while looks < 25 {
        thread::sleep(Duration::from_millis(20));
        let now = sockets()?;
        looks = if now == last { looks + 1 } else { 0 };
        last = now;
    }
    Ok(last)
}

/// Two nodes of as many ranks.
fn share(group: &ProcessGroup) -> Result<()> {
    group.barrier()?;
    // Leaders have one connection, others none.
    let of_one_group = settled()?;
    let groups = (0..8).map(|_| group.duplicate()).collect::<Result<Vec<_>, _>>()?;
    for group in &groups {
        ensure!(sum_of_ranks(group)? == (0..group.world_size() as i64).sum::<i64>());
    }
    come_to(of_one_group)?;
    // Messages go round: with two ranks a node, each has a neighbour elsewhere that is not its
    // leader's.
    groups.iter().try_for_each(use_all)?;
    group.barrier()?;
    let neighbours = usize::from(group.local_world_size() > 1);
    come_to(of_one_group + neighbours * SOCKETS)?;
    drop(groups);
    group.barrier()?;
    come_to(of_one_group + neighbours * SOCKETS)?;
    // A rank that ends closes its connections, which others still count.
    Ok(group.barrier()?)
}

/// In one group messages, which both send at first, in the other reductions.
fn at_once(group: &ProcessGroup) -> Result<()> {
    let messages = group.duplicate()?;
    let sums = group.duplicate()?;
    let rank = group.rank();
    let size = group.world_size();
    let next = (rank + 1) % size;
    let previous = (rank + size - 1) % size;
    thread::scope(|scope| {
        let exchange = scope.spawn(|| -> Result<()> {
            for round in 0..5_u8 {
                let sent = beside::send(&messages, vec![rank as u8 + round; LARGE], next, 0)?;
                let mut received = vec![0; LARGE];
                messages.recv(&mut received, previous)?;
                ensure!(received.iter().all(|&byte| byte == previous as u8 + round));
                sent.wait()?;
            }
            Ok(())
        });
        for round in 0..10 {
            let mut data = vec![rank as f32 + round as f32; LARGE / 4];
            sums.all_reduce(&mut data, ReduceOp::Sum)?;
            let sum: usize = (0..size).map(|rank| rank + round).sum();
            ensure!(data.iter().all(|&element| element == sum as f32));
        }
        exchange.join().expect("it does not panic")
    })
}
